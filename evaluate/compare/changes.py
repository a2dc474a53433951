"""Statistical tests for changes between two sweeps: overall, by cell, by range of sizes.

A cell is one task under one config; a stretch is a range of neighbouring sizes of one config.

Four tests decide whether there is any change: the median of all cells between runs; more slower
cells, and more faster cells, than permuted runs give (likelihood ratio of a few shifted cells
against none; Donoho and Jin 2004, "Higher criticism for detecting sparse heterogeneous mixtures",
compare such tests); any stretch. Together they give a false alarm in one of a hundred pairs of
equal sweeps. Only if there is a change are cells and stretches listed, with the false discovery
rate controlled (Benjamini and Hochberg).

A cell's own change, beyond the common one, is tested by a moderated t-test (judging.py), a
stretch's by its mean in each run, so that noise common to its cells counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy import stats

from dynamiccl.evaluate.compare.judging import (
    Scales,
    judge,
    moments,
    more_than_chance,
    permuted_spread,
    prior_freedom,
)
from dynamiccl.evaluate.compare.paired import LIKE, LINE, Paired
from dynamiccl.evaluate.gate.evidence import passing

Floats = npt.NDArray[np.float64]
#: Sizes in bytes between stretches: latency-bound, intermediate, bandwidth-bound.
_BOUNDS: Final = (1 << 16, 1 << 22)
_LEAST_SIZES: Final = 3
#: Times further from their side's median, in spreads, are not counted.
_COUNTED: Final = 4.0
#: A cell is too noisy if the probability of its noise among similar cells is below this.
_NOISY: Final = 0.05
_TINY: Final = 1e-12
#: Significance levels of the four tests; 0.01 together.
_SLOWER_LEVEL: Final = 0.004
_LEVEL: Final = 0.002


@dataclass(frozen=True, slots=True)
class Change:
    """A change as a fraction of the old time (> 0: slower), with its 95 % interval."""

    mean: float
    low: float
    high: float
    p: float
    #: Of the difference of log times.
    error: float

    @classmethod
    def of(cls, logs: float, error: float, freedom: float, against: float) -> "Change":
        """A change from a difference of log times; `p` tests a difference of `against`."""
        half = float(stats.t.ppf(0.975, freedom)) * error
        p = 2.0 * float(stats.t.sf(abs(logs - against) / error, freedom)) if error > 0 else 1.0
        mean, low, high = (float(np.expm1(x)) for x in (logs, logs - half, logs + half))
        return cls(mean, low, high, p, error)

    @property
    def text(self) -> str:
        """The change as text."""
        return f"{self.mean:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring sizes of one config in one group."""

    #: The columns LINE.
    line: dict[str, object]
    first_bytes: int
    last_bytes: int
    #: Rows of Paired.cells.
    cells: Sequence[int]
    change: Change


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes from the old sweep to the new."""

    common: Change
    #: Whether the common change is beyond what runs differ by.
    common_is_real: bool
    #: By how many more cells got slower, and faster, than chance gives; 0: no more.
    more_slower: int
    more_faster: int
    #: One for each row of Paired.cells.
    cells: list[Change]
    #: Rows of Paired.cells, and stretches, that changed beyond the common change.
    found: list[int]
    stretches: list[Stretch]

    @property
    def is_slower(self) -> bool:
        """Whether anything got slower."""
        return (
            (self.common_is_real and self.common.mean > 0.0)
            or self.more_slower > 0
            or any(each.change.mean > max(self.common.mean, 0.0) for each in self.stretches)
        )

    @property
    def is_changed(self) -> bool:
        """Whether there is any change."""
        return self.common_is_real or bool(self.more_slower or self.more_faster or self.stretches)


def find_changes(paired: Paired, q: float = 0.05, least: float = 0.01) -> Changes:
    """Judge all shared cells.

    `q`: false discovery rate of what is listed; `least`: the least change that is, a fraction.
    """
    common = _common(paired)
    shift = float(np.log1p(common.mean))
    scales = _scales(paired)
    cells = _cells(paired, scales, shift)
    slower, faster = more_than_chance(
        paired.old.raw, paired.new.raw - shift, scales, (_SLOWER_LEVEL, _LEVEL)
    )
    stretches = _stretches(paired, scales, shift)
    of_stretches = np.array([stretch.change.p for stretch in stretches])
    any_stretch = bool(passing(of_stretches, _LEVEL).any())
    is_real = common.p < _LEVEL
    if not (is_real or slower or faster or any_stretch):
        return Changes(common, False, 0, 0, cells, [], [])
    both = is_real or any_stretch

    def matters(change: Change) -> bool:
        logs = np.log1p(change.mean) - shift
        is_asked = both or bool(slower if logs > 0.0 else faster)
        return is_asked and bool(abs(logs) >= np.log1p(least))

    of_cells = np.array([cell.p for cell in cells])
    found = [int(i) for i in np.flatnonzero(passing(of_cells, q)) if matters(cells[i])]
    listed: list[Stretch] = []
    for i in np.flatnonzero(passing(of_stretches, q)):
        # All sizes of a config come last, and say nothing more where a part of them is listed.
        new = stretches[i]
        if matters(new.change) and not any({*s.cells} <= {*new.cells} for s in listed):
            listed.append(new)
    return Changes(common, is_real, slower, faster, cells, found, listed)


def _common(paired: Paired) -> Change:
    """The median change of all cells, tested against the difference between runs."""
    differences = np.nanmean(paired.new.winsorised, axis=1) - np.nanmean(
        paired.old.winsorised, axis=1
    )
    median = float(np.median(differences))
    _, error, freedom = _welch(paired.new.drift, paired.old.drift)
    # One cell's noise, over all cells, is the least that is left of it.
    spread = float(np.std(differences)) / np.sqrt(len(differences))
    return Change.of(median, float(np.hypot(error, 1.25 * spread)), freedom, 0.0)


def _welch(one: Floats, other: Floats) -> tuple[float, float, float]:
    """Difference of means, its standard error, and Welch and Satterthwaite's degrees of freedom."""
    parts = [float(np.var(side, ddof=1)) / len(side) for side in (one, other)]
    total = sum(parts)
    if total == 0.0:
        return float(np.mean(one) - np.mean(other)), 0.0, 1.0
    shares = [part**2 / (len(side) - 1) for part, side in zip(parts, (one, other), strict=True)]
    return float(np.mean(one) - np.mean(other)), float(np.sqrt(total)), total**2 / sum(shares)


