"""The embedded simulator: a runner for machines without a GPU."""
