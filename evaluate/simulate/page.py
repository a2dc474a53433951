"""The page of a simulation: the table of rows, what it says in words, and a job's course."""

from pathlib import Path
from typing import Final

from dynamiccl.evaluate.blocks import FigureBlock, Section, TableBlock
from dynamiccl.evaluate.page import write_page
from dynamiccl.evaluate.simulate.compare import Comparison, Row
from dynamiccl.evaluate.simulate.timeline import timeline_figure

HEADS: Final = (
    "who decides",
    "communication, s a job",
    "over NCCL's choice",
    "whole job over NCCL's",
    "over the fastest of each call",
    "changes per 1,000 calls",
    "slower than NCCL",
    "alarms per 100,000 calls",
)


def cells(row: Row) -> list[str]:
    """A row as texts, in the order of HEADS."""
    return [
        row.name,
        row.seconds.text(".1f"),
        row.over_default.text("+.1%"),
        row.job_over_default.text("+.1%"),
        row.regret.text(".1%"),
        f"{row.changes_per_1000_calls:.1f}",
        f"{row.share_slower_than_default:.1%}",
        f"{row.alarms_per_1e5_calls:.0f}",
    ]


def write_simulation(found: Comparison, ours: frozenset[str], delay: int, out: Path) -> Path:
    """Write page, results and figures into `out`; the page's path."""
    svg = timeline_figure(found.timelines)
    table = TableBlock(
        "Who spends least time",
        HEADS,
        [cells(row) for row in found.rows],
        ours=ours,
        layout="numbers",
        note="Intervals of 95 % over seeds. The fastest of each call: the config that is fastest "
        "at that call, as if changes cost nothing; the oracle's row pays for its changes.",
    )
    course = FigureBlock(
        "A job's course",
        "timeline",
        svg,
        "The first job of the first seed: measured time of its calls over NCCL's true time at the "
        "same calls (geometric means over some calls in a row); below 1 is faster. Grey: the "
        "slowdown of the worst link or host, on a scale of its own, 1 to 16. Red bars: alarms "
        "begin; crosses: the config changes.",
    )
    section = Section("All rows", [table, course], simulated=True)
    plain = found.to_json()
    path = write_page(out, "simulate", plain, [section], {**plain, "delay": delay})
    (out / f"{course.name}.svg").write_text(svg, encoding="utf-8")
    return path
