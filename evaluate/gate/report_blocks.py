"""A gate's verdicts as blocks of a report page."""

from collections.abc import Iterator

from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.blocks import Block, FigureBlock, TableBlock
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.evaluate.gate.figure import gate_strips
from dynamiccl.evaluate.gate.gate import Gated
from dynamiccl.evaluate.gate.gated import gate_rows, refusals


def gate_blocks(name: str, gated: Gated) -> Iterator[Block]:
    """Counts, reasons, and a strip each collective and group shape of the policy `name`."""
    heads, *rows = gate_rows(gated)
    note = (
        f"Size bins of the decision tables by verdict, at a false discovery rate of {gated.q:g}. "
        "Passed: faster than NCCL's default beyond the noise in fresh runs. Inferred: as both "
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
