"""A training run: what was learned, what MLflow shows, and one that was killed and goes on."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import mlflow
import pytest
import torch
from mlflow import MlflowClient

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.store import content_hash
from dynamiccl.errors import CorruptFile, MissingPath, NotEnoughData, UserError
from dynamiccl.train import DEFAULT_TRACKING_URI, tracking
from dynamiccl.train.fit import FitSummary, fit, resume
from dynamiccl.train.loop import read_state, write_state
from dynamiccl.train.policy import load_script
from dynamiccl.train.recipe import Recipe, make_recipe
from dynamiccl.train.tracking import Run
from tests.conftest import Trained
from tests.data_sets import SWEEP, make_data, sweep_text
from tests.stores import new_store, uri_of


def test_run_is_tracked_with_what_made_it_where_and_beats_the_default(trained: Trained) -> None:
    client = mlflow.MlflowClient(trained.tracking_uri)
    run = client.get_run(trained.run_id)
    assert run.info.status == "FINISHED"
    assert (run.data.params["name"], run.data.params["seed"]) == ("ddqn-dueling", "0")
    assert run.data.tags["data_hash"] == content_hash(trained.data)
    assert len(run.data.tags["git_commit"].removesuffix("+dirty")) in {40, len("unknown")}
    history = client.get_metric_history(trained.run_id, "validation_regret")
    assert [m.step for m in history] == list(range(100, 901, 100))
    losses = [m.value for m in client.get_metric_history(trained.run_id, "loss")]
    assert losses[-1] < losses[0] / 2
    metrics = run.data.metrics
    assert metrics["best_validation_regret"] < metrics["default_validation_regret"] / 2
    over_cost, over_time = (metrics[f"residual_over_{name}"] for name in ("cost", "time"))
    assert run.data.tags["cost_base"] == ("cost" if over_cost < over_time else "time")
    names = {str(p.relative_to(trained.run_directory)) for p in trained.run_directory.rglob("*")}
    assert {"recipe.json", "policy/policy.pt", "policy/manifest.json"} <= names
    assert json.loads((trained.run_directory / "recipe.json").read_text())["steps"] == 900
    (given,) = run.inputs.dataset_inputs
    assert given.dataset.digest == run.data.tags["data_hash"][:12]
    assert json.loads(given.dataset.source)["uri"] == str(trained.data.resolve())
    told = f"validation tasks: {metrics['best_validation_regret']:.2%} (NCCL's default"
    assert told in run.data.tags["mlflow.note.content"]
    told = tracking.ui_hint(trained.tracking_uri, trained.run_id)
    assert told.startswith(f"mlflow ui --backend-store-uri {trained.tracking_uri}\n")
    page = f"/#/experiments/{run.info.experiment_id}/runs?workflowType=machine_learning"
    assert f"http://127.0.0.1:5000{page}" in told
    manifest = Manifest.read(trained.policy)
    (support,) = manifest.supports
    assert (support.system, support.num_nodes, support.num_ranks) == ("sim-4x8", 4, 32)
    assert support.simulated
    assert set(support.measured) == {"AllReduce", "AllGather"}
    assert set(support.noise_bands) == {"AllReduce", "AllGather"}
    # The saved view sorts by a metric and names metrics that runs log.
    view = json.loads(tracking.EXPERIMENT_TAGS[f"mlflow.sharedViewState.{tracking.VIEW_KEY}"])
    assert set(view) == {"name", "createdAt", "state"}
    state = json.loads(view["state"])
    data = mlflow.MlflowClient(trained.tracking_uri).get_run(trained.run_id).data
    assert state["orderByKey"] in state["selectedColumns"]
    for column in state["selectedColumns"]:
        kind, name = column.replace("`", "").split(".", 1)
        known = {"metrics": data.metrics, "params": data.params, "attributes": {"Dataset"}}
        assert name in known[kind]


def test_a_fetched_policy_leaves_nothing_behind(trained: Trained, tmp_path: Path) -> None:
    fetch = "import sys; from dynamiccl.train.tracking import policy_directory as get"
    fetch += "; print(get(*sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", fetch, trained.run_id, trained.tracking_uri]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    fetched = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert Path(fetched.stdout.splitlines()[-1]).is_relative_to(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_run_and_no_store_says_so(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(MissingPath, match="mlflow ui"):
        tracking.policy_directory("0123456789abcdef", trained.tracking_uri)
    with pytest.raises(MissingPath, match="run directory"):
        tracking.policy_directory(str(tmp_path), trained.tracking_uri)
    with pytest.raises(UserError, match=r"cannot track .*let MLFLOW_TRACKING_URI be sqlite:///"):
        tracking.open_run(str(tmp_path / "files"), "x", "run")
    for named in ("cql-seed0", trained.run_id):
        with pytest.raises(UserError, match="cannot track"):
            tracking.policy_directory(named, str(tmp_path / "files"))
    with pytest.raises(UserError, match="give models:/dynamiccl@candidate or models:/"):
        tracking.policy_directory("models:/m-123", trained.tracking_uri)


def test_data_without_validation_sizes_says_which_to_measure(tmp_path: Path) -> None:
    data = make_data(tmp_path / "store", sweep_text(sizes='{ min = "64K", max = "64K" }'))
    recipe = make_recipe("ddqn-dueling", ["steps=1"])
    with pytest.raises(NotEnoughData, match="no validation task"):
        fit(data, recipe, experiment="x", tracking_uri=f"sqlite:///{tmp_path}/m.db", seed=0)


# --- What MLflow shows ---


def test_experiments_have_our_tags_beside_those_that_they_have(tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    client, held = mlflow.MlflowClient(uri), {"mlflow.experimentKind": "regression"}
    client.create_experiment("made by hand", artifact_location=tmp_path.as_uri(), tags=held)
    for name, own in (("made by hand", held), ("new", {})):
        tracking.open_run(uri, name, "run")
        found = client.get_experiment_by_name(name)
        assert found is not None
        assert found.tags == tracking.EXPERIMENT_TAGS | own


def test_default_store_of_each_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each in turn, in one process: a notebook's, or a test's."""
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        new_store(folder)
        monkeypatch.chdir(folder)
        with tracking.open_run(DEFAULT_TRACKING_URI, "where", name) as run:
            pass
        assert tracking.reopen_run(uri_of(folder), run.run_id).directory == run.directory
        assert run.directory is not None
        assert run.directory.is_relative_to(folder)


