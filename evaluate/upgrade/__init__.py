"""Compares the decisions of two NCCL releases, by their cost models."""
