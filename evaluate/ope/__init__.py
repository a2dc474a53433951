"""Off-policy evaluation: a policy's value, estimated from logs of another policy."""
