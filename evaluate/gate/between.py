"""Size bins that nobody measured, between two that passed a gate.

They pass with the config of both where the policy wants it in all bins between, both are within an
octave, and NCCL's own choice is known to be the same there as in both. By its cost model it then
is: each cell's time is a straight line in bytes (but for Tree's correction, which the model is
asked for), so what is cheapest at both ends is cheapest between.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from dynamiccl.datasets.manifest import Support
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.evaluate.gate.evidence import FreshRuns
from dynamiccl.sizes import BINS_PER_OCTAVE


def let_bins_between_pass(
    cells: Sequence[Cell], supports: Mapping[tuple[str, int, int], Support], fresh: FreshRuns
) -> list[Cell]:
    """The cells, with verdict INFERRED for those that pass with their neighbours, or the reason."""
    found = {cell.place: cell for cell in cells}
    for cell in cells:
        support = supports[cell.place[:3]]
        unknown = cell.verdict is Verdict.REFUSED and not cell.runs
        if unknown and cell.bin not in fresh.measured_bins(support, cell.collective):
            reason = "it was not measured, and its neighbours did not both pass with this config"
            found[cell.place] = replace(cell, reason=reason)
    by_bin = sorted(cells, key=lambda cell: cell.place)
    for _, group in groupby(by_bin, key=lambda cell: (cell.place[:4], cell.action)):
        run = list(group)
        measured = [i for i, cell in enumerate(run) if cell.runs]
        for first, last in pairwise(measured):
            if run[first].verdict is run[last].verdict is Verdict.PASSED:
                for cell in run[first + 1 : last]:
                    below, above = run[first].bin, run[last].bin
                    found[cell.place] = _between(below, cell, above, supports, fresh)
    return [found[cell.place] for cell in cells]


def _between(
    below: int,
    cell: Cell,
    above: int,
    supports: Mapping[tuple[str, int, int], Support],
    fresh: FreshRuns,
) -> Cell:
    """The verdict on a bin between two that passed with its config."""
    if max(cell.bin - below, above - cell.bin) > BINS_PER_OCTAVE:
        return replace(cell, reason="it was not measured, nor a bin within an octave on both sides")
    support = supports[cell.place[:3]]
    if not fresh.one_default(support, cell.collective, [below, cell.bin, above]):
        reason = "NCCL's own choice there is not known to be that of its neighbours"
        return replace(cell, reason=reason)
    return replace(cell, verdict=Verdict.INFERRED, reason="as its neighbours on both sides")
