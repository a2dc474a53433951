"""Trains a recipe: data in, tracked run and policy directory out."""

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

import dynamiccl
from dynamiccl.belief import MIN_GAIN
from dynamiccl.datasets import manifest as manifests
from dynamiccl.datasets.cells import run_names, usable
from dynamiccl.datasets.features import feature_table, window_table
from dynamiccl.datasets.history import WINDOW_LENGTH
from dynamiccl.datasets.manifest import POLICY_FOLDER, Manifest
from dynamiccl.datasets.store import git_commit, run_digests
from dynamiccl.errors import CorruptFile, MissingPath, UserError
from dynamiccl.train import tracking
from dynamiccl.train.cautious_fit import fit_tables
from dynamiccl.train.data import TrainingData, base_residuals, load_data
from dynamiccl.train.loop import Loop, read_state, write_state
from dynamiccl.train.networks import ActionInputs, Network
from dynamiccl.train.policy import PolicyModule, StatefulPolicyModule, forward, save_script
from dynamiccl.train.recipe import CAUTIOUS, ONLINE, Recipe

#: Steps done, their total, and an epoch's metrics.
Progress = Callable[[int, int, dict[str, float]], None]

#: A killed run goes on from it; removed at the end.
_STATE_NAME: Final = "state.pt"


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
    left_out: dict[str, int]


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
    """Train, choose checkpoint and margin on validation, export, and track.

    `ray`: the address of a cluster for IMPALA's actors. Raises as `load_data`, and UserError.
    """
    if recipe.level_threshold and not recipe.trigger:
        raise UserError(
            f"level_threshold={recipe.level_threshold} is about interference levels, which a "
            "Trigger tells: --set trigger=RUN_DIRECTORY, or take 'gaussian-process'"
        )
    data = _load(data_dir, recipe, seed, ray)
    name = f"{tags.get('setting', recipe.name)}-seed{seed}"
    with tracking.open_run(tracking_uri, experiment, name, tags) as run:
        training = _Training(data, recipe, seed, run, progress, ray)
        write_state(run.kept_folder / _STATE_NAME, facts=training.facts)
        training.begin(data_dir)
        return training.train({})


def resume(
    data_dir: Path,
    run_id: str,
    *,
    tracking_uri: str,
    progress: Progress = lambda _step, _steps, _metrics: None,
    ray: str | None = None,
) -> FitSummary:
    """Continue a killed run in its MLflow run; raises as `fit`, MissingPath and CorruptFile."""
    with tracking.continue_run(tracking_uri, run_id) as run:
        state = _state_of(run)
        facts = state["facts"]
        recipe, seed = Recipe(**facts["recipe"]), int(facts["seed"])
        data = _load(data_dir, recipe, seed, ray)
        if data.digest != facts["data_hash"]:
            first = f"{facts['data_hash'][:12]}, {run.data.params.get('data')}"
            raise UserError(
                f"{data_dir} (hash {data.digest[:12]}) is not what run '{run_id}' began with "
                f"({first}); give --data that directory"
            )
        training = _Training(data, recipe, seed, run, progress, ray)
        if not run.data.tags.get("data_hash"):
            training.begin(data_dir)
        return training.train(state)


def _load(data_dir: Path, recipe: Recipe, seed: int, ray: str | None) -> TrainingData:
    if ray is not None and recipe.algorithm != "IMPALA":
        raise UserError(
            f"--ray {ray} is for actors that play for a learner, and the algorithm of "
            f"'{recipe.name}' is {recipe.algorithm}: take 'impala-lstm', or leave --ray out"
        )
    return load_data(
        data_dir,
        seed,
        recipe.trigger,
        with_costs=recipe.action_inputs or recipe.algorithm in CAUTIOUS,
        with_calls=recipe.use_calls,
        split=recipe.split,
    )


def _state_of(run: tracking.Run) -> dict[str, Any]:
    """The `facts` of a run and, after its first epoch, the state of its loop."""
    path = run.kept_folder / _STATE_NAME
    if not path.exists():
        raise MissingPath(
            f"state of run '{run.run_id}'",
            path,
            "a run keeps one until it is finished; begin anew with 'dynamiccl-train fit'",
        )
    state = read_state(path)
    if unknown := state["facts"]["recipe"].keys() - {each.name for each in fields(Recipe)}:
        raise CorruptFile(
            f"run '{run.run_id}' has settings that this release does not know "
            f"({', '.join(sorted(unknown))}): finish it with the release that began it, or train "
            "anew"
        )
    return state


