"""Cells judged one by one, and all together by shuffling which run belongs to which sweep.

Where noise is nothing like normal (two of three launches alike, the third slow by half), small
p-values are too many in like sweeps, too. Shuffled, cell by cell, such cells give as many, so that
what a crowd of cells says is held against that.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
#: Runs that the variance of like cells counts for.
_PRIOR_RUNS: Final = 4.0
#: Shuffles, at how many cells a time, and the share of cells that higher criticism looks at.
_SHUFFLES: Final = 4000
_FEW_SHUFFLES: Final = 400
_AT_ONCE: Final = 200_000
_LOOKED_AT: Final = 0.2


def judge(old: Floats, new: Floats, reach: Floats, prior: Floats) -> tuple[Floats, Floats, Floats]:
    """Differences of log times, their standard errors and degrees of freedom, (..., cells).

    `old`, `new`: (..., cells, runs), NaN where a run has none. `reach` (cells,): how far from its
    side's median a time counts in full. `prior` (cells,): the variance of cells of like size.
    """
    with_gaps = bool(np.isnan(old).any() or np.isnan(new).any())
    median, mean, total = (
        (np.nanmedian, np.nanmean, np.nansum) if with_gaps else (np.median, np.mean, np.sum)
    )
    means, counts = [], []
    tamed_squares: Floats = np.zeros(old.shape[:-1])
    raw_squares: Floats = np.zeros(old.shape[:-1])
    for side in (old, new):
        centre = median(side, axis=-1, keepdims=True)
        tamed = np.clip(side, centre - reach[:, None], centre + reach[:, None])
        means.append(mean(tamed, axis=-1))
        counts.append(np.sum(~np.isnan(side), axis=-1))
        tamed_squares += total((tamed - means[-1][..., None]) ** 2, axis=-1)
        raw_squares += total((side - mean(side, axis=-1, keepdims=True)) ** 2, axis=-1)
    freedom = np.maximum(counts[0] + counts[1] - 2, 0).astype(np.float64)
    drawn = (_PRIOR_RUNS * prior + tamed_squares) / (_PRIOR_RUNS + freedom)
    # Noisier than its like, and be it by outliers: then its own counts, and no other cell's.
    own = raw_squares / np.maximum(freedom, 1.0)
    errors = np.sqrt(np.maximum(drawn, own) * (1.0 / counts[0] + 1.0 / counts[1]))
    freedom = np.where(own > drawn, np.maximum(freedom, 1.0), freedom + _PRIOR_RUNS)
    return means[1] - means[0], errors, freedom


def crowds(old: Floats, new: Floats, reach: Floats, prior: Floats, level: float) -> tuple[int, int]:
    """By how many more cells got slower, and faster, than shuffled runs give; 0: no more.

    `old`, `new`: (cells, runs) without what all cells share; cells with gaps are left out. Each of
    the two is wrong with probability `level`.
    """
    whole, both = _without_gaps(old, new)
    if not whole.any():
        return 0, 0
    scales = (reach[whole], prior[whole])
    found = [_criticism(p) for p in _p_values(both[None], old.shape[1], *scales)]
    above, draws = np.zeros(2), 0
    for shuffled in _shuffles(both, _SHUFFLES):
        draws += len(shuffled)
        for side, p_values in enumerate(_p_values(shuffled, old.shape[1], *scales)):
            above[side] += np.sum(_criticism(p_values)[0] >= found[side][0][0])
    shares = (above + 1.0) / (draws + 1.0)
    return tuple(  # type: ignore[return-value]
        max(1, int(excess[0])) if share < level else 0
        for share, (_, excess) in zip(shares, found, strict=True)
    )


def shuffled_spread(old: Floats, new: Floats, reach: Floats, prior: Floats) -> Floats:
    """(cells,): by how much differences of cells scatter when runs are shuffled between the sweeps.

    A cell with gaps has its own standard error.
    """
    spread = judge(old, new, reach, prior)[1]
    whole, both = _without_gaps(old, new)
    num_old, scales = old.shape[1], (reach[whole], prior[whole])
    squares: Floats = np.zeros(len(both))
    draws = 0
    for mixed in _shuffles(both, _FEW_SHUFFLES):
        draws += len(mixed)
        difference = judge(mixed[..., :num_old], mixed[..., num_old:], *scales)[0]
        squares += np.sum(difference**2, axis=0)
    spread[whole] = np.sqrt(squares / draws)
    return spread


def _without_gaps(old: Floats, new: Floats) -> tuple[npt.NDArray[np.bool_], Floats]:
    """(cells,): which all runs hold; and those cells, the runs of both sweeps side by side."""
    both = np.hstack([old, new])
    whole = np.asarray(np.isfinite(both).all(axis=1), dtype=np.bool_)
    return whole, both[whole]


def _shuffles(both: Floats, count: int) -> Iterator[Floats]:
    """(draws, cells, runs): runs shuffled in each cell, `count` times or a few more, in batches."""
    random = np.random.default_rng(0)  # the same sweeps, the same answer
    at_once = max(1, min(count, _AT_ONCE // max(len(both), 1)))
    for _ in range(-(-count // at_once)):
        order = np.argsort(random.random((at_once, *both.shape)), axis=-1)
        yield np.take_along_axis(np.broadcast_to(both, order.shape), order, axis=-1)


def _p_values(both: Floats, num_old: int, reach: Floats, prior: Floats) -> tuple[Floats, Floats]:
    """One-sided p-values (draws, cells) of getting slower, and faster."""
    difference, error, freedom = judge(both[..., :num_old], both[..., num_old:], reach, prior)
    slower: Floats = stats.t.sf(difference / np.maximum(error, 1e-12), freedom)
    return slower, 1.0 - slower


def _criticism(p_values: Floats) -> tuple[Floats, Floats]:
    """Higher criticism of p-values (draws, cells), and how many more there are than expected."""
    count = p_values.shape[-1]
    looked_at = max(1, int(_LOOKED_AT * count))
    ranked = np.maximum(np.sort(p_values, axis=-1)[..., :looked_at], 1.0 / count)
    expected = np.arange(1, looked_at + 1) / count
    scores = (expected - ranked) / np.sqrt(ranked * (1.0 - ranked) / count + 1e-12)
    best = scores.argmax(axis=-1)[..., None]
    more = np.take_along_axis(count * (expected - ranked), best, axis=-1)[..., 0]
    return scores.max(axis=-1), more
