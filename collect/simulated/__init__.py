"""The simulator as a runner: sweeps without a GPU."""
