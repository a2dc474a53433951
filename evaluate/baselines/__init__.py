"""Simple policies that a learned one has to beat, fitted to the same training bins."""
