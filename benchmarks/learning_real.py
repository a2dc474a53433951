"""Recipes and baselines on measured sweeps, each system also left out of training.

Figures are cross-fitted over the tasks with independent runs enough, with a bootstrap over runs and
seeds. Where a system has none they are of the optimistic oracle, over all its tasks, and have no
interval. `left out` systems were not trained on: their policy comes from all the others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from learning_figures import Figures, of_crossfit, over_replicates, parallel
from sweeps import import_sweeps, without

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import noise_bands, quiet, tuned, usable
from dynamiccl.datasets.scoring import task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.errors import NotEnoughData
from dynamiccl.evaluate.baselines import make_policies
from dynamiccl.evaluate.metrics import OPTIMISTIC, cross_fit, has_runs, summarise
from dynamiccl.evaluate.policies import Actions
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe

STEPS: Final = 1_000


def real_sets(out: Path, recipes: Sequence[str], seeds: int) -> dict[str, Any]:
    """Figures by data set and policy, and what stands beside them."""
    data = out / "real"
    left_out = import_sweeps(data)
    jobs = [(data, f"{r}-{s}", r, s) for s in range(seeds) for r in recipes]
    learned: dict[str, list[Path]] = {recipe: [] for recipe in recipes}
    for (_, _, recipe, _), policy in parallel(_train, jobs):
        learned[recipe].append(policy)
    sets, notes = score_measured(data, data, learned)
    systems = [name for name, note in notes.items() if note["tasks"] > 0]
    others = [(without(data, out / f"without-{name}", [name]), f"lo-{name}", recipes[0], 0)
              for name in systems]  # fmt: skip
    for (place, run, recipe, _), policy in parallel(_train, others):
        name = run.removeprefix("lo-")
        found, _ = score_measured(data, place, {recipe: [policy]}, only=name)
        sets[f"{name}, left out"] = found[name]
        notes[f"{name}, left out"] = notes[name]
    return {"data_sets": sets, "real_notes": notes, "real_rows_left_out": left_out}


def _train(data: Path, name: str, recipe: str, seed: int) -> Path:
    uri = f"sqlite:///{data.parent / f'mlflow-{name}.db'}"
    made = make_recipe(recipe, [f"steps={STEPS}"])
    done = fit(data, made, experiment="real", tracking_uri=uri, seed=seed)
    return Path(done.run_directory) / "policy"


def score_measured(
    data: Path, training_data: Path, learned: dict[str, list[Path]], only: str | None = None
) -> tuple[dict[str, dict[str, Figures]], dict[str, dict[str, Any]]]:
    """Figures by system and policy, baselines included, and what stands beside them."""
    frame, known = tuned(read(data)), tuned(read(training_data))
    catalogue = Catalogue.from_frame(usable(frame))
    test = task_grid(frame, catalogue, [Split.TEST])
    training, validation = (
        task_grid(known, catalogue, [split]) for split in (Split.TRAIN, Split.VALIDATION)
    )
    loaded = [(name, TorchPolicy.load(path)) for name, paths in learned.items() for path in paths]
    choices: dict[str, list[Actions]] = {}
    for player in make_policies(training, validation, catalogue, loaded):
        choices.setdefault(player.name, []).append(player.choose(test))
    bands = {str(s): float(b) for s, b, _ in noise_bands(quiet(frame)).iter_rows()}
    sets, notes = {}, {}
    places = test.tasks.with_row_index("row")
    for name in sorted({*frame["system"].unique(), *bands} if only is None else {only}):
        rows = places.filter(pl.col("system") == name)["row"].to_numpy().astype(np.int64)
        band = bands.get(str(name))
        runs = int(has_runs(test)[rows].sum())
        notes[str(name)] = {
            "tasks": len(rows),
            "tasks_with_runs": runs,
            "noise_band": band,
            "statistic": "cross-fitted" if runs else OPTIMISTIC,
        }
        if not len(rows):
            continue
        fitted = cross_fit(test, rows, choices, band)
        sets[str(name)] = {
            policy: of_crossfit(figures)
            if (figures := fitted[policy]) is not None
            else _optimistic(
                [summarise(test, rows, {policy: a}, band).to_dicts()[0] for a in seeds]
            )
            for policy, seeds in choices.items()
        }
    if not sets:
        raise NotEnoughData(f"{data} has no test task to score")
    return sets, notes


def _optimistic(seeds: Sequence[dict[str, Any]]) -> Figures:
    """Mean over seeds without interval: seeds do not reflect measurement noise."""
    return {
        name: None if name.endswith(("_lo", "_hi")) else value
        for name, value in over_replicates(seeds).items()
    }
