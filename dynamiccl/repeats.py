"""What repeats say of a cell, a config at one size: a median and its noise, without drift.

Medians, since a single call is slow by a multiple now and then.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

#: Cell -> sorted (round, log time_us).
Times = Mapping[Hashable, Sequence[tuple[int, float]]]
#: Median of log times, its variance from noise, number.
Cell = tuple[float, float, int]
#: Standard deviation of normal noise over its median absolute value.
MAD_TO_SIGMA: Final = 1.4826
#: Standard deviation of a single log time where no difference tells.
NOISE: Final = 0.03
#: n times the variance of the median of n normal values over theirs (n large).
MEDIAN_VARIANCE: Final = math.pi / 2


def cells_of(
    times: Times, log2_size: Mapping[Hashable, float], defaults: Iterable[Hashable]
) -> dict[Hashable, Cell]:
    """The cells that have a time; `defaults` are those of NCCL's own choice."""
    drift = round_drift([times.get(default, ()) for default in defaults])
    level = {
        cell: (size, [value - drift.get(n, 0.0) for n, value in times[cell]])
        for cell, size in log2_size.items()
        if cell in times
    }
    differences = [(size, b - a) for size, values in level.values() for a, b in pairwise(values)]
    sigma = {}
    for size in {size for size, _ in level.values()}:
        # Of sizes within 1.5 octaves, if there are twelve differences; else of all.
        near = [d for other, d in differences if abs(other - size) <= 1.5]
        taken = near if len(near) >= 12 else [d for _, d in differences]
        spread = MAD_TO_SIGMA * float(np.median(np.abs(taken))) / math.sqrt(2) if taken else NOISE
        sigma[size] = max(spread, 0.001)
    return {cell: cell_of(values, sigma[size]) for cell, (size, values) in level.items()}


def cell_of(log_us: Sequence[float], sigma: float) -> Cell:
    """The median of a config's log times and its variance, given the noise of a single one.

    Of two that differ by over four standard deviations the faster counts alone. Three or more that
    scatter twice as far as the noise (a machine with two states) keep their own scatter.
    """
    count, middle = len(log_us), float(np.median(log_us))
    if count == 2 and abs(log_us[0] - log_us[1]) > 4.0 * math.sqrt(2) * sigma:
        return min(log_us), sigma**2, 1
    if count <= 2:  # their median is their mean
        return middle, sigma**2 / count, count
    own = MAD_TO_SIGMA * float(np.median(np.abs(np.array(log_us) - middle)))
    wide = own if own > 2.0 * sigma else sigma
    return middle, MEDIAN_VARIANCE * wide**2 / count, count


def round_drift(of_defaults: Iterable[Sequence[tuple[int, float]]]) -> dict[int, float]:
    """What each round adds to all log times, from NCCL's default in every round.

    Medians polished over tasks and rounds (Tukey, Exploratory Data Analysis, 1977, chapter 11),
    then shrunk by what noise alone would make.
    """
    # The faster of a pair: slow by chance takes two slow calls.
    tasks = [dict(reversed(times)) for times in of_defaults]
    rounds, before = list[int](), math.inf
    while (size := sum(map(len, tasks))) < before:
        before = size
        # The median of fewer tasks is no protection against a slow call, and a task that was seen
        # in one round tells nothing of the others.
        seen_in = Counter(number for task in tasks for number in task)
        rounds = sorted(number for number, count in seen_in.items() if count >= 4)
        told = [{n: log_us for n, log_us in task.items() if n in rounds} for task in tasks]
        tasks = [task for task in told if len(task) >= 2]
    if not tasks:
        return {}
    rest = table = np.array([[task.get(number, np.nan) for number in rounds] for task in tasks])
    drift = np.zeros(len(rounds))
    for _ in range(4):
        rest = table - drift
        rest = rest - np.nanmedian(rest, axis=1, keepdims=True)
        drift = drift + np.nanmedian(rest, axis=0)
    seen = np.isfinite(rest)
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(rest[seen])))
    # The polish has taken its share of the scatter.
    left = (1.0 - 1.0 / len(tasks)) * (1.0 - 1.0 / len(rounds))
    noise = MEDIAN_VARIANCE * sigma**2 / left / seen.sum(axis=0)
    # Only what exceeds twice the variance of noise alone is drift.
    real = max(float(np.mean(drift**2 - 2.0 * noise)), 0.0)
    share = real / (real + noise) if real > 0 else np.zeros(len(rounds))
    return dict(zip(rounds, (drift * share).tolist(), strict=True))
