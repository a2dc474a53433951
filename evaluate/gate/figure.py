"""Plot of a gate's verdicts: a strip for each collective and shape, a cell for each size bin."""

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dynamiccl.evaluate.figures.drawing import DARK, svg_text
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.sizes import BINS_PER_OCTAVE, size_label

_LETTERS: Final = {
    Verdict.PASSED: "P",
    Verdict.INFERRED: "i",
    Verdict.REFUSED: "R",
    Verdict.ABSTAINS: "·",
}
_LOOKS: Final[dict[Verdict, dict[str, Any]]] = {
    Verdict.PASSED: {"facecolor": "#b6d7a8"},
    Verdict.INFERRED: {"facecolor": "#d9ead3", "hatch": ".."},
    Verdict.REFUSED: {"facecolor": "#f4cccc", "hatch": "//"},
    Verdict.ABSTAINS: {"facecolor": "#f3f3f3"},
}
_CELL_INCHES: Final = 0.11


def gate_strips(strips: Sequence[tuple[str, Sequence[Cell]]]) -> str:
    """One strip for each (name, cells), as SVG; a letter and a hatch for each verdict."""
    bins = [cell.bin for _, cells in strips for cell in cells]
    first, last = min(bins), max(bins)
    figure = Figure(
        figsize=(2.6 + _CELL_INCHES * max(last - first + 1, 20), 1.0 + 0.28 * len(strips)),
        layout="constrained",
    )
    axes = figure.subplots()
    for level, (_, cells) in enumerate(strips):
        for cell in cells:
            box = (cell.bin - 0.5, level + 0.06)
            look = _LOOKS[cell.verdict]
            axes.add_patch(Rectangle(box, 1.0, 0.88, edgecolor="#777777", linewidth=0.3, **look))
            axes.text(
                cell.bin,
                level + 0.5,
                _LETTERS[cell.verdict],
                ha="center",
                va="center",
                fontsize=6.5,
                color=DARK,
                bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "linewidth": 0},
            )
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.set_ylim(len(strips), 0)
    axes.set_yticks([n + 0.5 for n in range(len(strips))], [name for name, _ in strips], fontsize=8)
    octaves = [b for b in range(first, last + 1) if b % BINS_PER_OCTAVE == 0]
    labels = [size_label(1 << (b // BINS_PER_OCTAVE)) for b in octaves]
    axes.set_xticks(octaves, labels, rotation=90, fontsize=8)
    handles = [
        Patch(label=f"{_LETTERS[each]}  {each}", edgecolor="#777777", linewidth=0.3, **look)
        for each, look in _LOOKS.items()
    ]
    figure.legend(handles=handles, loc="outside lower left", fontsize=8, ncols=4, frameon=False)
    return svg_text(figure)
