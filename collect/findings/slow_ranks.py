"""The rank that the others wait for, by the times of single processes (`runner.per_iteration`).

The kernel of a rank that comes late finds all others ready and is short, while theirs last as long
as they wait: the late one is the process with the least time. Such rows do not show which link is
slow: all ranks of a communicator take as long as the slowest.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.collect.nccl_tests.hosts import expand_hosts
from dynamiccl.collect.strategies.samples import MAD_TO_SIGMA
from dynamiccl.datasets.schema import Status

#: By how much the other processes take longer before one counts as late.
_LATE: Final = 1.05
#: Launches in which a process is called late by chance, at most, were noise normal.
_FALSE_ALARMS: Final = 0.01
#: Below this no launch repeats itself: nccl-tests prints and clocks have four digits or so.
_LEAST_SIGMA: Final = 0.003


@dataclass(frozen=True, slots=True)
class LateProcess:
    """A process that the others wait for."""

    #: HOST process NUMBER.
    name: str
    #: log(median of all processes / its own time).
    excess: float
    z: float
    rows: int


def waited_for(frame: pl.DataFrame) -> str | None:
    """A line of text on the process that others wait for in most rows; None if there is none."""
    times = pl.col("process_times_us")
    known = frame.filter(times.list.len() >= 2)
    late = (
        known.filter(times.list.median() >= _LATE * times.list.min())
        .group_by("hosts", process=times.list.arg_min())
        .len()
        .sort("len", "process", descending=[True, False])
    )
    if not late.height or late["len"][0] <= known.height / 2:
        return None
    hosts, process, count = late.row(0)
    return f"process {process} of {hosts or 'its hosts'} in {count} of {known.height} rows"


def late_processes(frame: pl.DataFrame, *, least: float) -> tuple[list[LateProcess], int]:
    """The processes that are late beyond noise and `least`, and the rows that could show them.

    A process is late by log(median of all processes / its own time) in a row, and of the rows of
    its hosts by the lower median.
    """
    times = pl.col("process_times_us")
    rows = frame.filter(
        (pl.col("status") == Status.OK.value)
        & pl.col("num_comms").is_null()
        & (times.list.len() >= 3)
        & pl.col("hosts").is_not_null()
    ).with_columns(processes=times.list.len())
    found = []
    for (hosts, _), of in rows.group_by("hosts", "processes", maintain_order=True):
        logs = np.log(np.array(of["process_times_us"].to_list(), dtype=np.float64))
        late = np.median(logs, axis=1, keepdims=True) - logs  # (rows, processes)
        each = np.sort(late, axis=0)[(len(late) - 1) // 2]
        # Of a handful of processes the spread over rows says more than that among them.
        over_rows = float(np.median([_robust_sigma(column) for column in late.T]))
        sigma = max(_robust_sigma(each), over_rows / len(late) ** 0.5, _LEAST_SIGMA)
        limit = NormalDist().inv_cdf(1.0 - _FALSE_ALARMS / len(each))
        names = expand_hosts(str(hosts))
        per_host = max(len(each) // len(names), 1)
        for index in np.flatnonzero((each > np.log1p(least)) & (each / sigma >= limit)):
            host = names[min(int(index) // per_host, len(names) - 1)]
            name = f"{host} process {index % per_host}"
            found.append(
                LateProcess(name, float(each[index]), float(each[index] / sigma), len(late))
            )
    return found, rows.height


def _robust_sigma(values: npt.NDArray[np.float64]) -> float:
    """Sigma of a normal distribution with this median absolute deviation."""
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))
