"""Task grids small enough to compute by hand."""

from typing import Any

import numpy as np
import polars as pl

from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.datasets.features import ENVIRONMENT_COLUMNS
from dynamiccl.datasets.schema import TASK_COLUMNS

NAN = float("nan")


def grid(sizes: list[int], times: list[list[float]], **columns: Any) -> TaskGrid:
    """A grid of one family: a row a size, a column an action (0 = NCCL's default)."""
    shared = dict.fromkeys((*TASK_COLUMNS, *ENVIRONMENT_COLUMNS))
    shared |= {"system": "s", "collective": "AllReduce"} | columns
    tasks = pl.DataFrame([{**shared, "size_bytes": size} for size in sizes])
    values = np.array(times)
    measured = ~np.isnan(values)
    samples = {(int(t), int(a)): np.repeat(values[t, a], 3) for t, a in np.argwhere(measured)}
    return TaskGrid(tasks, values, np.where(measured, 3, 0), tasks.head(0), samples)


def noise(band: float | None = None, **others: float) -> pl.DataFrame:
    """The noise band of AllReduce on the grids' system, and of other collectives."""
    bands = {"AllReduce": band, **others}
    rows = [("s", name, each) for name, each in bands.items() if each is not None]
    types = {"system": pl.String, "collective": pl.String, "noise_band": pl.Float64}
    return pl.DataFrame(rows, schema=types, orient="row")


TRAINING = grid(
    [1 << 10, 1 << 20, 1 << 30], [[10.0, 9.0, 20.0], [100.0, 120.0, 80.0], [1000.0, NAN, 700.0]]
)
