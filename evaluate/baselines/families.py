"""Groups tasks that differ in size only."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

#: What makes tasks of different sizes one family: a table of configs is kept for each.
FAMILY: Final = (
    "system",
    "nccl_version",
    "num_nodes",
    "ranks_per_node",
    "collective",
    "datatype",
    "launch_profile",
)


#: A coarser one, of all group shapes: one config for a collective of a system.
POOL: Final = ("system", "collective")


def rows_by_family(
    tasks: pl.DataFrame, family: Sequence[str] = FAMILY
) -> dict[tuple[object, ...], npt.NDArray[np.int64]]:
    """Family -> row numbers of its tasks, in order."""
    grouped = tasks.select(family).with_row_index("row").group_by(family, maintain_order=True)
    return {key: part["row"].to_numpy().astype(np.int64) for key, part in grouped}
