"""Plot of changes by size: a panel for each collective, a marker for each cell."""

import numpy as np
from matplotlib.figure import Figure

from dynamiccl.evaluate.compare.changes import Changes
from dynamiccl.evaluate.compare.paired import Paired
from dynamiccl.evaluate.figures.drawing import size_label, svg_text

_SLOWER, _FASTER, _SAME = "#b3261e", "#1b6e3c", "#8a94a3"


def changes_by_size(paired: Paired, changes: Changes) -> str:
    """Change in per cent over message size, as SVG; filled markers are significant."""
    collectives = paired.cells["collective"].unique().sort().to_list()
    figure = Figure(figsize=(9.0, 0.6 + 2.3 * len(collectives)), layout="constrained")
    panels = figure.subplots(len(collectives), 1, sharex=True, squeeze=False)[:, 0]
    changed = set(changes.found) | {row for each in changes.stretches for row in each.cells}
    sizes = paired.cells["size_bytes"].to_numpy()
    percent = 100.0 * np.array([cell.mean for cell in changes.cells])
    limit = max(2.0, float(np.quantile(np.abs(percent), 0.995)) * 1.2)
    for axes, name in zip(panels, collectives, strict=True):
        rows = np.nonzero((paired.cells["collective"] == name).to_numpy())[0]
        for is_changed, marker, filled in ((False, "o", False), (True, "D", True)):
            some = np.array([row for row in rows if (row in changed) == is_changed], dtype=np.int64)
            colours = [_SLOWER if percent[row] > 0 else _FASTER for row in some]
            axes.scatter(
                sizes[some],
                np.clip(percent[some], -limit, limit),
                s=26 if filled else 12,
                marker=marker,
                facecolors=colours if filled else "none",
                edgecolors=colours if filled else _SAME,
                linewidths=0.7,
            )
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.axhline(100.0 * changes.common.mean, color="#6a86b8", linewidth=1.0, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_ylim(-limit * 1.05, limit * 1.05)
        axes.set_title(str(name), fontsize=10, loc="left")
        axes.set_ylabel("change, %", fontsize=9)
        axes.grid(visible=True, axis="y", linewidth=0.3)
    ticks = np.unique(sizes)[:: max(1, len(np.unique(sizes)) // 16)]
    panels[-1].set_xticks(ticks, [size_label(int(t)) for t in ticks], fontsize=8)
    panels[-1].set_xlabel("message size; the dashed line is the common change", fontsize=9)
    return svg_text(figure)
