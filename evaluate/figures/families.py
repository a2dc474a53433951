"""Figures of one family of tasks: configs by size, policies by size, and what each chooses."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from string import ascii_uppercase
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid
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
#: Pale fills, so that letters and hatches stand out.
_FILLS: Final = ("#cfe2f3", "#fce5cd", "#d9ead3", "#f4cccc", "#d9d2e9", "#fff2cc", "#d0e0e3")
_HATCHES: Final = ("", "//", "\\\\", "..", "xx", "--", "||", "++", "oo")
_UNKNOWN: Final = "NCCL's own, not read back"


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


def crossover_map(
    grid: TaskGrid,
    rows: Sequence[int],
    catalogue: Catalogue,
    choices: Mapping[str, Actions],
    defaults: Sequence[str | None],
) -> str:
    """The strips of one family: `rows` by size, `choices` and `defaults` (T,) of the grid.

    Every config has a letter and a hatch; in brackets stands what NCCL chose by itself.
    """
    strips = {
        name: [_chosen(int(actions[row]), catalogue, defaults[row]) for row in rows]
        for name, actions in choices.items()
    }
    configs = sorted({config for strip in strips.values() for config, _ in strip})
    labels = size_labels(grid.tasks[list(rows)])
    figure = Figure(
        figsize=(
            1.9 + column_inches(len(rows)) * max(len(rows), 14),
            1.1 + 0.34 * len(strips) + 0.16 * len(configs),
        ),
        layout="constrained",
    )
    axes = figure.subplots()
    for level, strip in enumerate(strips.values()):
        _draw_strip(axes, level, strip, configs)
    axes.set_xlim(0, len(rows))
    axes.set_ylim(len(strips), 0)
    axes.set_yticks([level + 0.5 for level in range(len(strips))], list(strips), fontsize=8)
    axes.set_xticks([n + 0.5 for n in range(len(rows))], labels, rotation=90, fontsize=8)
    axes.tick_params(length=0)
    handles = [
        Patch(label=f"{letter(index)}  {config}", edgecolor=DARK, linewidth=0.4, **_look(index))
        for index, config in enumerate(configs)
    ]
    figure.legend(handles=handles, loc="outside lower left", fontsize=8, ncols=2, frameon=False)
    return svg_text(figure)


def letter(index: int) -> str:
    """The label of a config on a map.

    >>> letter(0), letter(25), letter(26)
    ('A', 'Z', 'A1')
    """
    times, rest = divmod(index, len(ascii_uppercase))
    return ascii_uppercase[rest] + (str(times) if times else "")


def _chosen(action: int, catalogue: Catalogue, default: str | None) -> tuple[str, bool]:
    """The config that runs, and whether NCCL chose it."""
    if action == ABSTAIN_ACTION:
        return default or _UNKNOWN, True
    return catalogue.configs[action].key, False


def _draw_strip(
    axes: Axes, level: int, strip: Sequence[tuple[str, bool]], configs: Sequence[str]
) -> None:
    at = 0
    for (config, left_to_nccl), same in groupby(strip):
        width = len(list(same))
        index = configs.index(config)
        box = (at, level + 0.08)
        axes.add_patch(Rectangle(box, width, 0.84, edgecolor=DARK, linewidth=0.6, **_look(index)))
        mark = f"({letter(index)})" if left_to_nccl else letter(index)
        behind = {"boxstyle": "round,pad=0.12", "facecolor": "white", "linewidth": 0}
        write_cell(axes, at + width / 2, level + 0.5, mark, fontsize=8, bbox=behind)
        at += width


def _look(index: int) -> dict[str, Any]:
    return {
        "facecolor": _FILLS[index % len(_FILLS)],
        "hatch": _HATCHES[index % len(_HATCHES)],
    }
