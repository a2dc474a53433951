"""Runs programs in sessions of their own: follows their output, ends them with all children."""
