"""A tracked run of a recipe that fits Gaussian processes and acts where confident."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dynamiccl.belief import MIN_GAIN
from dynamiccl.train import tracking
from dynamiccl.train.cautious.caution import Calibration
from dynamiccl.train.cautious.fit import Progress, fit_tables
from dynamiccl.train.data import TrainingData
from dynamiccl.train.export import FitSummary, end_run
from dynamiccl.train.policy import forward
from dynamiccl.train.recipe import Recipe


def fit_and_export(
    data: TrainingData, recipe: Recipe, run: tracking.Run, progress: Progress
) -> FitSummary:
    """Fit, calibrate, export, and track; raises what these raise."""
    started = time.monotonic()
    fitted = fit_tables(data, alpha=recipe.alpha, progress=progress)
    fitted.policy.level_threshold = recipe.level_threshold
    actions, _ = forward(fitted.of_training, data.observations, data.validation.mask)
    regret = data.mean_over_groups(actions)
    seconds = time.monotonic() - started
    figures = {
        "best_validation_regret": regret,
        "default_validation_regret": data.default_regret(),
        "train_seconds": seconds,
        "prior_widened": fitted.widened,
        "spread_stretched": fitted.stretched,
        **calibration_figures("sizes", fitted.of_sizes, recipe.alpha),
        **calibration_figures("shapes", fitted.of_shapes, recipe.alpha),
    }
    run.log_metrics({k: v for k, v in figures.items() if np.isfinite(v)}, step=0)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "plots").mkdir()
        calibration_plot(scratch / "plots" / "calibration.png", Calibration.joined(fitted.of_sizes))
        return end_run(
            run,
            scratch,
            (fitted.policy, MIN_GAIN),
            data,
            recipe,
            steps=0,
            seconds=seconds,
            best_step=0,
            validation_regret=regret,
            alpha=recipe.alpha,
            widened=fitted.widened,
            stretched=fitted.stretched,
        )


def calibration_figures(
    of: str, calibrations: Sequence[Calibration], alpha: float
) -> dict[str, float]:
    """Metrics of calibrations on held-out sizes or shapes."""
    every = Calibration.joined(calibrations)
    return {
        f"calibration_tasks_{of}": float(len(every)),
        f"coverage_90_{of}": every.coverage,
        f"machines_that_keep_alpha_{of}": float(
            sum(c.least_alpha() <= alpha for c in calibrations)
        ),
    }


def calibration_plot(path: Path, calibration: Calibration) -> None:
    """Predicted against measured gain of the choices for held-out tasks, as a PNG."""
    # It takes a second to import.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
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
