"""Boosted trees that predict the residual of NCCL's cost model for each config (cold tables)."""
