"""The gate: which bins of a policy may be deployed, judged on fresh runs."""
