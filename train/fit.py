"""Trains a recipe on a data set: data in, tracked run and policy directory out."""

import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

import d3rlpy
import numpy as np
import torch
from torch import nn

from dynamiccl.errors import MissingPath, UserError
from dynamiccl.train import tracking
from dynamiccl.train.algorithms import make_algorithm
from dynamiccl.train.cautious.fit import fit_and_export
from dynamiccl.train.data import TrainingData, base_residuals, load_data
from dynamiccl.train.export import FitSummary, end_run, with_margin
from dynamiccl.train.heads import ActionInputs, Member
from dynamiccl.train.loop import GradientSteps, Loop, read_state
from dynamiccl.train.online.make import make_loop as make_online_loop
from dynamiccl.train.recipe import CAUTIOUS, ONLINE, Recipe
from dynamiccl.train.replay import CostDropout, Mixed, Replay
from dynamiccl.train.tracking import kept_folder

#: Called after each epoch with the steps done, their total, and the epoch's metrics.
Progress = Callable[[int, int, dict[str, float]], None]

#: The state file from which a killed run resumes; removed when the run finishes.
_STATE_NAME: Final = "state.pt"
#: The arguments of a run, to resume one that was killed before its first epoch.
_BEGUN_NAME: Final = "begun.json"


def fit(  # noqa: PLR0913 - all of a run
    data_dir: Path,
    recipe: Recipe,
    *,
    experiment: str,
    tracking_uri: str,
    seed: int,
    tags: Mapping[str, str] = tracking.NO_TAGS,
    progress: Progress = lambda _step, _steps, _metrics: None,
    ray: str | None = None,
) -> FitSummary:
    """Train, choose the checkpoint and the abstain margin on validation, export, and track.

    `ray`: the address of a cluster whose actors play, for IMPALA. Raises what reading the data
    raises, NotEnoughData when nothing can be trained or validated on, and UserError for a tracking
    URI that cannot be used, and for a threshold without a Trigger.
    """
    if recipe.level_threshold and not recipe.trigger:
        raise UserError(
            f"level_threshold={recipe.level_threshold} is about interference levels, which a "
            "Trigger tells: --set trigger=RUN_DIRECTORY, or take 'gaussian-process'"
        )
    _check_ray(recipe, ray)
    data = _load(data_dir, recipe, seed)
    name = f"{tags.get('setting', recipe.name)}-seed{seed}"
    with tracking.start_run(tracking_uri, experiment, name, tags) as run:
        facts = {"recipe": recipe.to_json(), "seed": seed, "data_hash": data.digest}
        _write(_state_path(run).with_name(_BEGUN_NAME), facts)
        _log_start(run, data_dir, data, recipe, seed)
        return _train(data, recipe, seed, run, progress, ray=ray)


def _log_start(
    run: tracking.Run, data_dir: Path, data: TrainingData, recipe: Recipe, seed: int
) -> None:
    counts = {"rows": data.training.counts, "calls": data.sequence_counts}
    params = {
        f"{of}_{name}": value
        for of, each in counts.items()
        if each is not None
        for name, value in each.items()
    }
    text = f"{recipe.summary}. Trained on `{data_dir}` with seed {seed}."
    run.begin(data_dir, data.digest, {**recipe.to_json(), "seed": seed, **params}, text)


def _check_ray(recipe: Recipe, ray: str | None) -> None:
    if ray is not None and recipe.algorithm != "IMPALA":
        raise UserError(
            f"--ray {ray} is for actors that play for a learner, and the algorithm of "
            f"'{recipe.name}' is {recipe.algorithm}: take 'impala-lstm', or leave --ray out"
        )


def _train(  # noqa: PLR0913 - all of a run
    data: TrainingData,
    recipe: Recipe,
    seed: int,
    run: tracking.Run,
    progress: Progress,
    state: dict[str, Any] | None = None,
    *,
    ray: str | None = None,
) -> FitSummary:
    """Train and export; continues from `state` if given."""
    if recipe.algorithm in CAUTIOUS:
        summary = fit_and_export(data, recipe, run, lambda done, count: progress(done, count, {}))
    else:
        loop = _make_loop(data, recipe, seed, run, ray)
        if state is not None:
            loop.restore(state)
            if loop.step not in run.history("validation_regret"):  # killed in between
                run.log_metrics(loop.latest, step=loop.step)
        summary = _finish(loop, data, recipe, seed, run, progress)
    _state_path(run).with_name(_BEGUN_NAME).unlink(missing_ok=True)
    return summary


def resume(
    data_dir: Path,
    run_id: str,
    *,
    tracking_uri: str,
    progress: Progress = lambda _step, _steps, _metrics: None,
    ray: str | None = None,
) -> FitSummary:
    """Continue a killed run in the same MLflow run, with the result of an uninterrupted one.

    A run killed before its first epoch starts anew. Raises what `fit` raises, MissingPath when the
    run left no state, CorruptFile when it cannot be read, and UserError when the data are not those
    that the run began with.
    """
    with tracking.continue_run(tracking_uri, run_id) as run:
        facts, state = _begun(run)
        recipe, seed = Recipe.from_json(facts["recipe"]), int(facts["seed"])
        _check_ray(recipe, ray)
        data = _load(data_dir, recipe, seed)
        if data.digest != facts["data_hash"]:
            first = f"{facts['data_hash'][:12]}, {run.param('data')}"
            raise UserError(
                f"{data_dir} (hash {data.digest[:12]}) is not what run '{run_id}' began with "
                f"({first}); give --data that directory"
            )
        if state is None and not run.tag("data_hash"):
            _log_start(run, data_dir, data, recipe, seed)
        return _train(data, recipe, seed, run, progress, state, ray=ray)


