"""Plot of a calibration."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from dynamiccl.train.cautious.caution import Calibration

mpl.use("Agg")


def calibration_plot(path: Path, calibration: Calibration) -> None:
    """Predicted against measured gain of the choices for held-out tasks, as a PNG."""
    figure = Figure(figsize=(4.8, 4.4), layout="constrained")
    axes = figure.subplots()
    predicted = 100.0 * np.expm1(calibration.predicted)
    measured = 100.0 * np.expm1(calibration.measured)
    width = 100.0 * 1.6449 * np.sqrt(calibration.spread**2 + calibration.noise**2)
    axes.errorbar(predicted, measured, xerr=width, fmt="o", ms=3, lw=0.6, color="tab:blue")
    ends = [
        float(min(predicted.min(), measured.min())),
        float(max(predicted.max(), measured.max())),
    ]
    axes.plot(ends, ends, color="grey", linestyle="--", label="as predicted")
    axes.axhline(0.0, color="tab:red", linewidth=0.8, label="NCCL's own choice")
    axes.set(xlabel="predicted gain, 90 % interval (%)", ylabel="measured gain (%)")
    margin = 0.1 * (ends[1] - ends[0])
    axes.set_xlim(ends[0] - margin, ends[1] + margin)  # intervals may be far wider
    axes.legend(loc="upper left", fontsize=8)
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
