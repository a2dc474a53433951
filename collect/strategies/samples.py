"""Log times of one setting without the drift of their rounds, and their noise.

Everything is in log time, where noise is the same share of a short and of a long time. Statistics
are medians: single measurements are slow by a multiple now and then (datasets/cells.py takes the
median of repeats for the same reason).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.strategies.strategy import Outcome, TaskTrials, subspace

Floats = npt.NDArray[np.float64]
#: log time_us by round, in the order of the rounds.
Times = tuple[tuple[int, float], ...]

#: Standard deviation of normal noise = this times the median of its absolute values.
MAD_TO_SIGMA: Final = 1.4826
#: Variance of the median of n normal values = this / n times theirs (n large).
MEDIAN_VARIANCE: Final = math.pi / 2
#: Noise before any repeat is known, and the least that is believed (one standard deviation).
_UNKNOWN_SIGMA: Final = 0.03
_LEAST_SIGMA: Final = 0.001
#: Repeats that count for the noise at a size: so near in log2 size, if there are so many.
_NEAR_OCTAVES: Final = 1.5
_NEAR_REPEATS: Final = 12
_POLISHES: Final = 4
_LEAST_TASKS: Final = 4
#: Drift counts as far as its variance exceeds so many times what noise alone would make of it.
_DRIFT_OVER_NOISE: Final = 2.0
#: Two times further apart than so many standard deviations of a difference do not agree.
_DISAGREE: Final = 4.0
#: A cell that scatters by more than so many times the noise has a noise of its own.
_SCATTER: Final = 2.0
#: So many failures, and no success, rule an (algorithm, protocol) out on this machine.
_FAILURES: Final = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One trial's times: median and variance."""

    log_us: float
    #: Of `log_us`, from noise alone.
    variance: float
    #: Times that it rests on.
    repeats: int


@dataclass(frozen=True, slots=True)
class Samples:
    """The measurements of one setting."""

    #: By trial key; only trials with a time.
    cells: Mapping[str, Cell]
    #: In how many rounds a trial was measured: those are its independent repeats.
    rounds: Mapping[str, int]
    #: Trials that are out: an attempt failed, or all that was tried of their subspace did.
    failed: frozenset[str]


def times_by_trial(history: Sequence[Outcome]) -> dict[str, Times]:
    """The log times of every trial that has any, sorted (independent of history order)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for outcome in history:
        time_us = outcome.time_us
        if outcome.ok and time_us is not None and math.isfinite(time_us) and time_us > 0:
            found.setdefault(outcome.trial_key, []).append((outcome.round, math.log(time_us)))
    return {key: tuple(sorted(times)) for key, times in found.items()}


def failed_trials(history: Sequence[Outcome]) -> frozenset[str]:
    """Keys of trials of which an attempt crashed, hung or computed wrong values."""
    return frozenset(outcome.trial_key for outcome in history if not outcome.ok)


def condense(
    tasks: Sequence[TaskTrials], times: Mapping[str, Times], failed: frozenset[str]
) -> Samples:
    """One setting's cells: medians of drift-corrected log times, with variances."""
    drift = round_drift([times.get(t.default.key, ()) for t in tasks if t.default is not None])
    level: dict[str, list[float]] = {}
    spread: list[tuple[float, float]] = []
    sizes: dict[str, float] = {}
    for task in tasks:
        log2_size = math.log2(task.size_bytes)
        for trial in (*task.candidates, *([task.default] if task.default else [])):
            values = [value - drift.get(n, 0.0) for n, value in times.get(trial.key, ())]
            if values:
                level[trial.key], sizes[trial.key] = values, log2_size
                spread += [(log2_size, b - a) for a, b in pairwise(values)]
    sigma = {size: noise_sigma(spread, size) for size in set(sizes.values())}
    cells = {key: cell_of(values, sigma[sizes[key]]) for key, values in level.items()}
    rounds = {key: len({number for number, _ in times[key]}) for key in cells}
    return Samples(cells, rounds, failed | _hopeless(tasks, times, failed))


