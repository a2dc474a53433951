"""Descriptions of a data set: summaries, best configs by size, plots."""
