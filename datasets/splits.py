"""Train, validation and test: three disjoint sets of size bins, the same for every data set.

Whole octaves are held out, so that a test size is never a neighbour of a training size in the same
octave, and the assignment depends on the size alone, so that data sets can be joined without a
leak. Even octaves train; of the odd ones every other is for validation and every other for test.
"""

from enum import StrEnum
from typing import Final

import polars as pl

from dynamiccl.sizes import BINS_PER_OCTAVE, size_bin


class Split(StrEnum):
    """Which use a size bin is for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


_BY_OCTAVE: Final = (Split.TRAIN, Split.VALIDATION, Split.TRAIN, Split.TEST)


def split_of(size_bytes: int) -> Split:
    """The split of a message size.

    >>> [split_of(1 << k).value for k in (20, 21, 22, 23)]
    ['train', 'validation', 'train', 'test']
    """
    octave = size_bin(size_bytes) // BINS_PER_OCTAVE
    return _BY_OCTAVE[octave % len(_BY_OCTAVE)]


def with_split(frame: pl.DataFrame) -> pl.DataFrame:
    """Add the columns `bin` and `split`; sizes without a bin (0) are dropped."""
    sizes = frame["size_bytes"].unique().to_list()
    table = pl.DataFrame(
        {
            "size_bytes": sizes,
            "bin": [size_bin(size) for size in sizes],
            "split": [split_of(size).value for size in sizes],
        },
        schema={"size_bytes": pl.Int64, "bin": pl.Int64, "split": pl.String},
    ).filter(pl.col("bin") >= 0)
    return frame.join(table, on="size_bytes", how="inner", maintain_order="left")
