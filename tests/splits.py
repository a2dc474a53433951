"""The usual split of one message size."""

import polars as pl

from dynamiccl.datasets.splits import Split, with_split


def split_of(size_bytes: int) -> Split:
    """As data sets are split usually."""
    return Split(with_split(pl.DataFrame({"size_bytes": [size_bytes]}))["split"].item())
