"""How much of an interference level slows each cell, estimated from recorded calls.

A level says by how much calls were slower than quiet, under a config that felt it. Others need not
feel it alike: what slows host threads slows rings and not NVLS, what slows one network rail slows
those that send over it. So of each cell there is a share: a call under it takes 1 + share x level
times its quiet time.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import KEY_COLUMNS, STREAM_COLUMNS, timed_calls
from dynamiccl.sizes import BINS_PER_OCTAVE
from dynamiccl.train.trigger.detector import Detector

#: Levels up to the one are quiet, and from the other on a call is disturbed.
QUIET_LEVEL: Final = 0.05
DISTURBED_LEVEL: Final = 0.25
#: Calls, quiet and disturbed ones each, without which a share is not told.
LEAST_CALLS: Final = 20
MOST_SHARE: Final = 1.5
#: What a share is of.
FELT_KEY: Final = ("system", "collective", "algorithm", "protocol", "octave")
_STREAM: Final = (
    *("system", "nccl_version", "collective", "num_nodes", "ranks_per_node", "size_bytes"),
    *("algorithm", "protocol", "num_channels"),
)
_OF_CALLS: Final = {
    "algorithm": "actual_algorithm",
    "protocol": "actual_protocol",
    "num_channels": "actual_num_channels",
}


def level_shares_of(
    calls: pl.DataFrame, levels: Callable[[pl.DataFrame], npt.NDArray[np.float32]]
) -> pl.DataFrame:
    """The share of each cell at each octave of sizes, FELT_KEY and `share`, 0 to MOST_SHARE.

    `calls` have the columns `datasets.sequences.CALLS_USED`; `levels` tells the interference of
    timed calls, one each. Test bins are left out. Quiet times are medians of the same config on the
    same size. Cells with under LEAST_CALLS calls in either state are not told.
    """
    timed = timed_calls(calls)
    ran = {name: pl.col(of_call) for name, of_call in _OF_CALLS.items()}
    told = timed.with_columns(level=pl.Series(levels(timed)), **ran).filter(
        pl.col("split") != Split.TEST.value
    )
    is_quiet = (pl.col("level") >= 0.0) & (pl.col("level") <= QUIET_LEVEL)
    quiet_us = pl.col("time_us").filter(is_quiet).median().over(_STREAM)
    disturbed = told.with_columns(
        quiet_us=quiet_us,
        quiet_calls=is_quiet.sum().over(_STREAM),
        octave=pl.col("bin") // BINS_PER_OCTAVE,
    ).filter(
        pl.col("level") >= DISTURBED_LEVEL,
        pl.col("quiet_calls") >= LEAST_CALLS,
        pl.col("algorithm").is_not_null() & pl.col("protocol").is_not_null(),
    )
    slowdown = pl.col("time_us") / pl.col("quiet_us") - 1.0
    return (
        disturbed.group_by(FELT_KEY)
        .agg(share=(slowdown / pl.col("level")).median().clip(0.0, MOST_SHARE), calls=pl.len())
        .filter(pl.col("calls") >= LEAST_CALLS)
        .select(*FELT_KEY, "share")
        .sort(FELT_KEY)
    )


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
