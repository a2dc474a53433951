"""Simple policies that a learned one has to beat, fitted to the bins that it was told."""
