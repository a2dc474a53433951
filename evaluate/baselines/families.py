"""Groups tasks that differ in size only."""

from collections.abc import Iterator, Sequence
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


Rows = npt.NDArray[np.int64]


def rows_by_family(
    tasks: pl.DataFrame, family: Sequence[str] = FAMILY
) -> dict[tuple[object, ...], Rows]:
    """Family -> row numbers of its tasks, in order."""
    grouped = tasks.select(family).with_row_index("row").group_by(family, maintain_order=True)
    return {key: part["row"].to_numpy().astype(np.int64) for key, part in grouped}


def with_known(
    tasks: pl.DataFrame, known: dict[tuple[object, ...], Rows], family: Sequence[str] = FAMILY
) -> Iterator[tuple[Rows, Rows]]:
    """For each family that is among the `known` ones: its rows of the tasks, and what is known."""
    found = rows_by_family(tasks, family)
    return ((found[key], known[key]) for key in found if key in known)
