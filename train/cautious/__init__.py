"""Shared code of models that predict times and act only where confident."""