def _cells(paired: Paired, scales: Scales, shift: float) -> list[Change]:
    """The change of each cell; very noisy cells use their own noise only."""
    found, errors, freedom = judge(paired.old.raw, paired.new.raw, scales)
    all_count = replace(scales, limit=np.full(len(found), np.inf), freedom=0.0)
    _, raw_errors, own = judge(paired.old.raw, paired.new.raw, all_count)
    ratios = (raw_errors / np.maximum(errors, _TINY)) ** 2
    noisy = ratios > stats.f.isf(_NOISY, np.maximum(own, 1.0), freedom)
    errors, freedom = np.where(noisy, raw_errors, errors), np.where(noisy, own, freedom)
    return [
        Change.of(float(d), float(e), float(f), shift)
        for d, e, f in zip(found, errors, freedom, strict=True)
    ]


def _scales(paired: Paired) -> Scales:
    """Winsorising limits, and the variance of cells of like size: the mean over the nearest."""
    squares: Floats = np.zeros(paired.cells.height)
    freedom: Floats = np.zeros(paired.cells.height)
    limit = _COUNTED * paired.spread
    for side in (paired.old.raw, paired.new.raw):
        _, more, count = moments(side, limit)
        squares += more
        freedom += count - 1.0
    order = np.argsort(paired.cells["size_bytes"].to_numpy(), kind="stable")
    window = np.ones(min(LIKE, len(order)))
    around = np.convolve(squares[order], window, "same")
    variance = np.empty(len(order))
    variance[order] = around / np.maximum(np.convolve(freedom[order], window, "same"), 1.0)
    known = (freedom > 0) & (variance > 0)
    if not known.any():
        return Scales(limit, variance, 1.0)
    ratios = squares[known] / freedom[known] / variance[known]
    return Scales(limit, variance, prior_freedom(ratios, freedom[known])[1])


