"""Boosted trees on the residuals of NCCL's cost model, for decision tables (residual-boosting)."""
