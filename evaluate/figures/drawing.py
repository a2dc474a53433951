"""Helpers of all figures: labels of sizes and families, line styles, SVG output."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamiccl.sizes import size_label

mpl.use("Agg")
#: Lines are told apart by dashes and markers, not by colour alone.
_DASHES: Final = ("-", "--", "-.", ":")
#: Ink on a pale fill, whatever the page's colours.
DARK: Final = "#111111"
_WHITE: Final = (1.0, 1.0, 1.0, 1.0)
_MARKERS: Final = ("o", "s", "^", "v", "D", "x", "+", "*", "P")


def line_style(index: int) -> dict[str, Any]:
    """Line style number `index`; the first is the widest."""
    return {
        "linestyle": _DASHES[index % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4.5,
        "linewidth": 2.2 if index == 0 else 1.2,
    }


def column_inches(count: int) -> float:
    """Column width in inches, such that a family of `count` sizes fits the page.

    >>> column_inches(12), column_inches(44)
    (0.34, 0.24)
    """
    return 0.34 if count <= 28 else 0.24


def size_labels(tasks: pl.DataFrame) -> list[str]:
    """The size of each task, with an asterisk for those of test bins."""
    return [
        f"{size_label(size)}{' *' if split == 'test' else ''}"
        for size, split in tasks.select("size_bytes", "split").iter_rows()
    ]


def svg_text(figure: Figure) -> str:
    """The figure as an SVG element; the same figure gives the same text.

    For light and dark pages: what is white behind a figure is left out, and what is black takes the
    page's ink. What stands on a fill of its own has to say its colour, DARK.
    """
    figure.patch.set_visible(False)
    legends = list(figure.legends)
    for axes in figure.axes:
        if axes.get_facecolor() == _WHITE:
            axes.patch.set_visible(False)
        legends += [legend] if (legend := axes.get_legend()) is not None else []
    for legend in legends:
        legend.get_frame().set_visible(False)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dynamiccl"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"(stroke|fill): #000000", r"\1: currentColor", text)
    return text[text.index("<svg") :]


def write_cell(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write into the middle of a cell, so that its colour is not needed."""
    style = {"color": DARK, **style}
    axes.text(x, y, text, ha="center", va="center", **style)


def family_title(row: Mapping[str, object]) -> str:
    """A title for a family of tasks."""
    shape = f"{row['num_nodes']} x {row['ranks_per_node']} ranks"
    words = [str(row["collective"]), shape]
    if row["launch_profile"] != "default":
        words.append(f"launch profile {row['launch_profile']}")
    if row["nccl_version"]:
        words.append(f"NCCL {row['nccl_version']}")
    return ", ".join(words)


def order_by_size(tasks: pl.DataFrame, rows: Sequence[int]) -> list[int]:
    """The rows of a family, smallest message first."""
    sizes = tasks["size_bytes"].to_list()
    return sorted(rows, key=lambda row: sizes[row])