def _hopeless(
    tasks: Sequence[TaskTrials], times: Mapping[str, Times], failed: frozenset[str]
) -> frozenset[str]:
    """Trials of (algorithm, protocol) pairs that never worked in this setting."""
    members: dict[object, list[str]] = {}
    for task in tasks:
        for trial in task.candidates:
            members.setdefault(subspace(trial), []).append(trial.key)
    return frozenset(
        key
        for keys in members.values()
        if len(failed.intersection(keys)) >= _FAILURES and not any(key in times for key in keys)
        for key in keys
    )


def cell_of(log_us: Sequence[float], sigma: float) -> Cell:
    """The median of a trial's log times and its variance, given the noise of a single one.

    Two that disagree are no pair: the faster one counts alone, since single calls are slow now and
    then and none is fast by chance. Where three or more scatter far beyond the noise, as on a
    machine with two states, their own scatter is taken.
    """
    count = len(log_us)
    if count == 1:
        return Cell(log_us[0], sigma**2, 1)
    if count == 2:
        if abs(log_us[0] - log_us[1]) > _DISAGREE * math.sqrt(2) * sigma:
            return Cell(min(log_us), sigma**2, 1)
        # The median of two is their mean.
        return Cell((log_us[0] + log_us[1]) / 2.0, sigma**2 / 2.0, 2)
    middle = float(np.median(log_us))
    own = MAD_TO_SIGMA * float(np.median(np.abs(np.array(log_us) - middle)))
    wide = own if own > _SCATTER * sigma else sigma
    return Cell(middle, MEDIAN_VARIANCE * wide**2 / count, count)


def noise_sigma(differences: Sequence[tuple[float, float]], log2_size: float) -> float:
    """Robust standard deviation of one log time at a size, from differences of repeats.

    Args:
        differences: (log2 size, difference of two log times of one trial).
        log2_size: where it is wanted; repeats near it count alone, if there are enough.
    """
    near = [d for size, d in differences if abs(size - log2_size) <= _NEAR_OCTAVES]
    taken = near if len(near) >= _NEAR_REPEATS else [d for _, d in differences]
    if not taken:
        return _UNKNOWN_SIGMA
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(taken))) / math.sqrt(2)
    return max(sigma, _LEAST_SIGMA)


def round_drift(default_times: Sequence[Times]) -> dict[int, float]:
    """What each round adds to all log times, from NCCL's default in every round.

    A round is a run of its own, and all of it may be slow. Medians are polished over tasks and
    rounds (Tukey, Exploratory Data Analysis, 1977, chapter 11); what comes out is shrunk by how
    much of it the noise alone would make. Rounds of few tasks are taken as they are: their median
    is no protection against a slow call.
    """
    tasks = [_fastest_by_round(times) for times in default_times]
    seen_in = Counter(number for task in tasks for number in task)
    rounds = sorted(number for number, count in seen_in.items() if count >= _LEAST_TASKS)
    tasks = [task for task in tasks if any(number in task for number in rounds)]
    if len(rounds) < 2:
        return {}
    table = np.array([[task.get(number, np.nan) for number in rounds] for task in tasks])
    drift = np.zeros(len(rounds))
    rest = table
    for _ in range(_POLISHES):
        rest = table - drift
        rest = rest - np.nanmedian(rest, axis=1, keepdims=True)
        drift = drift + np.nanmedian(rest, axis=0)
    seen = np.isfinite(rest)
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(rest[seen])))
    # The polish has taken its share of the scatter out of what is left.
    left = (1.0 - 1.0 / len(tasks)) * (1.0 - 1.0 / len(rounds))
    noise = MEDIAN_VARIANCE * sigma**2 / left / seen.sum(axis=0)
    real = max(float(np.mean(drift**2 - _DRIFT_OVER_NOISE * noise)), 0.0)
    share = real / (real + noise) if real > 0 else np.zeros(len(rounds))
    return dict(zip(rounds, (drift * share).tolist(), strict=True))


def _fastest_by_round(times: Times) -> dict[int, float]:
    # Of a pair the faster one: that it is slow by chance takes two slow calls.
    return dict(reversed(times))
