"""Plots of a Trigger's training run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

mpl.use("Agg")


@dataclass(frozen=True, slots=True)
class DelayCurve:
    """Median detection delays for one slowdown, by false alarm rate."""

    #: Slow time over quiet time.
    factor: float
    #: False alarms in 100,000 calls.
    rates: list[float]
    #: Median calls of the key from onset to alarm; None: not within what was run.
    delays: list[float | None]


def trigger_curves(path: Path, losses: Sequence[float], curves: Sequence[DelayCurve]) -> None:
    """Loss by step, and delays by false-alarm rate, as a PNG."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(losses) + 1), losses, color="tab:blue")
    left.set(xlabel="step", ylabel="mean absolute error of the forecast (robust sigmas)")
    for curve in curves:
        known = [(r, d) for r, d in zip(curve.rates, curve.delays, strict=True) if d is not None]
        if known:
            right.plot(*zip(*known, strict=True), marker="o", label=f"{curve.factor:g}x slower")
    right.set(
        xscale="log",
        yscale="log",
        xlabel="false alarms in 100,000 calls",
        ylabel="median delay (calls of the key)",
    )
    if right.lines:
        right.legend(loc="upper right", fontsize=8)
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
