"""Plot of a fit: relative error of held-out cells over size, by algorithm and protocol. PNG."""

from pathlib import Path
from typing import Any, Final

from dynamiccl.collect.findings.plots import figure_class, size_label
from dynamiccl.collect.fitting.fit import Fit
from dynamiccl.collect.fitting.report import BAR_P90

_MARKS: Final = "osD^vPX*<>"


def plot_residuals(fit: Fit, folder: Path) -> Path:
    """Draw the held-out errors of a fit into `folder`; return the file's path.

    Raises MachineError without matplotlib.
    """
    figure = figure_class()(figsize=(9.0, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    for index, key in enumerate(sorted({one.item.key for one in fit.held_out})):
        mine = [one for one in fit.held_out if one.item.key == key]
        sizes = [one.item.cell.call.size_bytes for one in mine]
        errors = [100.0 * one.error for one in mine]
        axes.plot(sizes, errors, _MARKS[index % len(_MARKS)], label=key, markersize=4, alpha=0.7)
    axes.axhline(0.0, color="black", linewidth=0.8)
    for edge in (-100.0 * BAR_P90, 100.0 * BAR_P90):
        axes.axhline(edge, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    ticks = sorted({one.item.cell.call.size_bytes for one in fit.held_out})
    shown = [size for size in ticks if size & (size - 1) == 0][::3] or ticks
    axes.set_xticks(shown, [size_label(size) for size in shown])
    axes.set_xlabel("message size")
    axes.set_ylabel("predicted over measured, % off")
    axes.set_title(f"{fit.file.name}: sizes that the fit has not seen")
    figure.legend(loc="outside right upper", fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{fit.file.name}.png"
    figure.savefig(path, dpi=120)
    return path
