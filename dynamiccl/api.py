"""DynamICCL from Python, for notebooks: load measurements, train, evaluate, export.

The commands do the same and show more; what these four make can be given to any of them. Runs are
tracked in MLflow, where `MLFLOW_TRACKING_URI` says. Each
raises what its command ends with: a `DynamicclError` that says what was wrong and how to mend it.
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
    """Every measurement of a data directory, one row each; columns as in `datasets/schema.py`."""
    return read(Path(data))


def fit(
    data: str | Path,
    recipe: str = "ddqn-dueling",
    *,
    seed: int = 0,
    **settings: object,
) -> FitSummary:
    """Train a recipe, by name or as FILE.py, with `settings` of its own changed; tracked in MLflow.

    A setting is written as after `--set`: a number, a bool, a text.
    """
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
    """The policy among NCCL's default and baselines on held-out tasks, best first; a page in `out`.

    `run`: what `fit` gave, a run id, `models:/dynamiccl@champion` or a directory. Of each row:
    tasks, `saved`, the share of time less than NCCL's own choice takes (geometric mean), as pages
    and commands tell it, and the share of tasks slower than it beyond the noise (null: not known).
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
        for system, scores in found.told["systems"].items()
        for name, each in scores["policies"].items()
    ]
    scores = pl.DataFrame(rows, schema_overrides={"slower": pl.Float64})
    return scores.sort("system", -pl.col("saved"), maintain_order=True)


def export(run: FitSummary | str, out: str | Path) -> Artifact:
    """Decision tables for the plugin, in a new directory; `dynamiccl-deploy install` takes it.

    Nothing but a policy's own margin keeps one that passed no gate from being slower than NCCL:
    `dynamiccl-evaluate gate` first, and `run` is the directory that it wrote.
    """
    return export_artifact(_policy(run), Path(out))


def _policy(run: FitSummary | str) -> Path:
    """The policy directory of a run."""
    named = run.run_directory if isinstance(run, FitSummary) else run
    return policy_directory(named, tracking_uri())
