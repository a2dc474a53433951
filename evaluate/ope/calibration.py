"""Whether off-policy estimates can be trusted on data like these: tried where the truth is known.

On tasks all of whose cells have independent runs, a behaviour that is known (NCCL's default, and
with probability EPSILON anything that was measured) plays calls, each timed by a run drawn from
those that were measured. From this log alone the estimators say what other policies are worth. The
truth is the mean over the very runs that calls were drawn from, so what is compared is the
estimators with their intervals, and not the policies with the world.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.crossfit import has_runs
from dynamiccl.evaluate.ope.estimators import Estimate, every_estimate
from dynamiccl.evaluate.ope.logs import (
    deterministic,
    draw_log,
    mixture,
    true_value,
)
from dynamiccl.evaluate.policies import Actions

#: How often the behaviour tries something.
EPSILON: Final = 0.5
#: Calls a task in a log.
CALLS_PER_TASK: Final = 100
#: Logs that the intervals are tried on.
LOGS: Final = 20
CONFIDENCE: Final = 0.9
ESTIMATORS: Final = ("DM", "IPS", "SNIPS", "DR")


@dataclass(frozen=True, slots=True)
class Calibration:
    """One policy on one system: the truth, and what each estimator said of it, log by log."""

    policy: str
    #: Mean over tasks of minus time over NCCL's default; -1 is as fast as the default.
    truth: float
    #: Estimator -> its estimates, one a log.
    estimates: Mapping[str, list[Estimate]]

    def held(self, estimator: str) -> tuple[int, int]:
        """In how many logs the interval held the truth, and in how many there was one."""
        limits = [(e.low, e.high) for e in self.estimates[estimator]]
        known = [(low, high) for low, high in limits if low is not None and high is not None]
        return sum(low <= self.truth <= high for low, high in known), len(known)

    def bias(self, estimator: str) -> float | None:
        """Mean over logs of estimate minus truth; None where there is no estimate."""
        values = [e.value for e in self.estimates[estimator] if e.value is not None]
        return float(np.mean(values)) - self.truth if values else None


def calibrate(
    grid: TaskGrid, rows: npt.NDArray[np.int64], choices: Mapping[str, Actions], *, seed: int = 0
) -> list[Calibration]:
    """Try the estimators on the tasks `rows` of a grid; empty where no task has the runs."""
    kept = rows[has_runs(grid)[rows]]
    if not len(kept):
        return []
    world = _means_of_runs(grid, kept)
    num_actions = world.times_us.shape[1]
    default = np.full(len(kept), ABSTAIN_ACTION, dtype=np.int64)
    behaviour = mixture(deterministic(default, num_actions), world.mask, EPSILON)
    random = np.random.default_rng(seed)
    size = CALLS_PER_TASK * len(kept)
    logs = [draw_log(world, behaviour, size, random) for _ in range(LOGS)]
    policies = [deterministic(actions[kept], num_actions) for actions in choices.values()]
    by_log = [every_estimate(log, policies, behaviour, CONFIDENCE) for log in logs]
    return [
        Calibration(
            name,
            true_value(world, policy),
            {each: [found[index][each] for found in by_log] for each in ESTIMATORS},
        )
        for index, (name, policy) in enumerate(zip(choices, policies, strict=True))
    ]


def _means_of_runs(grid: TaskGrid, rows: npt.NDArray[np.int64]) -> TaskGrid:
    """The tasks `rows` alone, with means over runs for times: what a drawn call takes on average.

    The grid's own times are medians.
    """
    place = {int(row): index for index, row in enumerate(rows)}
    samples = {(place[t], a): times for (t, a), times in grid.samples.items() if t in place}
    times_us = np.full((len(rows), grid.times_us.shape[1]), np.nan)
    for cell, times in samples.items():
        times_us[cell] = times.mean()
    return replace(
        grid,
        tasks=grid.tasks[rows],
        times_us=times_us,
        repeats=grid.repeats[rows],
        samples=samples,
    )
