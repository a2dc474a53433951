"""Readings of GPUs and NICs while trials run."""
