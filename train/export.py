"""Output of a training run: a policy that abstains by a margin, its directory, and a summary."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

import dynamiccl
from dynamiccl.datasets.cells import run_names, usable
from dynamiccl.datasets.features import feature_table, window_table
from dynamiccl.datasets.history import WINDOW_LENGTH
from dynamiccl.datasets.manifest import (
    POLICY_FOLDER,
    POLICY_NAME,
    Manifest,
    find_other_shapes,
    find_supports,
)
from dynamiccl.datasets.schema import SCHEMA_VERSION
from dynamiccl.datasets.store import git_commit
from dynamiccl.train import tracking
from dynamiccl.train.data import TrainingData
from dynamiccl.train.heads import Member
from dynamiccl.train.policy import save_script
from dynamiccl.train.policy_module import PolicyModule, StatefulPolicyModule
from dynamiccl.train.recipe import CAUTIOUS, Recipe
from dynamiccl.train.trigger.detector import copy_trigger


@dataclass(frozen=True, slots=True)
class FitSummary:
    """Summary of a training run."""

    run_id: str
    run_directory: str
    recipe: str
    steps: int
    seconds: float
    best_step: int
    validation_regret: float
    validation_default_regret: float
    validation_tasks: int
    abstain_margin: float
    num_actions: int
    counts: dict[str, int]
    #: Rows that are in no task, by reason: neither validated nor calibrated on.
    left_out: dict[str, int]
    #: The bound that was asked for on the share of choices that are slower, in worlds like those
    #: drawn; how much wider than theirs the prior and the spreads are. None: the recipe has none.
    alpha: float | None = None
    widened: float = 1.0
    stretched: float = 1.0


def with_margin(
    members: Sequence[Member], data: TrainingData, recipe: Recipe
) -> tuple[PolicyModule, float, float]:
    """(policy, margin, validation regret) of trained networks.

    Of the recipe's margins the one with the smallest validation regret; of equals the largest.
    """
    regret, negative_margin = min(
        (data.validation_regret(members, margin, is_unanimous=recipe.unanimous), -margin)
        for margin in recipe.abstain_margins
    )
    margin = -negative_margin
    if recipe.state_units:
        (member,) = members
        return StatefulPolicyModule(member, margin, recipe.warm_margin), margin, regret
    module = PolicyModule(members, margin, recipe.warm_margin, is_unanimous=recipe.unanimous)
    return module, margin, regret


def end_run(
    run: tracking.Run,
    scratch: Path,
    module: nn.Module,
    data: TrainingData,
    recipe: Recipe,
    figures: Mapping[str, float],
    **found: Any,
) -> FitSummary:
    """Write a policy and its recipe beside what `scratch` holds, and log all of it.

    `figures` are metrics of this kind of run; `found` is what it tells of its summary.
    """
    (scratch / POLICY_FOLDER).mkdir()
    manifest = _export_policy(
        scratch / POLICY_FOLDER, module, found["abstain_margin"], data, recipe
    )
    (scratch / "recipe.json").write_text(json.dumps(recipe.to_json(), indent=1), encoding="utf-8")
    if recipe.source:
        shutil.copy(recipe.source, scratch / "recipe.py")
    summary = FitSummary(
        run_id=run.run_id,
        run_directory=str(run.directory or run.artifact_uri),
        recipe=recipe.name,
        validation_default_regret=data.default_regret(),
        validation_tasks=data.validation.tasks.height,
        num_actions=len(manifest.catalogue),
        counts=data.training.counts,
        left_out=data.left_out,
        **found,
    )
    metrics = {
        "best_validation_regret": summary.validation_regret,
        "default_validation_regret": summary.validation_default_regret,
        "train_seconds": summary.seconds,
        **figures,
    }
    run.log_metrics(metrics, step=summary.steps)
    run.describe(
        f"{recipe.summary}. Mean regret on {summary.validation_tasks} validation tasks: "
        f"{summary.validation_regret:.2%} (NCCL's default {summary.validation_default_regret:.2%})."
    )
    run.finish(scratch, summary)
    return summary


def _export_policy(
    folder: Path, module: nn.Module, margin: float, data: TrainingData, recipe: Recipe
) -> Manifest:
    """Write a policy directory: the module as TorchScript, and its manifest."""
    save_script(module, folder / POLICY_NAME)
    watching = None if not recipe.trigger else copy_trigger(Path(recipe.trigger), folder)
    timed = usable(data.frame)
    supports = find_supports(data.frame, data.catalogue, data.training.noise, data.costs)
    return Manifest(
        recipe=recipe.name,
        catalogue=data.catalogue.to_json(),
        features=feature_table(data.profiles, costs=data.costs is not None),
        window_features=window_table(),
        window_length=WINDOW_LENGTH,
        launch_profiles=data.profiles,
        supports=supports,
        knows_shapes=recipe.algorithm in CAUTIOUS,
        other_shapes=find_other_shapes(data.costs, supports),
        min_size_bytes=int(timed["size_bytes"].min() or 0),  # type: ignore[arg-type]
        max_size_bytes=int(timed["size_bytes"].max() or 0),  # type: ignore[arg-type]
        nccl_versions=sorted(timed["nccl_version"].drop_nulls().unique()),
        abstain_margin=margin,
        data_hash=data.digest,
        git_commit=git_commit(),
        dynamiccl_version=dynamiccl.__version__,
        schema_version=SCHEMA_VERSION,
        runs=run_names(timed),
        parts=data.parts,
        trigger=watching,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    ).write(folder)
