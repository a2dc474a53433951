"""Simulates whole jobs and compares policies by total communication time."""