def test_trials_that_log_the_same_data_at_once_all_do(tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    runs = [tracking.open_run(uri, "study", f"trial {number}") for number in range(4)]
    together = threading.Barrier(len(runs))

    def log(run: tracking.Run, digest: str) -> None:
        together.wait()
        run.begin(tmp_path, digest, {}, "a trial")

    with ThreadPoolExecutor(len(runs)) as pool:
        for number in range(3):
            list(pool.map(log, runs, [f"{number:012x}"] * len(runs)))


class Killed(Exception):
    """Raised to end a run between two epochs."""


def broken_run(data: Path, uri: str, recipe: Recipe, *, at: int, seed: int = 0) -> str:
    """The id of a run that ended after step `at`, the only one in the experiment `broken`."""

    def stop(step: int, _steps: int, _metrics: dict[str, float]) -> None:
        if step == at:
            raise Killed

    with pytest.raises(Killed):
        fit(data, recipe, experiment="broken", tracking_uri=uri, seed=seed, progress=stop)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("broken")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return str(run.info.run_id)


SETTINGS = ["steps=60", "steps_per_epoch=10", "hidden_sizes=16", "num_members=2"]
EPOCHS = list(range(10, 61, 10))


def curve(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    history = MlflowClient(uri).get_metric_history(run_id, name)
    return [(metric.step, metric.value) for metric in history]


def run_ids(uri: str) -> list[str]:
    client = MlflowClient(uri)
    ids = [found.experiment_id for found in client.search_experiments()]
    return [run.info.run_id for run in client.search_runs(ids)]


def whole_run(data: Path, uri: str, recipe: Recipe) -> FitSummary:
    return fit(data, recipe, experiment="whole", tracking_uri=uri, seed=3)


def assert_same_policy(*directories: str) -> None:
    first, second = (
        load_script(Path(each) / "policy/policy.pt").state_dict() for each in directories
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_curve_and_weights_are_of_a_whole_run(data_dir: Path, tmp_path: Path) -> None:
    uri, chosen = new_store(tmp_path), make_recipe("cql", [*SETTINGS, "window_encoder=lstm"])
    broken = broken_run(data_dir, uri, chosen, at=40, seed=3)
    resumed = resume(data_dir, broken, tracking_uri=uri)
    assert resumed.run_id == broken
    assert run_ids(uri) == [broken]
    assert MlflowClient(uri).get_run(broken).info.status == "FINISHED"
    assert not (Path(resumed.run_directory) / "state.pt").exists()
    whole = whole_run(data_dir, uri, chosen)
    for name in ("loss", "validation_regret"):
        wanted = curve(uri, whole.run_id, name)
        assert [step for step, _ in wanted] == EPOCHS
        assert curve(uri, resumed.run_id, name) == wanted
    for field in ("best_step", "validation_regret", "abstain_margin", "counts"):
        assert getattr(resumed, field) == getattr(whole, field)
    assert_same_policy(whole.run_directory, resumed.run_directory)


def test_metrics_come_late(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, log = new_store(tmp_path), Run.log

    def stop(run: Run, metrics: Mapping[str, float] = {}, **how: Any) -> None:
        if "loss" in metrics:
            raise Killed
        log(run, metrics, **how)

    monkeypatch.setattr(Run, "log", stop)
    with pytest.raises(Killed):
        whole_run(data_dir, uri, make_recipe("ddqn-dueling", SETTINGS))
    monkeypatch.undo()
    (run_id,) = run_ids(uri)
    assert curve(uri, run_id, "loss") == []
    resume(data_dir, run_id, tracking_uri=uri)
    assert [step for step, _ in curve(uri, run_id, "loss")] == EPOCHS


def test_a_run_without_an_epoch_begins_again(data_dir: Path, tmp_path: Path) -> None:
    uri, place = new_store(tmp_path), "dynamiccl.train.fit._Training.train"
    recipe = make_recipe("gaussian-process", SETTINGS)
    with mock.patch(place, side_effect=Killed), pytest.raises(Killed):
        whole_run(data_dir, uri, recipe)
    (run_id,) = run_ids(uri)
    resumed = resume(data_dir, run_id, tracking_uri=uri)
    assert resumed.run_id == run_id
    assert not list((tmp_path / "mlruns").rglob("state.pt"))
    assert_same_policy(resumed.run_directory, whole_run(data_dir, uri, recipe).run_directory)


def test_what_cannot_be_resumed_says_why(data_dir: Path, tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    broken = broken_run(data_dir, uri, make_recipe("ddqn-dueling", SETTINGS), at=10, seed=3)
    other = make_data(tmp_path / "other", SWEEP.replace("seed = 3", "seed = 4"))
    with pytest.raises(UserError, match="is not what run"):
        resume(other, broken, tracking_uri=uri)
    (state,) = (tmp_path / "mlruns").rglob("state.pt")
    facts = read_state(state)["facts"]
    write_state(state, facts=facts | {"recipe": facts["recipe"] | {"reward_scale": 1.0}})
    with pytest.raises(CorruptFile, match=r"\(reward_scale\): finish it with the release that"):
        resume(data_dir, broken, tracking_uri=uri)
    torch.save({"version": 0, "facts": facts}, state)
    with pytest.raises(CorruptFile, match="has version 0"):
        resume(data_dir, broken, tracking_uri=uri)
    state.write_bytes(b"nothing of the kind")
    with pytest.raises(CorruptFile, match="not the state"):
        resume(data_dir, broken, tracking_uri=uri)
    state.unlink()
    with pytest.raises(MissingPath, match="begin anew"):
        resume(data_dir, broken, tracking_uri=uri)
    with pytest.raises(UserError, match="id=0123456789abcdef not found"):
        resume(data_dir, "0123456789abcdef", tracking_uri=uri)
    done = whole_run(data_dir, uri, make_recipe("ddqn-dueling", SETTINGS))
    with pytest.raises(UserError, match="has finished"):
        resume(data_dir, done.run_id, tracking_uri=uri)


def test_what_does_not_learn_from_records_trains_without_d3rlpy(data_dir: Path) -> None:
    code = """
import sys
sys.modules["d3rlpy"] = None  # an import of it fails
from pathlib import Path
import dynamiccl.train.online, dynamiccl.train.study, dynamiccl.train.trigger_fit
from dynamiccl.train.cautious_fit import fit_tables
from dynamiccl.train.data import load_data
print(fit_tables(load_data(Path(sys.argv[1]), 0, with_costs=True), alpha=0.1)[3]['prior_widened'])
try:
    import dynamiccl.train.offline
except ImportError as error:
    print(error)
"""
    words = [sys.executable, "-P", "-c", code, str(data_dir)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tables, refused = done.stdout.splitlines()
    assert float(tables) >= 1.0
    assert "d3rlpy" in refused
