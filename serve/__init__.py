"""Deploying a policy: artifact, decision tables, the NCCL tuner plugin."""
