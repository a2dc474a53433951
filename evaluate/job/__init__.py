"""Forecasts a job's gain: its trace against a sweep, a policy or a simulated system."""
