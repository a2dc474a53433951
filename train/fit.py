"""Fit a recipe to a data set: data in, tracked run and policy directory out."""

import json
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import d3rlpy
import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dynamiccl
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import NOISE_KEY, tuned, usable
from dynamiccl.datasets.episodes import (
    Transitions,
    training_transitions,
    with_noise,
)
from dynamiccl.datasets.features import (
    WINDOW_LENGTH,
    Observations,
    cold_observations,
    feature_table,
    window_table,
)
from dynamiccl.datasets.manifest import POLICY_FOLDER, POLICY_NAME, Manifest
from dynamiccl.datasets.provenance import git_commit
from dynamiccl.datasets.schema import SCHEMA_VERSION
from dynamiccl.datasets.scoring import TaskGrid, task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import content_hash, read
from dynamiccl.datasets.supports import find_supports
from dynamiccl.errors import NotEnoughData
from dynamiccl.train import tracking
from dynamiccl.train.algorithms import BatchSampler, make_algorithm, q_functions
from dynamiccl.train.networks import LogTimeDuelingQFunction
from dynamiccl.train.plots import training_curves
from dynamiccl.train.policy import forward
from dynamiccl.train.policy_module import PolicyModule
from dynamiccl.train.recipes import Recipe

Progress = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, slots=True)
class FitSummary:
    """What a training run left behind."""

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


@dataclass(frozen=True, slots=True)
class _Data:
    frame: pl.DataFrame
    catalogue: Catalogue
    profiles: list[str]
    transitions: Transitions
    validation: TaskGrid
    observations: Observations
    digest: str


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    step: int
    regret: float
    weights: dict[str, Any]


def fit(
    data_dir: Path,
    recipe: Recipe,
    *,
    experiment: str,
    tracking_uri: str,
    seed: int,
    progress: Progress = lambda _step, _metrics: None,
) -> FitSummary:
    """Train, choose the checkpoint and the abstain margin on validation, export, and track.

    Raises what reading the data raises, NotEnoughData when nothing can be trained or validated on,
    and UserError for a tracking URI that cannot be used.
    """
    data = _load(data_dir, seed)
    _seed_everything(seed)
    with tracking.start_run(tracking_uri, experiment, f"{recipe.name}-seed{seed}") as run:
        run.log_params({**recipe.to_json(), "seed": seed, "data": str(data_dir)})
        run.log_params({f"rows_{k}": v for k, v in asdict(data.transitions.counts).items()})
        run.set_tags({"data_hash": data.digest, "git_commit": git_commit()})
        with tempfile.TemporaryDirectory() as scratch:
            return _train(data, recipe, seed, run, Path(scratch), progress)


def _load(data_dir: Path, seed: int) -> _Data:
    everything = read(data_dir)
    frame = tuned(everything)
    timed = usable(frame)
    catalogue = Catalogue.from_frame(timed)
    profiles = sorted(timed["launch_profile"].unique())
    transitions = training_transitions(everything, catalogue, profiles, seed=seed)
    validation = task_grid(frame, catalogue, [Split.VALIDATION])
    if validation.tasks.is_empty():
        raise NotEnoughData(
            f"no validation task: of {validation.unscored.height} tasks in validation bins none "
            "has the default and two forced configs measured; measure sizes in octaves 1, 5, 9, "
            "13, 17, 21, 25, 29 too (a sweep over all powers of two does)"
        )
    tasks = with_noise(validation.tasks, transitions.noise)
    observations = cold_observations(tasks, profiles)
    digest = content_hash(data_dir)
    return _Data(frame, catalogue, profiles, transitions, validation, observations, digest)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    d3rlpy.seed(seed)