#: The policies by file, what the summary tells of them, and metrics besides.
_Fitted = tuple[dict[str, nn.Module], dict[str, Any], dict[str, float]]


@dataclass(frozen=True, slots=True)
class _Training:
    data: TrainingData
    recipe: Recipe
    seed: int
    run: tracking.Run
    progress: Progress
    ray: str | None

    @property
    def facts(self) -> dict[str, Any]:
        recipe, digest = asdict(self.recipe), self.data.digest
        return {"recipe": recipe, "seed": self.seed, "data_hash": digest}

    def begin(self, data_dir: Path) -> None:
        counts = {"rows": self.data.training.counts, "calls": self.data.sequence_counts}
        params = {
            f"{of}_{name}": value
            for of, each in counts.items()
            if each is not None
            for name, value in each.items()
        }
        params |= {**asdict(self.recipe), "seed": self.seed}
        text = f"{self.recipe.summary}. Trained on `{data_dir}` with seed {self.seed}."
        self.run.begin(data_dir, self.data.digest, params, text)

    def train(self, state: dict[str, Any]) -> FitSummary:
        is_cautious = self.recipe.algorithm in CAUTIOUS
        fitted = self._fit_tables() if is_cautious else self._fit_networks(state)
        with tempfile.TemporaryDirectory() as folder:
            summary = self._track(Path(folder), fitted)
        (self.run.kept_folder / _STATE_NAME).unlink(missing_ok=True)
        return summary

    def _make_loop(self) -> Loop:
        data, recipe = self.data, self.recipe
        torch.manual_seed(self.seed)
        uses_cost = recipe.action_inputs and data.costs is not None and self._uses_cost()
        if recipe.algorithm in ONLINE:
            from dynamiccl.train.online import make_loop as make_online_loop

            return make_online_loop(data, recipe, self.seed, uses_cost=uses_cost, ray=self.ray)
        from dynamiccl.train.offline import make_loop  # d3rlpy, which no other recipe needs

        actions = None
        if recipe.action_inputs and data.costs is not None:
            actions = ActionInputs(data.catalogue.configs, data.cost_start, uses_cost)
        return make_loop(data, recipe, self.seed, actions)

    def _uses_cost(self) -> bool:
        """Whether costs are the base of times; logs the residuals that decide it."""
        found = base_residuals(self.data)
        if found is not None:
            names = ("residual_over_cost", "residual_over_time")
            self.run.log(dict(zip(names, found, strict=True)))
        uses_cost = found is not None and found[0] < found[1]
        self.run.log(tags={"cost_base": "cost" if uses_cost else "time"})
        return uses_cost

    def _fit_networks(self, state: dict[str, Any]) -> _Fitted:
        """The best checkpoint with the best margin on validation; of equals the largest."""
        data, recipe, loop = self.data, self.recipe, self._make_loop()
        if "step" in state:
            loop.restore(state)
            if loop.step not in self.run.steps("validation_regret"):  # killed in between
                self.run.log(loop.latest, step=loop.step)
        started = time.monotonic()
        with contextlib.closing(loop.source):
            if not loop.is_over:
                loop.source.start(loop.step)
            while not loop.is_over:
                loop.run_epoch()
                write_state(self.run.kept_folder / _STATE_NAME, facts=self.facts, **loop.state())
                self.run.log(loop.latest, step=loop.step)
                self.progress(loop.step, recipe.steps, loop.latest)
        seconds = time.monotonic() - started
        best, members = loop.best(), cast(Any, loop.source.members)
        members.load_state_dict(best["weights"])
        networks, is_unanimous = cast(Iterable[Network], members), recipe.unanimous
        regret, negative_margin = min(
            (data.validation_regret(networks, margin, is_unanimous=is_unanimous), -margin)
            for margin in recipe.abstain_margins
        )
        margin, warm_margin = -negative_margin, recipe.warm_margin
        if recipe.state_units:
            module: PolicyModule = StatefulPolicyModule(members[0], margin, warm_margin)
        else:
            module = PolicyModule(networks, margin, warm_margin, is_unanimous=is_unanimous)
        found = {
            "steps": recipe.steps,
            "seconds": seconds,
            "best_step": best["step"],
            "validation_regret": regret,
            "abstain_margin": margin,
        }
        return {manifests.POLICY_NAME: module}, found, {"abstain_margin": margin}

    def _fit_tables(self) -> _Fitted:
        data, alpha, started = self.data, self.recipe.alpha, time.monotonic()
        policy, judged, of_training, metrics = fit_tables(
            data, alpha=alpha, progress=lambda done, count: self.progress(done, count, {})
        )
        for each in (policy, judged):
            each.level_threshold = self.recipe.level_threshold
        actions, _ = forward(of_training, data.observations, data.validation.mask)
        found = {
            "abstain_margin": MIN_GAIN,
            "steps": 0,
            "seconds": time.monotonic() - started,
            "best_step": 0,
            "validation_regret": data.mean_over_groups(actions),
        }
        return {manifests.POLICY_NAME: policy, manifests.JUDGED_NAME: judged}, found, metrics

    def _track(self, scratch: Path, fitted: _Fitted) -> FitSummary:
        modules, found, metrics = fitted
        data, recipe, run = self.data, self.recipe, self.run
        (scratch / POLICY_FOLDER).mkdir()
        manifest = self._export(scratch / POLICY_FOLDER, modules, found["abstain_margin"])
        text = json.dumps(asdict(recipe), indent=1)
        (scratch / "recipe.json").write_text(text, encoding="utf-8")
        if recipe.source:
            shutil.copy(recipe.source, scratch / "recipe.py")
        summary = FitSummary(
            run_id=run.run_id,
            run_directory=run.place,
            recipe=recipe.name,
            validation_default_regret=data.default_regret(),
            validation_tasks=data.validation.tasks.height,
            num_actions=len(manifest.catalogue),
            counts=data.training.counts,
            left_out=data.left_out,
            **found,
        )
        metrics |= {
            "best_validation_regret": summary.validation_regret,
            "default_validation_regret": summary.validation_default_regret,
            "train_seconds": summary.seconds,
        }
        text = (
            f"{recipe.summary}. Mean regret on {summary.validation_tasks} validation tasks: "
            f"{summary.validation_regret:.2%} "
            f"(NCCL's default {summary.validation_default_regret:.2%})."
        )
        run.log(metrics, step=summary.steps, text=text)
        run.finish(asdict(summary), scratch)
        return summary

    def _export(self, folder: Path, modules: Mapping[str, nn.Module], margin: float) -> Manifest:
        data, recipe = self.data, self.recipe
        for name, module in modules.items():
            save_script(module, folder / name)
        watching = None
        if recipe.trigger:
            trigger = manifests.trigger_file(Path(recipe.trigger))
            watching = manifests.trigger_facts(trigger)
            facts = trigger.with_name(manifests.TRIGGER_FACTS_NAME)
            shutil.copyfile(trigger, folder / manifests.TRIGGER_NAME)
            shutil.copyfile(facts, folder / facts.name)
        supports = manifests.find_supports(data.frame, data.catalogue, data.training.noise)
        costs = None if data.costs is None else manifests.costs_beside(data.costs, supports)
        return Manifest(
            recipe=recipe.name,
            catalogue=data.catalogue.to_json(),
            features=feature_table(data.profiles, costs=data.costs is not None),
            window_features=window_table(),
            window_length=WINDOW_LENGTH,
            launch_profiles=data.profiles,
            supports=supports,
            knows_shapes=recipe.algorithm in CAUTIOUS,
            costs=None if costs is None else costs.to_dict(as_series=False),
            abstain_margin=margin,
            data_hash=data.digest,
            git_commit=git_commit(),
            dynamiccl_version=dynamiccl.__version__,
            runs=run_names(usable(data.frame)),
            digests=run_digests(usable(data.frame)),
            parts=data.parts,
            saw_test=manifests.JUDGED_NAME in modules,
            trigger=watching,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        ).write(folder)