def _begun(run: tracking.Run) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The arguments that a run began with, and its last state; None before the first epoch."""
    path = _state_path(run)
    if path.exists():
        state = read_state(path)
        return state["facts"], state
    begun = path.with_name(_BEGUN_NAME)
    if not begun.exists():
        raise MissingPath(
            f"state of run '{run.run_id}'",
            path,
            "a run keeps one until it is finished; begin anew with 'dynamiccl-train fit'",
        )
    return json.loads(begun.read_text(encoding="utf-8")), None


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    """Write JSON atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(json.dumps(facts), encoding="utf-8")
    hidden.replace(path)


def _load(data_dir: Path, recipe: Recipe, seed: int) -> TrainingData:
    return load_data(
        data_dir,
        seed,
        recipe.trigger,
        with_costs=recipe.action_inputs or recipe.algorithm in CAUTIOUS,
        with_calls=recipe.use_calls,
        split=recipe.split,
    )


def _make_loop(
    data: TrainingData, recipe: Recipe, seed: int, run: tracking.Run, ray: str | None
) -> Loop:
    random.seed(seed)
    torch.manual_seed(seed)
    d3rlpy.seed(seed)
    if recipe.algorithm in ONLINE:
        uses_cost = recipe.action_inputs and _uses_cost(data, recipe, run)
        return make_online_loop(data, recipe, seed, uses_cost=uses_cost, ray=ray)
    actions = None
    if recipe.action_inputs:
        uses_cost = _uses_cost(data, recipe, run)
        actions = ActionInputs(data.catalogue.configs, data.cost_start, uses_cost)
    algorithm = make_algorithm(recipe, *data.sources(recipe), actions=actions)
    drawn = _make_replay(data, recipe, seed)
    replay: Replay | Mixed | CostDropout = drawn
    if recipe.action_inputs and recipe.cost_dropout > 0.0:
        replay = CostDropout(drawn, data.cost_start, recipe.cost_dropout)
    margin = recipe.abstain_margins[0]

    def validate(members: nn.ModuleList) -> dict[str, float]:
        networks, is_unanimous = cast(Iterable[Member], members), recipe.unanimous
        regret = data.validation_regret(networks, margin, is_unanimous=is_unanimous)
        return {"validation_regret": regret}

    return Loop(GradientSteps(algorithm, replay, recipe), recipe, validate)


def _uses_cost(data: TrainingData, recipe: Recipe, run: tracking.Run) -> bool:
    """Whether times are learned over NCCL's costs; logs the residuals that decide it."""
    found = base_residuals(data)
    if found is not None:
        run.log_metrics({f"residual_{k}": v for k, v in asdict(found).items()}, step=0)
    uses_cost = recipe.cost_base == "cost"
    if recipe.cost_base == "held-out":
        uses_cost = found is not None and found.is_cost_better
    run.set_tags({"cost_base": "cost" if uses_cost else "time"})
    return uses_cost


def _make_replay(data: TrainingData, recipe: Recipe, seed: int) -> Replay | Mixed:
    """Sweep steps alone, or equally many sweep and call steps: half of a batch is cold."""
    sources = data.sources(recipe)
    generator = np.random.default_rng(seed)
    replays = [
        Replay(
            steps,
            recipe.batch_size // len(sources),
            seed=generator,
            num_steps=recipe.num_steps,
            gamma=recipe.gamma,
            balance=recipe.balance,
        )
        for steps in sources
    ]
    return replays[0] if len(replays) == 1 else Mixed(replays)


def _finish(
    loop: Loop,
    data: TrainingData,
    recipe: Recipe,
    seed: int,
    run: tracking.Run,
    progress: Progress,
) -> FitSummary:
    """Run the remaining steps, then select, export and track."""
    started = time.monotonic()
    path = _state_path(run)
    with contextlib.closing(loop):
        while not loop.is_over:
            loop.run_epoch()
            loop.save(path, recipe=recipe.to_json(), seed=seed, data_hash=data.digest)
            run.log_metrics(loop.latest, step=loop.step)
            progress(loop.step, recipe.steps, loop.latest)
    seconds = time.monotonic() - started
    best, members = loop.best(), cast(Any, loop.source.members)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name in ("checkpoints", "plots"):
            (scratch / name).mkdir()
        loop.source.save(str(scratch / "checkpoints" / "last.d3"))
        members.load_state_dict(best.weights)
        loop.source.save(str(scratch / "checkpoints" / "best.d3"))
        module, margin, regret = with_margin(members, data, recipe)
        from dynamiccl.train.plots import training_curves  # Matplotlib takes a second to import

        default = data.default_regret()
        figure = training_curves(loop.curves, best_step=best.step, default_regret=default)
        figure.savefig(scratch / "plots" / "training.png", dpi=120)
        summary = end_run(
            run,
            scratch,
            module,
            data,
            recipe,
            {"abstain_margin": margin},
            abstain_margin=margin,
            validation_regret=regret,
            steps=recipe.steps,
            seconds=seconds,
            best_step=best.step,
        )
    path.unlink(missing_ok=True)
    return summary


def _state_path(run: tracking.Run) -> Path:
    """The state file: among the run's local artifacts, else in the user's state directory."""
    return kept_folder(run.directory, run.run_id) / _STATE_NAME
