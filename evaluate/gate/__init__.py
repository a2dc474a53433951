"""The gate: what of a policy may be deployed, judged on runs that nobody trained on."""
