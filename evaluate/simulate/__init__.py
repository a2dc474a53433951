"""Whole jobs in the simulated world: who spends least time on communication, and why."""
