"""What changes from one policy to another: their choices apart, with the measured times of both."""

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.baselines import FAMILY
from dynamiccl.evaluate.blocks import Block, FigureBlock, TableBlock
from dynamiccl.evaluate.figures.drawing import (
    DARK,
    column_inches,
    family_title,
    svg_text,
    write_cell,
)
from dynamiccl.evaluate.policies import Actions
from dynamiccl.sizes import size_label

#: Changes of time, in per cent, at which the colours end.
_MOST: Final = 30.0
#: From here on a cell is dark, and its figure white.
_DARK_FROM: Final = 20.0


def change_blocks(
    system: str,
    grid: TaskGrid,
    catalogue: Catalogue,
    before: tuple[str, Actions],
    after: tuple[str, Actions],
) -> list[Block]:
    """A map and a table of the tasks of one system on which two policies choose differently.

    `before` and `after`: name and choices (T,) on the tasks of `grid`. Empty where all are alike.
    """
    mine = (grid.tasks["system"] == system).to_numpy()
    rows = np.flatnonzero(mine & (before[1] != after[1]))
    if not len(rows):
        return []
    change = 100.0 * (grid.chosen_us(after[1]) / grid.chosen_us(before[1]) - 1.0)
    tasks = grid.tasks.with_row_index("row").filter(pl.Series(mine))
    title = f"{system}: from {before[0]} to {after[0]}"
    names = [config.key for config in catalogue.configs]
    listed = [
        [
            family_title(task),
            size_label(task["size_bytes"]),
            "test" if task["split"] == Split.TEST.value else "seen",
            names[before[1][task["row"]]],
            names[after[1][task["row"]]],
            f"{change[task['row']]:+.1f} %",
        ]
        for task in tasks.iter_rows(named=True)
        if task["row"] in set(rows.tolist())
    ]
    heads = ["tasks", "size", "sizes for", before[0], after[0], "change of time"]
    note = (
        f"Change of the measured time, in per cent, where the choices differ ({len(rows)} of "
        f"{tasks.height} tasks): below 0 (blue) {after[0]} is faster. A dot: both choose the same. "
        "An asterisk marks sizes for test."
    )
    name = f"{slug(system)}-{slug(before[0])}-{slug(after[0])}"
    return [
        FigureBlock(title, f"changes-{name}", _draw(tasks, change, set(rows.tolist())), note),
        TableBlock(f"{title}, task by task", heads, listed),
    ]


def _draw(tasks: pl.DataFrame, change: npt.NDArray[np.float64], changed: set[int]) -> str:
    families = [part for _, part in tasks.group_by(FAMILY, maintain_order=True)]
    families = [part for part in families if changed & set(part["row"].to_list())]
    sizes = sorted({size for part in families for size in part["size_bytes"]})
    tested = set(tasks.filter(split=Split.TEST.value)["size_bytes"])
    figure = Figure(
        figsize=(2.6 + column_inches(len(sizes)) * max(len(sizes), 12), 1.0 + 0.32 * len(families)),
        layout="constrained",
    )
    axes = figure.subplots()
    cells = np.full((len(families), len(sizes)), np.nan)
    for level, part in enumerate(families):
        for row, size in part.select("row", "size_bytes").iter_rows():
            column = sizes.index(size)
            if row in changed:
                cells[level, column] = change[row]
                text = f"{change[row]:+.0f}".replace("-0", "0").replace("+0", "0")
                colour = "white" if abs(change[row]) > _DARK_FROM else DARK
            else:
                text, colour = "·", "#888888"
            write_cell(axes, column + 0.5, level + 0.5, text, fontsize=6.5, color=colour)
    axes.pcolormesh(
        np.ma.masked_invalid(cells),
        cmap="RdBu_r",
        norm=TwoSlopeNorm(0.0, -_MOST, _MOST),
        edgecolors="#999999",
        linewidth=0.3,
        alpha=0.85,
    )
    axes.invert_yaxis()
    labels = [f"{size_label(size)}{' *' if size in tested else ''}" for size in sizes]
    axes.set_xticks(np.arange(len(sizes)) + 0.5, labels, rotation=90, fontsize=8)
    names = [_short(part) for part in families]
    axes.set_yticks(np.arange(len(families)) + 0.5, names, fontsize=8)
    axes.tick_params(length=0)
    return svg_text(figure)


def _short(family: pl.DataFrame) -> str:
    task = family.row(0, named=True)
    return family_title(task).partition(", NCCL ")[0]
