"""Readers of what nccl-tests and NCCL's log print."""
