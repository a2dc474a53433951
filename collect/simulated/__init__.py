"""Sweeps without a GPU: the simulated world as a runner."""
