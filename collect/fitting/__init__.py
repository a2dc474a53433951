"""Fitting a simulated system to measurements, and saying how well it holds."""
