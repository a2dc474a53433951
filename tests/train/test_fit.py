"""A training run on simulated data: what was learned, export, and what MLflow shows of it."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlflow
import pytest

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.store import content_hash
from dynamiccl.errors import MissingPath, NotEnoughData, UserError
from dynamiccl.train import DEFAULT_TRACKING_URI, tracking
from dynamiccl.train.fit import fit
from dynamiccl.train.recipe import make_recipe
from tests.conftest import Trained
from tests.data_sets import make_data, sweep_text
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
