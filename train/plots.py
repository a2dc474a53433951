"""Plots of a training run."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

mpl.use("Agg")


def training_curves(
    curves: Mapping[str, Sequence[float]], *, best_step: int | None, default_regret: float | None
) -> Figure:
    """Loss and validation regret by gradient step, the exported step marked; None: not known.

    `curves` holds `steps`, `losses` and `regrets`, of equal length; regrets are fractions. Where it
    has `speedups`, of actors in simulated worlds, and `validation_speedups`, these stand in the
    place of the loss.
    """
    steps, losses, regrets = curves["steps"], curves["losses"], curves["regrets"]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    if "speedups" in curves:
        left.plot(steps, curves["speedups"], color="tab:blue", label="actors, which explore")
        left.plot(
            steps, curves["validation_speedups"], color="tab:red", label="most likely actions"
        )
        left.axhline(1.0, color="grey", linestyle="--")
        left.legend(loc="lower right", fontsize=8)
        left.set(xlabel="update", ylabel="speedup over NCCL's own choice")
    else:
        left.plot(steps, losses, color="tab:blue")
        left.set(xlabel="gradient step", ylabel="loss (Huber in log time)", yscale="log")
    right.plot(steps, [100 * value for value in regrets], color="tab:red")
    if default_regret is not None:
        right.axhline(100 * default_regret, color="grey", linestyle="--", label="NCCL's default")
    if best_step is not None:
        left.axvline(best_step, color="tab:red", linestyle=":")
        right.axvline(best_step, color="tab:red", linestyle=":", label=f"exported ({best_step})")
    right.legend(loc="upper right", fontsize=8)
    right.set(xlabel="gradient step", ylabel="mean regret on validation bins (%)")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
    return figure
