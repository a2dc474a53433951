"""Moderated t-tests of single cells, and a permutation test of all cells together.

Noise differs from cell to cell, and five runs say little about how much: a cell's variance is drawn
towards that of cells of like size, the more the more alike their variances are (Smyth 2004, "Linear
models and empirical Bayes methods", which has both formulas).

Where noise is nothing like normal (two of three launches alike, the third slow by half), small
p-values are too many in like sweeps, too. Permuted within each cell, the runs of such cells give as
many, so that the test of all cells is held against that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

Floats = npt.NDArray[np.float64]
#: Bounds of the prior's degrees of freedom: above, it hardly matters; below, no root is looked for.
_LEAST_FREEDOM, _MOST_FREEDOM = 0.2, 100.0
#: A variance this far below its prior is a tie of rounded times.
_LEAST_RATIO: Final = 1e-3
#: Permutations, at how many cells a time, and how many of them are enough to say "by chance".
_PERMUTATIONS: Final = 4000
_FEW_PERMUTATIONS: Final = 400
_AT_ONCE: Final = 100_000
_ENOUGH: Final = 40
#: The alternative of the test of all cells: this share of them shifted, by so many standard errors.
_SHARE: Final = 0.05
_SHIFTS: Final = (1.5, 2.5, 4.0)
#: A score above counts as this one: three slow launches of five are no upgrade.
_HIGHEST: Final = 3.5
#: One-sided level at which shifted cells are counted.
_COUNTED: Final = 0.05


@dataclass(frozen=True, slots=True)
class Scales:
    """Prior knowledge of the cells' noise, from cells of similar size."""

    #: (cells,): how far from its side's median a log time counts.
    limit: Floats
    #: (cells,): variance of a log time.
    variance: Floats
    #: Degrees of freedom that this variance counts for.
    freedom: float

    def of(self, cells: npt.NDArray[np.bool_]) -> "Scales":
        """The scales of the cells in a mask (cells,)."""
        return Scales(self.limit[cells], self.variance[cells], self.freedom)


def prior_freedom(ratios: Floats, freedom: Floats) -> tuple[float, float]:
    """Scale and degrees of freedom of the prior by which variances scatter about their own.

    `ratios` (n,): a sample variance over what it is expected to be; `freedom` (n,): its degrees of
    freedom. By the mean and variance of the logarithms (Smyth 2004, section 6.2).
    """
    half = freedom / 2.0
    logs = np.log(np.maximum(ratios, _LEAST_RATIO)) - special.digamma(half) + np.log(half)
    rest = float(np.var(logs) - np.mean(special.polygamma(1, half)))
    low, high = _LEAST_FREEDOM / 2.0, _MOST_FREEDOM / 2.0
    rest = float(np.clip(rest, special.polygamma(1, high), special.polygamma(1, low)))
    found = optimize.brentq(lambda x: special.polygamma(1, x) - rest, low, high)
    return float(np.exp(np.mean(logs) + special.digamma(found) - np.log(found))), 2.0 * found


