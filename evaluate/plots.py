"""The figures of the report, as SVG text that stands inside the page."""

import io
from collections.abc import Mapping, Sequence
from typing import Final

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.policies import Actions

mpl.use("Agg")
#: Slowdown at which the colours end; a worse config is not told apart from this.
_WORST: Final = 4.0
_LINES: Final = ("-", "--", "-.", ":")


def size_label(size_bytes: int) -> str:
    """A byte count as people say it.

    >>> size_label(1 << 20), size_label(1448), size_label(1518500250)
    ('1M', '1.4K', '1.4G')
    """
    for exponent, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if size_bytes >= 1 << exponent:
            return (
                f"{size_bytes / (1 << exponent):.3g}".replace(".0", "") + unit
                if (size_bytes % (1 << exponent) == 0)
                else f"{size_bytes / (1 << exponent):.1f}{unit}"
            )
    return str(size_bytes)


def heat_map(grid: TaskGrid, rows: Sequence[int], catalogue: Catalogue) -> str:
    """Size x config of one family: time over the best measured, sizes of test bins marked."""
    times = grid.times_us[rows]
    measured = np.asarray(~np.isnan(times).all(axis=0))
    slowdown = times[:, measured] / grid.oracle_us[rows][:, None]
    names = [c.key for c, keep in zip(catalogue.configs, measured, strict=True) if keep]
    part = grid.tasks[list(rows)]
    labels = [
        f"{size_label(size)}{' *' if split == 'test' else ''}"
        for size, split in part.select("size_bytes", "split").iter_rows()
    ]
    figure = Figure(
        figsize=(1.9 + 0.31 * len(labels), 1.3 + 0.26 * len(names)), layout="constrained"
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
    for column, index in enumerate(np.nanargmin(slowdown, axis=1)):
        axes.text(column + 0.5, index + 0.5, "•", ha="center", va="center", fontsize=9)
    bar = figure.colorbar(image, ax=axes, ticks=[1, 1.1, 1.5, 2, 3, 4], extend="max")
    bar.ax.set_yticklabels(["best", "1.1x", "1.5x", "2x", "3x", "4x"], fontsize=8)
    bar.ax.minorticks_off()
    return _svg(figure)


def curves(grid: TaskGrid, rows: Sequence[int], choices: Mapping[str, Actions]) -> str:
    """Time over the oracle by message size of one family, one line a policy."""
    part = grid.tasks[list(rows)]
    sizes = part["size_bytes"].to_numpy()
    figure = Figure(figsize=(8.6, 3.1), layout="constrained")
    axes = figure.subplots()
    for index, (name, actions) in enumerate(choices.items()):
        slowdown = grid.chosen_us(actions)[rows] / grid.oracle_us[rows]
        wide = 2.2 if index == 0 else 1.3
        style = _LINES[index % len(_LINES)]
        axes.plot(sizes, slowdown, style, marker=".", label=name, linewidth=wide)
    axes.set_xscale("log", base=2)
    axes.set_ylabel("time / best measured")
    axes.set_xlabel("message size")
    ticks = sizes[:: max(1, len(sizes) // 12)]
    axes.set_xticks(ticks, [size_label(int(size)) for size in ticks], fontsize=8)
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dynamiccl"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def family_title(row: Mapping[str, object]) -> str:
    """One line that names a family of tasks."""
    place = {True: "in place", False: "out of place", None: "placement unknown"}
    shape = f"{row['num_nodes']} x {row['ranks_per_node']} ranks"
    in_place = row["in_place"]
    words = [str(row["collective"]), shape, place[in_place if isinstance(in_place, bool) else None]]
    if row["launch_profile"] != "default":
        words.append(f"launch profile {row['launch_profile']}")
    if row["nccl_version"]:
        words.append(f"NCCL {row['nccl_version']}")
    return ", ".join(words)


def order_by_size(tasks: pl.DataFrame, rows: Sequence[int]) -> list[int]:
    """The rows of a family, smallest message first."""
    sizes = tasks["size_bytes"].to_list()
    return sorted(rows, key=lambda row: sizes[row])
