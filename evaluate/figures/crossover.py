"""Crossover maps: which config is chosen at which size, one strip for each policy."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from string import ascii_uppercase
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.figures.drawing import (
    DARK,
    column_inches,
    size_labels,
    svg_text,
    write_cell,
)
from dynamiccl.evaluate.policies import Actions

#: Pale fills, so that letters and hatches stand out.
_FILLS: Final = ("#cfe2f3", "#fce5cd", "#d9ead3", "#f4cccc", "#d9d2e9", "#fff2cc", "#d0e0e3")
_HATCHES: Final = ("", "//", "\\\\", "..", "xx", "--", "||", "++", "oo")
_UNKNOWN: Final = "NCCL's own, not read back"


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