def _stretches(paired: Paired, scales: Scales, shift: float) -> list[Stretch]:
    """Small, middle, large and then all sizes of each config, judged by the runs' means over them.

    Of so few means the variance says little by itself. It is drawn towards what the noise of the
    stretch's cells gives, times what it is of that in all stretches together; it is never less than
    the cells' noise gives.
    """
    cells = paired.cells.with_columns(
        part=pl.sum_horizontal((pl.col("size_bytes") > bound).cast(pl.Int8) for bound in _BOUNDS)
    )
    parts, lines = (
        [group for _, group in cells.group_by(keys, maintain_order=True)]
        for keys in ([*LINE, "part"], LINE)
    )
    lines = [line for line in lines if line["part"].n_unique() > 1]
    groups = [group for group in [*parts, *lines] if group.height >= _LEAST_SIZES]
    by_run = [_run_means(paired, group["cell"].to_numpy()) for group in groups]
    held = [i for i, runs in enumerate(by_run) if min(map(len, runs)) > 1]
    if not held:
        return []
    aligned = paired.new.raw.copy()
    for i in held:
        if groups[i]["part"].n_unique() > 1:
            continue
        old, new = by_run[i]
        aligned[groups[i]["cell"].to_numpy()] -= new.mean() - old.mean()
    spread = permuted_spread(paired.old.raw, aligned, scales)
    errors, freedom = _stretch_errors(
        [by_run[i] for i in held], [spread[groups[i]["cell"].to_numpy()] for i in held]
    )
    return [
        Stretch(
            dict(groups[i].select(LINE).row(0, named=True)),
            int(str(groups[i]["size_bytes"].min())),
            int(str(groups[i]["size_bytes"].max())),
            [int(row) for row in groups[i]["cell"]],
            Change.of(
                float(by_run[i][1].mean() - by_run[i][0].mean()),
                float(errors[at]),
                float(freedom[at]),
                shift,
            ),
        )
        for at, i in enumerate(held)
    ]


def _run_means(paired: Paired, rows: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """(runs,) means over some cells, of the old sweep and of the new."""
    old, new = (side.winsorised[rows] for side in (paired.old, paired.new))
    centre = np.nanmean(old, axis=1, keepdims=True)
    means = [np.nanmean(side - centre, axis=0) for side in (old, new)]
    one, other = (mean[~np.isnan(mean)] for mean in means)
    return one, other


def _stretch_errors(
    by_run: Sequence[tuple[Floats, Floats]], spreads: Sequence[Floats]
) -> tuple[Floats, Floats]:
    """Standard errors and degrees of freedom of stretches, (stretches,) each.

    `by_run`: the means of each stretch's runs, old and new; `spreads`: standard deviations of its
    cells' differences, (cells,) each, once its own change is taken out.
    """
    scale = np.array([1.0 / len(old) + 1.0 / len(new) for old, new in by_run])
    freedom = np.array([len(old) + len(new) - 2.0 for old, new in by_run])
    squares = [np.var(old) * len(old) + np.var(new) * len(new) for old, new in by_run]
    variance = np.array(squares) / freedom
    # Its change is a mean over its cells, and took as much of their noise with it.
    sums = [np.sum(x**2) / len(x) ** 2 * len(x) / (len(x) - 1.0) for x in spreads]
    expected = np.maximum(np.array(sums) / scale, _TINY)
    times, more = prior_freedom(variance / expected, freedom)
    drawn = (more * times * expected + freedom * variance) / (more + freedom)
    return np.sqrt(np.maximum(drawn, expected) * scale), freedom + more
