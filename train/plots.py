"""Plots of training runs, as figures that are ready to be saved."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from dynamiccl.drawn_worlds import Floats

mpl.use("Agg")


def training_curves(
    curves: Mapping[str, Sequence[float]], *, best_step: int | None, default_regret: float | None
) -> Figure:
    """Loss and validation regret by gradient step, the exported step marked; None: not known.

    `curves` holds `step`, `loss` and `validation_regret`, of equal length; regrets are fractions.
    Where it has `speedup`, of actors in simulated worlds, and `validation_speedup`, these stand in
    the place of the loss.
    """
    steps, regrets = curves["step"], curves["validation_regret"]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    if "speedup" in curves:
        left.plot(steps, curves["speedup"], color="tab:blue", label="actors, which explore")
        likely = curves["validation_speedup"]
        left.plot(steps, likely, color="tab:red", label="most likely actions")
        left.axhline(1.0, color="grey", linestyle="--")
        left.legend(loc="lower right", fontsize=8)
        left.set(xlabel="update", ylabel="speedup over NCCL's own choice")
    else:
        left.plot(steps, curves["loss"], color="tab:blue")
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


def calibration_plot(predicted: Floats, measured: Floats, reach: Floats) -> Figure:
    """Predicted against measured gain (ln) of the choices for held-out tasks.

    `reach` is half of the width of the predicted intervals.
    """
    figure = Figure(figsize=(4.8, 4.4), layout="constrained")
    axes = figure.subplots()
    predicted, measured = 100.0 * np.expm1(predicted), 100.0 * np.expm1(measured)
    axes.errorbar(predicted, measured, xerr=100.0 * reach, fmt="o", ms=3, lw=0.6, color="tab:blue")
    both = np.concatenate([predicted, measured])
    ends = [float(both.min()), float(both.max())]
    axes.plot(ends, ends, color="grey", linestyle="--", label="as predicted")
    axes.axhline(0.0, color="tab:red", linewidth=0.8, label="NCCL's own choice")
    axes.set(xlabel="predicted gain, 90 % interval (%)", ylabel="measured gain (%)")
    margin = 0.1 * (ends[1] - ends[0])
    axes.set_xlim(ends[0] - margin, ends[1] + margin)  # intervals may be far wider
    axes.legend(loc="upper left", fontsize=8)
    axes.grid(visible=True, alpha=0.3)
    return figure
