"""DynamICCL from Python, for notebooks: load measurements, train, evaluate, export.

Runs are tracked in MLflow (`MLFLOW_TRACKING_URI`). Each raises a `DynamicclError`, as its command.
"""

from pathlib import Path

import polars as pl

from dynamiccl.datasets.store import read
from dynamiccl.evaluate.report import make_report
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.export import export_artifact
from dynamiccl.train import fit as fitting
from dynamiccl.train import tracking_uri
from dynamiccl.train.fit import FitSummary
from dynamiccl.train.recipe import make_recipe
from dynamiccl.train.tracking import policy_directory


def load(data: str | Path) -> pl.DataFrame:
    """One row each; columns as in `datasets/schema.py`."""
    return read(Path(data))


def fit(
    data: str | Path,
    recipe: str = "ddqn-dueling",
    *,
    seed: int = 0,
    **settings: object,
) -> FitSummary:
    """Train a recipe, by name or as FILE.py, with some `settings` changed, as after `--set`."""
    chosen = make_recipe(str(recipe), [f"{key}={value}" for key, value in settings.items()])
    return fitting.fit(
        Path(data), chosen, experiment="dynamiccl", tracking_uri=tracking_uri(), seed=seed
    )


def score(
    run: FitSummary | str,
    data: str | Path,
    *,
    out: str | Path = "report",
) -> pl.DataFrame:
    """The policy among NCCL's default and baselines on held-out tasks; a page in `out`.

    `run`: what `fit` gave, a run id, `models:/dynamiccl@champion` or a directory. `saved` and
    `slower` (beyond the noise; null: not known) are shares, against NCCL's own choice.
    """
    found = make_report(Path(data), [("policy", _policy(run))], Path(out))
    rows = [
        {
            "system": system,
            "policy": name,
            "tasks": each["tasks"],
            "saved": each["gain"],
            "slower": each["slower_than_default"],
        }
        for system, scores in found["systems"].items()
        for name, each in scores["policies"].items()
    ]
    scores = pl.DataFrame(rows, schema_overrides={"slower": pl.Float64})
    return scores.sort("system", -pl.col("saved"), maintain_order=True)


def export(run: FitSummary | str, out: str | Path) -> Artifact:
    """Tables in a new directory; without a gate only the policy's margin keeps them no slower."""
    return export_artifact(_policy(run), Path(out))


def _policy(run: FitSummary | str) -> Path:
    named = run.run_directory if isinstance(run, FitSummary) else run
    return policy_directory(named, tracking_uri())
