"""Interference levels of recorded calls, as a Trigger would have reported them live."""

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.sequences import KEY_COLUMNS, STREAM_COLUMNS
from dynamiccl.train.trigger.detector import Detector


def interference_levels(detector: Detector, calls: pl.DataFrame) -> npt.NDArray[np.float32]:
    """(N,) levels of calls with times, each communicator's in its order; -1 = unknown.

    All task keys advance side by side, one call of each a step.
    """
    asked = calls.select(
        stream=pl.struct(STREAM_COLUMNS).rank("dense").cast(pl.Int64) - 1,
        key=pl.struct(KEY_COLUMNS).rank("dense").cast(pl.Int64) - 1,
        log_time=pl.col("time_us").log(),
        log_size=pl.col("size_bytes").cast(pl.Float64).log(),
    ).with_row_index("row")
    place = pl.int_range(pl.len()).over("key")
    levels = np.full(calls.height, -1.0, dtype=np.float32)
    steps = asked.with_columns(place=place).sort("place", "row").partition_by("place")
    for step in steps:
        told = (step[name].to_numpy() for name in ("stream", "log_time", "log_size", "key"))
        levels[step["row"].to_numpy()] = detector.observe(*told)[1]
    return levels
