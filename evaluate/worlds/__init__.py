"""The benchmark of policies on frozen simulated worlds with known true times."""
