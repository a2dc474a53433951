"""The HTML page of a report: one self-contained file, no script, no fetch."""

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import jinja2
import polars as pl
from markupsafe import Markup

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.baselines.families import FAMILY
from dynamiccl.evaluate.metrics import OPTIMISTIC, Summary
from dynamiccl.evaluate.plots import curves, family_title, heat_map, order_by_size
from dynamiccl.evaluate.policies import Actions

if TYPE_CHECKING:
    from dynamiccl.evaluate.report import SystemReport

HEADS: Final = (
    "policy",
    "tasks",
    "mean regret",
    "cross-fitted, 95 % interval",
    "p50",
    "p95",
    "max",
    "time-weighted",
    "ratio to default",
    "abstained",
    "slower than default",
    "probes a task",
)
#: A family is drawn when it has so many sizes; at most so many families a system.
_MIN_SIZES: Final = 4
_MAX_FAMILIES: Final = 8


def cells(summary: Summary) -> list[str]:
    """One summary as the texts of a table row, in the order of HEADS."""
    interval = summary.interval
    slower = summary.slower_than_default
    return [
        summary.policy,
        str(summary.tasks),
        f"{summary.mean:.2%}",
        OPTIMISTIC
        if interval is None
        else f"{summary.crossfit:.2%} ({interval[0]:.2%} to {interval[1]:.2%})",
        f"{summary.p50:.2%}",
        f"{summary.p95:.2%}",
        f"{summary.max:.2%}",
        f"{summary.time_weighted:.2%}",
        f"{summary.ratio_to_default:.4f}",
        f"{summary.abstained:.0%}",
        "noise unknown" if slower is None else f"{slower:.0%}",
        f"{summary.probes:.0f}",
    ]


def render(
    systems: Sequence["SystemReport"],
    *,
    grid: TaskGrid,
    choices: Mapping[str, Actions],
    catalogue: Catalogue,
    header: Mapping[str, Any],
) -> str:
    """The page's text."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = resources.files("dynamiccl.evaluate").joinpath("report.html.jinja").read_text("utf-8")
    learned = {name for name, _ in header["policies"]}
    sections = [_section(s, grid, choices, catalogue, learned) for s in systems]
    return environment.from_string(source).render(sections=sections, heads=HEADS, **header)


def _section(
    system: "SystemReport",
    grid: TaskGrid,
    choices: Mapping[str, Actions],
    catalogue: Catalogue,
    learned: set[str],
) -> dict[str, Any]:
    tables = [{"title": "All collectives", "rows": _rows(system.summaries, learned)}]
    if system.beyond_noise:
        count = system.beyond_noise[0].tasks
        title = f"Where NCCL's default itself is beyond the noise band: {count} of the tasks"
        tables.append({"title": title, "rows": _rows(system.beyond_noise, learned)})
    if len(system.by_collective) > 1:
        tables += [
            {"title": name, "rows": _rows(part, learned)}
            for name, part in system.by_collective.items()
        ]
    figures, not_drawn = _figures(system.system, grid, choices, catalogue)
    scored = system.summaries[0]
    listed = system.unscored.group_by("unscored", "collective", maintain_order=True).len()
    return {
        "system": system.system,
        "simulated": system.simulated,
        "band": "unknown (no repeats)" if system.band is None else f"{system.band:.2%}",
        "scored": scored.tasks,
        "optimistic": scored.tasks - scored.tasks_with_interval,
        "unscored": system.unscored.height,
        "listed": list(listed.iter_rows()),
        "verdicts": system.verdicts,
        "tables": tables,
        "figures": figures,
        "not_drawn": not_drawn,
    }


def _rows(summaries: Sequence[Summary], learned: set[str]) -> list[dict[str, Any]]:
    return [{"ours": s.policy in learned, "cells": cells(s)} for s in summaries]


def _figures(
    system: str, grid: TaskGrid, choices: Mapping[str, Actions], catalogue: Catalogue
) -> tuple[list[dict[str, Any]], int]:
    mine = grid.tasks.with_row_index("row").filter(pl.col("system") == system)
    families = [part for _, part in mine.group_by(FAMILY, maintain_order=True)]
    wide = sorted((f for f in families if f.height >= _MIN_SIZES), key=lambda f: -f.height)
    figures = []
    for part in wide[:_MAX_FAMILIES]:
        rows = order_by_size(grid.tasks, part["row"].to_list())
        figures.append(
            {
                "title": family_title(part.row(0, named=True)),
                "heat_map": Markup(heat_map(grid, rows, catalogue)),
                "curves": Markup(curves(grid, rows, choices)),
            }
        )
    return figures, len(families) - len(figures)
