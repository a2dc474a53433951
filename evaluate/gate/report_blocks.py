"""A gate's verdicts as blocks of a report page: tables, and strips of size bins."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.blocks import Block, FigureBlock, TableBlock
from dynamiccl.evaluate.figures.drawing import svg_text, write_cell
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.evaluate.gate.gate import Gated
from dynamiccl.evaluate.gate.gated import gate_rows, refusals
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


def gate_blocks(name: str, gated: Gated) -> Iterator[Block]:
    """Counts, reasons, and a strip each collective and group shape of the policy `name`."""
    heads, *rows = gate_rows(gated)
    note = (
        f"Size bins of the decision tables by verdict, at a false discovery rate of {gated.q:g}. "
        f"Passed, in fresh runs: {gated.test}. Inferred: as both "
        "neighbours. Refused: the policy wanted a config that did not pass. Abstains: it left the "
        "choice to NCCL itself. Collectives in which it wants nothing are left out."
    )
    yield TableBlock(f"Verdicts on {name}", heads, rows, note)
    found = [[str(count), reason] for count, reason in refusals(gated)]
    if found:
        title = f"Why {name} was refused"
        yield TableBlock(title, ["bins", "reason"], found, layout="reasons")
    for system, strips in _strips(gated).items():
        yield FigureBlock(
            f"What the gate let through: {name} on {system}",
            f"gate-{slug(name)}-{slug(system)}",
            gate_strips(list(strips.items())),
            "A cell each size bin: P passed, i inferred, R refused, a dot where the policy leaves "
            "the choice to NCCL.",
        )


def _strips(gated: Gated) -> dict[str, dict[str, list[Cell]]]:
    """System -> family -> its cells by size, where the policy wants anything."""
    found: dict[str, dict[str, list[Cell]]] = {}
    for cell in sorted(gated.cells, key=lambda cell: (cell.system, cell.num_ranks, cell.bin)):
        shape = f"{cell.num_nodes} x {cell.num_ranks // cell.num_nodes}"
        strips = found.setdefault(cell.system, {})
        strips.setdefault(f"{cell.collective}, {shape}", []).append(cell)
    wanted = {
        system: {
            name: cells
            for name, cells in strips.items()
            if any(cell.verdict is not Verdict.ABSTAINS for cell in cells)
        }
        for system, strips in found.items()
    }
    return {system: strips for system, strips in wanted.items() if strips}


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
            behind = {"boxstyle": "square,pad=0.05", "facecolor": "white", "linewidth": 0}
            letter = _LETTERS[cell.verdict]
            write_cell(axes, cell.bin, level + 0.5, letter, fontsize=6.5, bbox=behind)
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
