"""Fits a simulated system to measurements, and reports the errors."""
