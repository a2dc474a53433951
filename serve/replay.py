"""Calls under our tables against NCCL's own choice in the same recorded job.

The record contains NCCL's own choice, too: in the probes that the guard makes on purpose, and in
calls before the first table. Both samples are of one job, so whatever slows the job slows both.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.sizes import bin_center_bytes, size_bin

#: Times of each arm that an interval needs.
_LEAST_TIMES: Final = 5
#: What is shown of one call.
CALL_COLUMNS: Final = (
    *("timestamp", "comm", "sequence", "collective", "size_bytes", "num_ranks", "num_nodes"),
    *("actual_algorithm", "actual_protocol", "actual_num_channels", "table", "decided", "probe"),
    "time_us",
)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Calls of one collective and size bin on one communicator shape."""

    collective: str
    size_bytes: int
    num_nodes: int
    num_ranks: int
    calls: int
    #: Those that ran what our table asked for.
    decided: int
    config: str | None
    own_choice: str | None
    #: Medians; None where no time of that arm was recorded.
    ours_us: float | None
    own_us: float | None
    #: Fraction of NCCL's time, with its 95 % interval; None with few times of either.
    gain: float | None
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data for `json.dumps`."""
        return asdict(self)


def replay(calls: pl.DataFrame) -> list[Replayed]:
    """Group the table `calls` by table entry; largest groups first."""
    sized = calls.with_columns(
        bin=pl.col("size_bytes").map_elements(size_bin, return_dtype=pl.Int64),
        config=pl.format(
            "{}/{}/{}ch", "actual_algorithm", "actual_protocol", "actual_num_channels"
        ),
    )
    keys = ("collective", "bin", "num_nodes", "num_ranks")
    found = [
        _replayed(str(name[0]), int(str(name[1])), group)
        for name, group in sized.group_by(keys, maintain_order=True)
    ]
    return sorted(found, key=lambda each: -each.calls)


def _replayed(collective: str, index: int, group: pl.DataFrame) -> Replayed:
    ours, own = group.filter("decided"), group.filter(~pl.col("decided"))
    gain = _gain(_logs(ours), _logs(own))
    return Replayed(
        collective,
        bin_center_bytes(index),
        int(group["num_nodes"][0]),
        int(group["num_ranks"][0]),
        group.height,
        ours.height,
        _most(ours),
        _most(own),
        _median(ours),
        _median(own),
        *(gain or (None, None, None)),
    )


def _logs(rows: pl.DataFrame) -> npt.NDArray[np.float64]:
    times: npt.NDArray[np.float64] = rows["time_us"].drop_nulls().to_numpy().astype(np.float64)
    return np.log(times)


def _most(rows: pl.DataFrame) -> str | None:
    found = rows["config"].drop_nulls().mode().sort()
    return None if found.is_empty() else str(found[0])


def _median(rows: pl.DataFrame) -> float | None:
    median = rows["time_us"].median()
    return None if median is None else float(str(median))


def _gain(
    ours: npt.NDArray[np.float64], own: npt.NDArray[np.float64]
) -> tuple[float, float, float] | None:
    """Mean of log(own / ours) as a fraction, and Welch's 95 % interval."""
    if min(len(ours), len(own)) < _LEAST_TIMES:
        return None
    from scipy import stats  # a second to import, and no command but this one asks it

    found = stats.ttest_ind(own, ours, equal_var=False).confidence_interval(0.95)
    mean = float(np.mean(own) - np.mean(ours))
    return float(np.expm1(mean)), float(np.expm1(found.low)), float(np.expm1(found.high))
