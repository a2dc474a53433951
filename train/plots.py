"""The plots of a training run."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

mpl.use("Agg")


def training_curves(
    path: Path, steps: Sequence[int], losses: Sequence[float], regrets: Sequence[float]
) -> None:
    """Loss and validation regret by gradient step, as a PNG."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, losses, color="tab:blue")
    left.set(xlabel="gradient step", ylabel="loss (Huber in log time)", yscale="log")
    right.plot(steps, [100 * value for value in regrets], color="tab:red")
    right.set(xlabel="gradient step", ylabel="mean regret on validation bins (%)")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
