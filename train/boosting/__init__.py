"""Boosted trees over configs, of what NCCL's cost model leaves over: for cold tables."""
