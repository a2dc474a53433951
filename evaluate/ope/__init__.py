"""Off-policy evaluation: what a policy would have been worth, from logs of another one."""
