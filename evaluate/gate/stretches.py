"""Ranges of neighbouring size bins (stretches) that pass a gate as a whole.

A stretch reaches from one bin that passed alone to another, the policy wants one config all over
it, and NCCL's own choice is one wherever it was measured. In it lie bins that nobody measured, or
that did not pass alone for want of runs. They pass together where

* the gains of all bins within it that were measured, pooled run by run, exceed the noise band: one
  test a stretch, at a false discovery rate of `q` over all stretches;
* no bin of it says otherwise: a bin that is slower on average, or lies below the band beyond doubt,
  ends the stretch. Gains that differ are no harm; a bin that loses among bins that win is;
* a bin that nobody measured has measured ones within an octave on both sides, and NCCL's own choice
  is known there, too. By its cost model it then is: each cell's time is a straight line in bytes
  (but for Tree's correction, which the model is asked for), so what is cheapest at both ends is
  cheapest between.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

import numpy as np

from dynamiccl.datasets.manifest import Support
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.evaluate.gate.evidence import MIN_RUNS, FreshRuns, p_value, passing
from dynamiccl.sizes import BINS_PER_OCTAVE

#: Significance level of the test that a bin's gain lies below the noise band.
_BELOW: Final = 0.05


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Ascending cells of one config; the first and the last passed alone."""

    cells: Sequence[Cell]
    #: Bins between them in which runs measured default and config.
    within: Sequence[int]
    #: P value of the pooled test; None: nothing in between was measured.
    p_value: float | None = None


def let_stretches_pass(
    cells: Sequence[Cell],
    supports: Mapping[tuple[str, int, int], Support],
    fresh: FreshRuns,
    q: float,
) -> list[Cell]:
    """The cells, with verdict INFERRED for those that pass in a stretch, or the reason."""
    stretches = [
        stretch
        for key, family in _families(cells).items()
        for stretch in _stretches(family, supports[key[:3]], fresh)
    ]
    tested = [each for each in stretches if each.p_value is not None]
    p_values = np.array([each.p_value for each in tested], dtype=np.float64)
    failed = {id(s) for s, ok in zip(tested, passing(p_values, q), strict=True) if not ok}
    found: dict[tuple[str, int, int, str, int], Cell] = {}
    for stretch in stretches:
        for cell in stretch.cells:
            if cell.verdict is Verdict.REFUSED:
                support = supports[cell.place[:3]]
                found[cell.place] = (
                    replace(cell, reason="neither it nor the stretch around it is beyond the noise")
                    if id(stretch) in failed
                    else _within(cell, stretch, support, fresh)
                )
    return [found.get(cell.place, _alone(cell, fresh, supports)) for cell in cells]


def _within(cell: Cell, stretch: _Stretch, support: Support, fresh: FreshRuns) -> Cell:
    """The verdict on a bin of a passing stretch; unmeasured bins need measured neighbours."""
    first, last = stretch.cells[0].bin, stretch.cells[-1].bin
    measured = [first, *stretch.within, last]
    below = max(each for each in measured if each <= cell.bin)
    above = min(each for each in measured if each >= cell.bin)
    if max(cell.bin - below, above - cell.bin) > BINS_PER_OCTAVE:
        return replace(cell, reason="it was not measured, nor a bin within an octave on both sides")
    if not fresh.one_default(support, cell.collective, [below, cell.bin, above]):
        reason = "NCCL's own choice there is not known to be that of its neighbours"
        return replace(cell, reason=reason)
    why = "with the stretch around it" if cell.runs else "as its neighbours on both sides"
    return replace(cell, verdict=Verdict.INFERRED, reason=why)


def _alone(cell: Cell, fresh: FreshRuns, supports: Mapping[tuple[str, int, int], Support]) -> Cell:
    """The verdict on a bin outside of stretches: the reason, where not measured."""
    if cell.verdict is not Verdict.REFUSED or cell.runs:
        return cell
    support = supports[cell.place[:3]]
    if cell.bin in fresh.measured_bins(support, cell.collective):
        return cell
    reason = "it was not measured, and its neighbours did not both pass with this config"
    return replace(cell, reason=reason)


def _families(cells: Sequence[Cell]) -> dict[tuple[str, int, int, str], list[Cell]]:
    """Cells by system, nodes, ranks and collective, ascending in size."""
    families: dict[tuple[str, int, int, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.bin):
        families.setdefault(cell.place[:4], []).append(cell)
    return families


def _stretches(family: Sequence[Cell], support: Support, fresh: FreshRuns) -> Iterator[_Stretch]:
    """The stretches of a family, with their pooled tests."""
    losing = {cell.bin for cell in family if cell.runs and _loses(cell, support, fresh)}
    for _, group in groupby(family, key=lambda cell: (cell.action, cell.bin in losing)):
        run = list(group)
        passed = [i for i, cell in enumerate(run) if cell.verdict is Verdict.PASSED]
        while len(passed) > 1:
            first, last = passed[0], passed[0]
            for each in passed[1:]:
                if not _one_default(run[first : each + 1], support, fresh):
                    break
                last = each
            if last > first + 1:
                yield _pooled(run[first : last + 1], support, fresh)
            passed = [i for i in passed if i > last]


def _one_default(cells: Sequence[Cell], support: Support, fresh: FreshRuns) -> bool:
    measured = [cell.bin for cell in cells if cell.runs]
    return fresh.one_default(support, cells[0].collective, measured)


def _loses(cell: Cell, support: Support, fresh: FreshRuns) -> bool:
    """Whether a bin's own runs forbid that it passes with others."""
    gains = fresh.gains(support, cell.collective, [cell.bin], cell.action)
    band = fresh.band(support, cell.collective)
    if band is None or len(gains) < MIN_RUNS or float(np.mean(gains)) <= 0.0:
        return True
    return p_value(np.log1p(band) - gains) < _BELOW


def _pooled(cells: Sequence[Cell], support: Support, fresh: FreshRuns) -> _Stretch:
    within = [cell.bin for cell in cells[1:-1] if cell.runs]
    if not within:
        return _Stretch(cells, within)
    collective = cells[0].collective
    gains = fresh.gains(support, collective, within, cells[0].action)
    band = fresh.band(support, collective) or 0.0  # those at the ends passed, so it is known
    return _Stretch(cells, within, p_value(gains - np.log1p(band)))
