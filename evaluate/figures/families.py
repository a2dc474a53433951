"""Figures of one family of tasks: configs by size, and policies by size."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.figures.drawing import (
    DARK,
    column_inches,
    line_style,
    size_labels,
    svg_text,
    write_cell,
)
from dynamiccl.evaluate.policies import Actions
from dynamiccl.sizes import size_label

#: Slowdown at which the colours end; a worse config is not told apart from this.
_WORST: Final = 4.0
#: Slowdown from which on a cell is dark, and its figure white.
_DARK: Final = 1.8


def heat_map(grid: TaskGrid, rows: Sequence[int], catalogue: Catalogue) -> str:
    """Size x config of one family: time / best measured, sizes of test bins marked."""
    times = grid.times_us[rows]
    measured = np.asarray(~np.isnan(times).all(axis=0))
    slowdown = times[:, measured] / grid.oracle_us[rows][:, None]
    names = [c.key for c, keep in zip(catalogue.configs, measured, strict=True) if keep]
    labels = size_labels(grid.tasks[list(rows)])
    figure = Figure(
        figsize=(1.9 + column_inches(len(labels)) * len(labels), 1.3 + 0.26 * len(names)),
        layout="constrained",
    )
    axes = figure.subplots()
    image = axes.pcolormesh(
        np.ma.masked_invalid(slowdown.T),
        cmap="viridis_r",
        norm=LogNorm(1.0, _WORST),
        edgecolors="white",
        linewidth=0.5,
    )
    axes.set_facecolor("#dddddd")
    axes.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=8)
    axes.set_xticks(np.arange(len(labels)) + 0.5, labels, rotation=90, fontsize=8)
    _write_slowdowns(axes, slowdown)
    bar = figure.colorbar(image, ax=axes, ticks=[1, 1.1, 1.5, 2, 3, 4], extend="max")
    bar.ax.set_yticklabels(["best", "1.1x", "1.5x", "2x", "3x", "4x"], fontsize=8)
    bar.ax.minorticks_off()
    return svg_text(figure)


def _write_slowdowns(axes: Axes, slowdown: npt.NDArray[np.float64]) -> None:
    """Write the number into each cell."""
    best = np.nanargmin(slowdown, axis=1)
    for column, row in np.argwhere(~np.isnan(slowdown)).tolist():
        value = slowdown[column, row]
        text = "•" if row == best[column] else _factor(value)
        size, colour = 9 if text == "•" else 6, "white" if value > _DARK else DARK
        write_cell(axes, column + 0.5, row + 0.5, text, fontsize=size, color=colour)


def _factor(value: float) -> str:
    """A slowdown as three or four characters."""
    if value < 2:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 10 else f"{min(value, 99):.0f}x"


def curves(grid: TaskGrid, rows: Sequence[int], choices: Mapping[str, Actions]) -> str:
    """Time / oracle by message size of one family, one line for each policy."""
    part = grid.tasks[list(rows)]
    sizes = part["size_bytes"].to_numpy()
    figure = Figure(figsize=(8.6, 3.1), layout="constrained")
    axes = figure.subplots()
    for index, (name, actions) in enumerate(choices.items()):
        slowdown = grid.chosen_us(actions)[rows] / grid.oracle_us[rows]
        axes.plot(sizes, slowdown, label=name, **line_style(index))
    axes.set_xscale("log", base=2)
    axes.set_ylabel("time / best measured")
    axes.set_xlabel("message size")
    ticks = sizes[:: max(1, len(sizes) // 12)]
    axes.set_xticks(ticks, [size_label(int(size)) for size in ticks], fontsize=8)
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return svg_text(figure)
