"""The simulator: systems, interference scenarios, and jobs."""
