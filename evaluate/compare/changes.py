"""Whether anything changed, and then which cells and which stretches of sizes of one config.

First it is asked whether there is any change: the median of all cells, between runs; more slower,
or more faster, cells than shuffled runs give (higher criticism: Donoho and Jin 2004, "Higher
criticism for detecting sparse heterogeneous mixtures"); any stretch. All four together are wrong in
one pair of like sweeps in a hundred. Only where something changed are cells and stretches told, by
Benjamini and Hochberg's procedure, which holds the share of false ones.

A cell is judged beyond the common change by Welch's t with a variance drawn towards that of cells
of like size (Smyth 2004, "Linear models and empirical Bayes methods"), a stretch by the runs' means
over it, so that noise that its cells share is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy import stats

from dynamiccl.evaluate.compare.judging import crowds, judge, shuffled_spread
from dynamiccl.evaluate.compare.paired import LIKE, LINE, Paired
from dynamiccl.evaluate.gate.evidence import passing

Floats = npt.NDArray[np.float64]
#: Where the sizes of a config are cut into stretches: latency, between, bandwidth.
_BOUNDS: Final = (1 << 16, 1 << 22)
_LEAST_SIZES: Final = 3
#: At which each of the four questions is answered.
_LEVEL: Final = 0.0025


@dataclass(frozen=True, slots=True)
class Change:
    """A change as a fraction of the old time, above 0 slower, with its 95 % interval."""

    mean: float
    low: float
    high: float
    p: float
    #: Of the difference of log times.
    error: float

    @classmethod
    def of(cls, logs: float, error: float, freedom: float, against: float) -> "Change":
        """From a difference of log times; `p` against a difference of `against`."""
        half = float(stats.t.ppf(0.975, freedom)) * error
        p = 2.0 * float(stats.t.sf(abs(logs - against) / error, freedom)) if error > 0 else 1.0
        mean, low, high = (float(np.expm1(x)) for x in (logs, logs - half, logs + half))
        return cls(mean, low, high, p, error)

    @property
    def text(self) -> str:
        """For people."""
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
    """What changed from the old sweep to the new."""

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
    """Judge all shared cells; `q`: share of false discoveries, `least`: what is worth telling."""
    common = _common(paired)
    shift = float(np.log1p(common.mean))
    prior = _prior(paired)
    cells = _cells(paired, prior, shift)
    logs = (paired.old.raw, paired.new.raw - shift)
    slower, faster = crowds(*logs, paired.reach, prior, _LEVEL)
    stretches = _stretches(paired, shift, shuffled_spread(*logs, paired.reach, prior))
    of_stretches = np.array([stretch.change.p for stretch in stretches])
    any_stretch = bool(passing(of_stretches, _LEVEL).any())
    is_real = common.p < _LEVEL
    if not (is_real or slower or faster or any_stretch):
        return Changes(common, False, 0, 0, cells, [], [])

    def matters(change: Change) -> bool:
        return bool(abs(np.log1p(change.mean) - shift) >= np.log1p(least))

    of_cells = np.array([cell.p for cell in cells])
    found = [int(i) for i in np.flatnonzero(passing(of_cells, q)) if matters(cells[i])]
    told = [stretches[i] for i in np.flatnonzero(passing(of_stretches, q))]
    return Changes(
        common, is_real, slower, faster, cells, found, [s for s in told if matters(s.change)]
    )


def _common(paired: Paired) -> Change:
    """The median change of all cells, judged by how far runs of one sweep differ."""
    differences = np.nanmean(paired.new.steady, axis=1) - np.nanmean(paired.old.steady, axis=1)
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


def _cells(paired: Paired, prior: Floats, shift: float) -> list[Change]:
    found = judge(paired.old.raw, paired.new.raw, paired.reach, prior)
    return [Change.of(float(d), float(e), float(f), shift) for d, e, f in zip(*found, strict=True)]


def _prior(paired: Paired) -> Floats:
    """The variance of cells of like size: the mean over the nearest."""
    sides = (paired.old.steady, paired.new.steady)
    squares: Floats = np.zeros(paired.cells.height)
    freedom: Floats = np.zeros(paired.cells.height)
    for side in sides:
        squares += np.nansum((side - np.nanmean(side, axis=1, keepdims=True)) ** 2, axis=1)
        freedom += np.sum(~np.isnan(side), axis=1) - 1.0
    order = np.argsort(paired.cells["size_bytes"].to_numpy(), kind="stable")
    window = np.ones(min(LIKE, len(order)))
    around = np.convolve(squares[order], window, "same")
    prior = np.empty(len(order))
    prior[order] = around / np.maximum(np.convolve(freedom[order], window, "same"), 1.0)
    return prior


def _stretches(paired: Paired, shift: float, spread: Floats) -> list[Stretch]:
    """Every run of neighbouring sizes, judged; never with less noise than its cells have."""
    found = []
    cells = paired.cells.with_columns(
        part=pl.sum_horizontal((pl.col("size_bytes") > bound).cast(pl.Int8) for bound in _BOUNDS)
    )
    for _, group in cells.group_by([*LINE, "part"], maintain_order=True):
        rows = group["cell"].to_numpy()
        if len(rows) < _LEAST_SIZES:
            continue
        old, new = (side.steady[rows] for side in (paired.old, paired.new))
        centre = np.nanmean(old, axis=1, keepdims=True)
        by_run = [np.nanmean(side - centre, axis=0) for side in (new, old)]
        kept = [run[~np.isnan(run)] for run in by_run]
        if min(map(len, kept)) < 2:
            continue
        logs, error, freedom = _welch(*kept)
        own = np.sqrt(np.sum(spread[rows] ** 2)) / len(rows)
        sizes = group["size_bytes"]
        found.append(
            Stretch(
                dict(group.select(LINE).row(0, named=True)),
                int(str(sizes.min())),
                int(str(sizes.max())),
                [int(row) for row in rows],
                Change.of(logs, max(error, float(own)), freedom, shift),
            )
        )
    return found