def _train(
    data: _Data, recipe: Recipe, seed: int, run: tracking.Run, scratch: Path, progress: Progress
) -> FitSummary:
    started = time.monotonic()
    algorithm = make_algorithm(recipe, data.transitions)
    best, curves = _loop(algorithm, data, recipe, seed, run, progress)
    seconds = time.monotonic() - started
    algorithm.save(str(_made(scratch / "checkpoints") / "last.d3"))
    algorithm.impl.q_function.load_state_dict(best.weights)
    algorithm.save(str(scratch / "checkpoints" / "best.d3"))
    margin, regret = _choose_margin(algorithm, data, recipe)
    manifest = _export(_made(scratch / POLICY_FOLDER), algorithm, data, recipe, margin)
    (scratch / "recipe.json").write_text(json.dumps(recipe.to_json(), indent=1), encoding="utf-8")
    abstaining = np.full(data.validation.tasks.height, ABSTAIN_ACTION, dtype=np.int64)
    default = _mean_over_groups(data.validation, abstaining)
    training_curves(
        _made(scratch / "plots") / "training.png",
        curves,
        best_step=best.step,
        default_regret=default,
    )
    final = {
        "best_validation_regret": regret,
        "default_validation_regret": default,
        "abstain_margin": margin,
        "train_seconds": seconds,
    }
    run.log_metrics(final, step=recipe.steps)
    run.log_folder(scratch)
    return FitSummary(
        run_id=run.run_id,
        run_directory=str(run.directory or run.artifact_uri),
        recipe=recipe.name,
        steps=recipe.steps,
        seconds=seconds,
        best_step=best.step,
        validation_regret=regret,
        validation_default_regret=default,
        validation_tasks=data.validation.tasks.height,
        abstain_margin=margin,
        num_actions=len(manifest.catalogue),
        counts=asdict(data.transitions.counts),
    )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _loop(
    algorithm: Any,
    data: _Data,
    recipe: Recipe,
    seed: int,
    run: tracking.Run,
    progress: Progress,
) -> tuple[_Checkpoint, dict[str, list[Any]]]:
    sampler = BatchSampler(data.transitions, recipe.batch_size, balance=recipe.balance, seed=seed)
    checkpoints: list[_Checkpoint] = []
    curves: dict[str, list[Any]] = {"steps": [], "losses": [], "regrets": []}
    losses: list[float] = []
    decay = get_ema_multi_avg_fn(recipe.average_decay)  # type: ignore[no-untyped-call]
    averaged = AveragedModel(algorithm.impl.q_function, multi_avg_fn=decay)
    for step in range(1, recipe.steps + 1):
        losses.append(float(algorithm.update(sampler.sample())["loss"]))
        averaged.update_parameters(algorithm.impl.q_function)
        if step % recipe.steps_per_epoch and step != recipe.steps:
            continue
        members = cast(Iterable[LogTimeDuelingQFunction], averaged.module)
        regret = _validation_regret(members, data, recipe.abstain_margins[0])
        metrics = {"loss": float(np.mean(losses)), "validation_regret": regret}
        run.log_metrics(metrics, step=step)
        progress(step, metrics)
        for name, value in zip(curves, (step, metrics["loss"], regret), strict=True):
            curves[name].append(value)
        losses.clear()
        if step * 2 > recipe.steps:
            weights = {k: v.clone() for k, v in averaged.module.state_dict().items()}
            checkpoints.append(_Checkpoint(step, regret, weights))
    return _choose(checkpoints, recipe), curves


def _choose(checkpoints: Sequence[_Checkpoint], recipe: Recipe) -> _Checkpoint:
    """The latest checkpoint whose validation regret is as good as the best one's, within tolerance.

    There are few validation tasks, so the very best is partly luck; later weights are better
    trained. Only those of the second half are here, when the learning rate has come down.
    """
    best = min(checkpoint.regret for checkpoint in checkpoints)
    good = [c for c in checkpoints if c.regret <= best + recipe.checkpoint_tolerance]
    return good[-1]


def _validation_regret(
    members: Iterable[LogTimeDuelingQFunction], data: _Data, margin: float
) -> float:
    """Mean regret on validation bins, every (system, collective) counting alike."""
    actions, _ = forward(
        PolicyModule(members, margin).eval(), data.observations, data.validation.mask
    )
    return _mean_over_groups(data.validation, actions)


def _mean_over_groups(grid: TaskGrid, actions: npt.NDArray[np.int64]) -> float:
    regrets = grid.tasks.select(NOISE_KEY).with_columns(regret=pl.Series(grid.regret(actions)))
    groups = regrets.group_by(NOISE_KEY).agg(pl.col("regret").mean())
    return float(np.mean(groups["regret"].to_numpy()))


def _choose_margin(algorithm: Any, data: _Data, recipe: Recipe) -> tuple[float, float]:
    """The margin with the least validation regret; of equal ones the largest, which acts least."""
    members = q_functions(algorithm)
    scored = [(_validation_regret(members, data, m), -m) for m in recipe.abstain_margins]
    regret, negative_margin = min(scored)
    return -negative_margin, regret


def _export(folder: Path, algorithm: Any, data: _Data, recipe: Recipe, margin: float) -> Manifest:
    module = PolicyModule(q_functions(algorithm), margin).eval()
    with warnings.catch_warnings():
        # TorchScript is deprecated from torch 2.13 on and is still what libtorch loads.
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(module)
        scripted.save(str(folder / POLICY_NAME))  # type: ignore[no-untyped-call]
    timed = usable(data.frame)
    return Manifest(
        recipe=recipe.name,
        catalogue=data.catalogue.to_json(),
        features=feature_table(data.profiles),
        window_features=window_table(),
        window_length=WINDOW_LENGTH,
        launch_profiles=data.profiles,
        supports=find_supports(data.frame, data.catalogue, data.transitions.noise),
        min_size_bytes=int(timed["size_bytes"].min() or 0),  # type: ignore[arg-type]
        max_size_bytes=int(timed["size_bytes"].max() or 0),  # type: ignore[arg-type]
        nccl_versions=sorted(timed["nccl_version"].drop_nulls().unique()),
        abstain_margin=margin,
        data_hash=data.digest,
        git_commit=git_commit(),
        dynamiccl_version=dynamiccl.__version__,
        schema_version=SCHEMA_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    ).write(folder)
