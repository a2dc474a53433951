"""Gains at sizes between measured ones, with their uncertainty.

Between two measured sizes under one choice of NCCL's own, gains change little, and their mean by
distance (on a log scale) stands. Where NCCL's choice is another at each end, it changes somewhere
between, and gains jump there: NCCL's time is then that of either choice, which were both measured
as configs of their own. The job's own record of what ran says which; without one, both are
possible, and half of their difference is `blur`, a standard deviation. A job that ran a third thing
is another NCCL, or another environment, than was measured: of it nothing is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.sizes import size_bin

Floats = npt.NDArray[np.float64]
Choice = tuple[Algorithm, Protocol]
#: Independent runs from which on a gain has an interval.
MIN_RUNS: Final = 3
#: How far a measured size may be, octaves.
_REACH: Final = 1.0
#: Sizes at most so many octaves apart say how gains change by size; and what is taken without any.
_NEIGHBOURS: Final = 2.0
_UNKNOWN_SLOPE: Final = 0.25


@dataclass(frozen=True, slots=True)
class AtSize:
    """One measured size of one collective and shape, A configs over R runs."""

    size_bytes: int
    #: (A, R) log(NCCL's own choice / config); NaN = not measured in the run.
    logs: Floats
    runs: tuple[str, ...]
    #: us of NCCL's own choice, the median.
    default_us: float
    #: Standard deviation of a gain between runs, over all tasks of its collective and shape.
    usual: float
    #: What NCCL chose, where all runs that read it back agree.
    ran: Choice | None

    @property
    def means(self) -> Floats:
        """(A,) mean gain over the runs that have it; NaN without one."""
        return _means(self.logs)


@dataclass(frozen=True, slots=True)
class Found:
    """Gains at one size."""

    #: (A, R) and the names of the runs.
    logs: Floats
    runs: tuple[str, ...]
    #: (A,) standard deviation of what the size adds.
    blur: Floats
    #: The measured sizes that it rests on.
    sizes: tuple[int, ...]
    usual: float


def between(
    tasks: Sequence[AtSize], size_bytes: int, configs: Sequence[Config], ran: Choice | None
) -> Found | str:
    """The gains at a size, or why there are none.

    `tasks` are of one collective and shape, by size; `ran` is NCCL's choice in the job.
    """
    near = _near(tasks, size_bytes)
    if not near:
        return f"no size within an octave was measured in {MIN_RUNS} runs"
    known = {task.ran for task in near if task.ran is not None}
    if ran is not None and len(known) == len({t.ran for t in near}) and ran not in known:
        measured = " and ".join(sorted(f"{a.wire}/{p.wire}" for a, p in known))
        return f"NCCL ran {ran[0].wire}/{ran[1].wire} in the job and {measured} in the sweep"
    if len(near) == 2 and near[0].runs == near[1].runs:
        return _of_both(near[0], near[1], size_bytes, configs, ran)
    fitting = [task for task in near if ran is None or task.ran in {None, ran}]
    task = min(fitting, key=lambda each: _octaves(each.size_bytes, size_bytes))
    distance = _octaves(task.size_bytes, size_bytes)
    is_same = size_bin(task.size_bytes) == size_bin(size_bytes)
    blur = np.full(len(configs), 0.0 if is_same else distance * _slope(tasks))
    blur[ABSTAIN_ACTION] = 0.0
    logs = _same_at_zero(task.logs, task.ran, configs)
    return Found(logs, task.runs, blur, (task.size_bytes,), task.usual)


def _means(logs: Floats) -> Floats:
    """(A,) means over the runs that have a value; NaN without one."""
    count = np.sum(~np.isnan(logs), axis=1)
    total = np.nansum(logs, axis=1)
    found: Floats = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return found


def _octaves(one: float, other: float) -> float:
    return abs(float(np.log2(one / other)))


def _near(tasks: Sequence[AtSize], size_bytes: int) -> list[AtSize]:
    """The measured size of the same bin, else the nearest on each side within reach."""
    same = [task for task in tasks if size_bin(task.size_bytes) == size_bin(size_bytes)]
    if same:
        return [min(same, key=lambda task: abs(task.size_bytes - size_bytes))]
    within = [t for t in tasks if _octaves(t.size_bytes, size_bytes) <= _REACH]
    below = [t for t in within if t.size_bytes < size_bytes]
    above = [t for t in within if t.size_bytes > size_bytes]
    return [*below[-1:], *above[:1]]


def _of_both(
    low: AtSize, high: AtSize, size_bytes: int, configs: Sequence[Config], ran: Choice | None
) -> Found:
    """Gains from the sizes on both sides, which the same runs measured."""
    share = _octaves(low.size_bytes, size_bytes) / _octaves(low.size_bytes, high.size_bytes)
    mean = (1.0 - share) * low.logs + share * high.logs
    apart = np.nan_to_num(np.abs(high.means - low.means))

    def found(logs: Floats, blur: Floats) -> Found:
        return Found(logs, low.runs, blur, (low.size_bytes, high.size_bytes), low.usual)

    smooth = 0.5 * share * (1.0 - share) * apart
    if low.ran is not None and low.ran == high.ran:
        return found(_same_at_zero(mean, low.ran, configs), smooth)
    # Over what NCCL would take if its choice were that of one end all the way.
    over = [
        mean - mean[action]
        for choice in (low.ran, high.ran)
        if choice is not None and (ran is None or ran == choice)
        if (action := _action_of(choice, configs, mean)) is not None
    ]
    if len(over) == 1 and ran is not None:
        return found(_own_at_zero(over[0]), smooth)
    if len(over) == 2:
        blur = 0.5 * np.abs(np.nan_to_num(_means(over[1] - over[0])))
        blur[ABSTAIN_ACTION] = 0.0
        return found(_own_at_zero(0.5 * (over[0] + over[1])), blur)
    # Nobody knows what NCCL chose: it may have changed anywhere between.
    return found(mean, min(share, 1.0 - share) * apart)


def _same_at_zero(logs: Floats, ran: Choice | None, configs: Sequence[Config]) -> Floats:
    """Gains with 0 for configs equal to NCCL's choice: their measured gain is noise."""
    same = [config == Config(*ran) if ran is not None else False for config in configs]
    found: Floats = np.where(np.array(same)[:, None] & ~np.isnan(logs), 0.0, logs)
    return found


def _own_at_zero(logs: Floats) -> Floats:
    """Gains with 0 for NCCL's own choice."""
    logs[ABSTAIN_ACTION] = 0.0
    return logs


def _action_of(choice: Choice, configs: Sequence[Config], logs: Floats) -> int | None:
    """The action that requests an algorithm and protocol, preferably with AUTO channels."""
    same = [
        action
        for action, config in enumerate(configs)
        if (config.algorithm, config.protocol) == choice and not np.isnan(logs[action]).any()
    ]
    return min(same, key=lambda action: configs[action].num_channels or 0, default=None)


def _slope(tasks: Sequence[AtSize]) -> float:
    """Root mean square change of a gain per octave."""
    squares = []
    for one, other in pairwise(tasks):
        octaves = _octaves(one.size_bytes, other.size_bytes)
        apart = (other.means - one.means)[ABSTAIN_ACTION + 1 :] / octaves
        apart = apart[~np.isnan(apart)]
        if octaves <= _NEIGHBOURS and len(apart):
            squares.append(float(np.mean(apart**2)))
    return float(np.sqrt(np.mean(squares))) if squares else _UNKNOWN_SLOPE
