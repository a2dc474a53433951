"""Compares two sweeps of one machine: what got slower or faster, and why."""