def moments(side: Floats, limit: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean, sum of squares about it, and number of the times near their median, (..., cells).

    `side`: (..., cells, runs), NaN where a run has none; `limit` (cells,): how near.
    """
    median = np.nanmedian if np.isnan(side).any() else np.median
    near = np.abs(side - median(side, axis=-1, keepdims=True)) <= limit[:, None]
    # Two times far apart have none near their median: both count.
    near |= ~near.any(axis=-1, keepdims=True) & ~np.isnan(side)
    count: Floats = near.sum(axis=-1).astype(np.float64)
    mean = np.where(near, side, 0.0).sum(axis=-1) / count
    squares = (np.where(near, side - mean[..., None], 0.0) ** 2).sum(axis=-1)
    return mean, squares, count


def judge(old: Floats, new: Floats, scales: Scales) -> tuple[Floats, Floats, Floats]:
    """Differences of log times, their standard errors and degrees of freedom, (..., cells).

    `old`, `new`: (..., cells, runs), NaN where a run has none.
    """
    one, squares, count = moments(old, scales.limit)
    other, more_squares, more_count = moments(new, scales.limit)
    freedom = count + more_count - 2.0 + scales.freedom
    variance = scales.freedom * scales.variance + squares + more_squares
    variance /= np.maximum(freedom, _LEAST_FREEDOM)
    errors: Floats = np.sqrt(variance * (1.0 / count + 1.0 / more_count))
    return other - one, errors, freedom


def more_than_chance(
    old: Floats, new: Floats, scales: Scales, levels: tuple[float, float]
) -> tuple[int, int]:
    """Excess of cells that got slower, and faster, over permuted runs; 0: no excess.

    `old`, `new`: (cells, runs) without what all cells share; cells with gaps are left out. Each of
    the two is wrong with a probability of its own, `levels`.
    """
    whole, both = _without_gaps(old, new)
    if not whole.any():
        return 0, 0
    known, num_old = scales.of(whole), old.shape[1]
    found = _scores(both, num_old, known)
    seen = np.array([_evidence(sign * found) for sign in (1.0, -1.0)])
    above, draws = np.zeros(2), 0
    for permuted in _permutations(both, _PERMUTATIONS):
        scores = _scores(permuted, num_old, known)
        draws += len(permuted)
        above += [
            np.sum(_evidence(s * scores) >= e) for s, e in zip((1.0, -1.0), seen, strict=True)
        ]
        if (above >= _ENOUGH).all():
            return 0, 0
    excess = [
        int(np.sum(sign * found > stats.norm.isf(_COUNTED)) - _COUNTED * len(found))
        for sign in (1.0, -1.0)
    ]
    is_real = (above + 1.0) / (draws + 1.0) < np.array(levels)
    slower, faster = (max(1, n) if real else 0 for n, real in zip(excess, is_real, strict=True))
    return slower, faster


def permuted_spread(old: Floats, new: Floats, scales: Scales) -> Floats:
    """(cells,) spread of differences when runs are permuted between the sweeps.

    A cell with gaps has its own standard error.
    """
    spread = judge(old, new, scales)[1]
    whole, both = _without_gaps(old, new)
    known, num_old = scales.of(whole), old.shape[1]
    squares: Floats = np.zeros(len(both))
    draws = 0
    for mixed in _permutations(both, _FEW_PERMUTATIONS):
        draws += len(mixed)
        difference = judge(mixed[..., :num_old], mixed[..., num_old:], known)[0]
        squares += np.sum(difference**2, axis=0)
    spread[whole] = np.sqrt(squares / draws)
    return spread


def _without_gaps(old: Floats, new: Floats) -> tuple[npt.NDArray[np.bool_], Floats]:
    """(cells,) mask of cells that all runs have; and their runs, both sweeps concatenated."""
    both = np.hstack([old, new])
    whole = np.asarray(np.isfinite(both).all(axis=1), dtype=np.bool_)
    return whole, both[whole]


def _permutations(both: Floats, count: int) -> Iterator[Floats]:
    """(draws, cells, runs): runs permuted in each cell, `count` times or a few more, in batches."""
    random = np.random.default_rng(0)  # the same sweeps, the same answer
    at_once = max(1, min(count, _AT_ONCE // max(len(both), 1)))
    for _ in range(-(-count // at_once)):
        order = np.argsort(random.random((at_once, *both.shape)), axis=-1)
        yield np.take_along_axis(np.broadcast_to(both, order.shape), order, axis=-1)


def _scores(both: Floats, num_old: int, scales: Scales) -> Floats:
    """(..., cells): t as the normal deviate of the same probability, above 0 slower.

    By Wallace's approximation (1959), good to a hundredth.
    """
    difference, error, freedom = judge(both[..., :num_old], both[..., num_old:], scales)
    t = difference / np.maximum(error, 1e-12)
    size = np.sqrt(freedom * np.log1p(t**2 / freedom))
    scores: Floats = np.sign(t) * (8.0 * freedom + 1.0) / (8.0 * freedom + 3.0) * size
    return scores


def _evidence(scores: Floats) -> Floats:
    """(...): log likelihood ratio of a few shifted cells among (..., cells) against none."""
    shifted: Floats = np.zeros_like(scores)
    bounded = np.minimum(scores, _HIGHEST)
    for shift in _SHIFTS:
        shifted += np.exp(shift * bounded - 0.5 * shift**2) / len(_SHIFTS)
    ratio: Floats = np.log1p(_SHARE * (shifted - 1.0)).sum(axis=-1)
    return ratio
