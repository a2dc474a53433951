"""Gaussian processes that predict times, and a policy that acts only where confident."""
