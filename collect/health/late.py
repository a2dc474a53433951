"""Ranks that the others wait for, in collectives of all ranks with per-process times.

The kernel of a late rank finds all others ready and is short, while theirs last as long as they
wait: the late rank is the process with the smallest time. Such rows do not show which link is slow:
all ranks of a communicator take as long as the slowest.
"""

from collections import defaultdict
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.collect.health.model import FALSE_ALARMS, LEAST_SIGMA, Slow
from dynamiccl.collect.health.readings import lower_median, place_names, robust_sigma
from dynamiccl.datasets.schema import Status


def late_processes(frame: pl.DataFrame, *, least: float) -> tuple[list[Slow], int]:
    """The processes that the others wait for, and in how many rows that could be seen.

    A process is late by log(median of all processes / its own time) in a row. It is reported when
    the lower median over the rows of its hosts is beyond `least` and beyond noise (see `model`).
    """
    times = pl.col("process_times_us")
    rows = frame.filter(
        (pl.col("status") == Status.OK.value)
        & pl.col("num_comms").is_null()
        & (times.list.len() >= 3)
        & pl.col("hosts").is_not_null()
    )
    by_launch: dict[tuple[str, int], list[npt.NDArray[np.float64]]] = defaultdict(list)
    for hosts, listed in rows.select("hosts", "process_times_us").iter_rows():
        logs = np.log(np.array(listed, dtype=np.float64))
        by_launch[hosts, len(listed)].append(np.median(logs) - logs)
    found = []
    for (hosts, processes), late in by_launch.items():
        each = np.array([lower_median(column) for column in np.stack(late, axis=1)])
        # Of a handful of processes the spread over rows says more than that among them.
        over_rows = float(np.median([robust_sigma(column) for column in np.stack(late, axis=1)]))
        sigma = max(robust_sigma(each), over_rows / len(late) ** 0.5, LEAST_SIGMA)
        limit = NormalDist().inv_cdf(1.0 - FALSE_ALARMS / processes)
        places = place_names(hosts, processes)
        found += [
            Slow((places[index],), float(each[index]), float(each[index] / sigma), 1, len(late))
            for index in np.flatnonzero((each > np.log1p(least)) & (each / sigma >= limit))
        ]
    return found, rows.height
