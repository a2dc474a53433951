"""A Gaussian process over configs with NCCL's cost model as its mean (cold tables)."""
