"""Cross-fitted regret: the oracle is chosen on some runs, and all are scored on the others.

The best of many noisy figures looks better than it is, so regret against it is too high, and a
policy that was lucky in the same runs looks too good. Here the independent runs of every cell are
parted in two at random; the config with the least median in one half is the oracle, and its time in
the other half is what times are compared with there. Regret may come out negative: the config that
looked best was not.

The interval is a bootstrap over runs, within each half, and over the ways to part them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.policies import Actions

#: Runs of a cell from which on there is something to part.
MIN_RUNS: Final = 3
RESAMPLES: Final = 200
_ENDS: Final = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class CrossFit:
    """Mean regret (a fraction) over tasks, with its 95 % interval."""

    mean: float
    low: float
    high: float


def has_runs(grid: TaskGrid) -> npt.NDArray[np.bool_]:
    """(T,) whether every measured cell of a task has MIN_RUNS independent runs."""
    return np.asarray(((grid.repeats >= MIN_RUNS) | ~grid.mask).all(axis=1))


def cross_fit(
    grid: TaskGrid, rows: npt.NDArray[np.int64], choices: Mapping[str, Actions]
) -> dict[str, CrossFit | None]:
    """The regret of each policy over the tasks `rows` that have the runs; None without any."""
    kept = rows[has_runs(grid)[rows]]
    if not len(kept):
        return dict.fromkeys(choices)
    random = np.random.default_rng(0)
    sums = {name: np.zeros(RESAMPLES) for name in choices}
    for row in map(int, kept):
        actions = np.flatnonzero(grid.mask[row])
        halves = [_halves(grid.samples[row, int(action)], random) for action in actions]
        chosen_on = np.stack([first for first, _ in halves])  # (measured actions, resamples)
        scored_on = np.stack([second for _, second in halves])
        oracle = np.take_along_axis(scored_on, chosen_on.argmin(axis=0)[None], axis=0)[0]
        place = {int(action): index for index, action in enumerate(actions)}
        for name, chosen in choices.items():
            sums[name] += scored_on[place[int(chosen[row])]] / oracle - 1.0
    return {name: _interval(total / len(kept)) for name, total in sums.items()}


def _halves(
    times_us: npt.NDArray[np.float64], random: np.random.Generator
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Medians (RESAMPLES,) of the two halves of a cell's runs, resampled within each."""
    order = random.random((RESAMPLES, len(times_us))).argsort(axis=1)
    # Now the one and now the other half is the larger.
    size = len(times_us) // 2 + (random.integers(2) if len(times_us) % 2 else 0)
    parts = order[:, :size], order[:, size:]
    first, second = (np.median(times_us[_resampled(part, random)], axis=1) for part in parts)
    return first, second


def _resampled(part: npt.NDArray[np.int64], random: np.random.Generator) -> npt.NDArray[np.int64]:
    drawn = random.integers(0, part.shape[1], size=part.shape)
    return np.take_along_axis(part, drawn, axis=1)


def _interval(means: npt.NDArray[np.float64]) -> CrossFit:
    low, high = np.quantile(means, _ENDS)
    return CrossFit(float(means.mean()), float(low), float(high))
