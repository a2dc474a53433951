"""A tracked run of a recipe that fits a model of times and acts where confident."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from dynamiccl.datasets.manifest import POLICY_FOLDER
from dynamiccl.train import SUMMARY_NAME, tracking
from dynamiccl.train.cautious.caution import MIN_GAIN, Calibration
from dynamiccl.train.cautious.fit import Fitted
from dynamiccl.train.data import TrainingData
from dynamiccl.train.export import FitSummary, export_policy
from dynamiccl.train.policy import forward
from dynamiccl.train.recipe import Recipe


def fit_and_export(
    fit: Callable[..., Fitted], data: TrainingData, recipe: Recipe, seed: int, run: tracking.Run
) -> FitSummary:
    """Fit, calibrate, export, and track; raises what these raise."""
    started = time.monotonic()
    fitted = fit(data, alpha=recipe.alpha, seed=seed)
    fitted.policy.level_threshold = recipe.level_threshold
    actions, _ = forward(fitted.of_training, data.observations, data.validation.mask)
    regret = data.mean_over_groups(actions)
    seconds = time.monotonic() - started
    figures = {
        "best_validation_regret": regret,
        "default_validation_regret": data.default_regret(),
        "train_seconds": seconds,
        **calibration_figures("sizes", fitted.of_sizes, recipe.alpha),
        **calibration_figures("shapes", fitted.of_shapes, recipe.alpha),
    }
    run.log_metrics({k: v for k, v in figures.items() if np.isfinite(v)}, step=0)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / POLICY_FOLDER).mkdir()
        manifest = export_policy(scratch / POLICY_FOLDER, fitted.policy, data, recipe, MIN_GAIN)
        (scratch / "recipe.json").write_text(
            json.dumps(recipe.to_json(), indent=1), encoding="utf-8"
        )
        from dynamiccl.train.cautious.plots import (
            calibration_plot,
        )  # Matplotlib takes a second to import

        (scratch / "plots").mkdir()
        calibration_plot(scratch / "plots" / "calibration.png", Calibration.joined(fitted.of_sizes))
        run.log_folder(scratch)
    summary = FitSummary(
        run_id=run.run_id,
        run_directory=str(run.directory or run.artifact_uri),
        recipe=recipe.name,
        steps=0,
        seconds=seconds,
        best_step=0,
        validation_regret=regret,
        validation_default_regret=figures["default_validation_regret"],
        validation_tasks=data.validation.tasks.height,
        abstain_margin=MIN_GAIN,
        num_actions=len(manifest.catalogue),
        counts=asdict(data.training.counts),
        alpha=recipe.alpha,
        least_alphas=[each.least_alpha() for each in fitted.of_sizes],
    )
    # Last of all: who finds it finds the rest.
    run.log_text(json.dumps(asdict(summary), indent=1), SUMMARY_NAME)
    return summary


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
