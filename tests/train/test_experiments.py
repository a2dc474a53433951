"""MLflow: where runs go, and what its pages show of experiments and runs."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.tracking import (
    EXPERIMENT_TAGS,
    VIEW_KEY,
    Run,
    continue_run,
    open_run,
    reopen_run,
    runs_page,
    source_tags,
    start_run,
    ui_hint,
)
from tests.conftest import Trained
from tests.stores import new_store, uri_of


def test_a_new_experiment_is_one_of_model_training(tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    open_run(uri, "new", "run")
    found = MlflowClient(uri).get_experiment_by_name("new")
    assert found is not None
    assert found.tags["mlflow.experimentKind"] == "custom_model_development"
    assert found.tags["mlflow.experiment.primaryMetric.name"] == "best_validation_regret"


def test_experiments_of_older_releases_get_the_tags_that_they_lack(tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    client = MlflowClient(uri)
    held = {"mlflow.experimentKind": "regression"}
    for name in ("begun", "continued"):
        client.create_experiment(name, artifact_location=tmp_path.as_uri(), tags=held)
    open_run(uri, "begun", "run")
    continued = client.get_experiment_by_name("continued")
    assert continued is not None
    run = client.create_run(continued.experiment_id)
    with continue_run(uri, run.info.run_id):
        pass
    for name in ("begun", "continued"):
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None
        assert experiment.tags == EXPERIMENT_TAGS | held


def test_the_saved_view_sorts_by_a_metric_and_names_metrics_that_runs_log(trained: Trained) -> None:
    view = json.loads(EXPERIMENT_TAGS[f"mlflow.sharedViewState.{VIEW_KEY}"])
    assert set(view) == {"name", "createdAt", "state"}
    state = json.loads(view["state"])
    data = MlflowClient(trained.tracking_uri).get_run(trained.run_id).data
    assert state["orderByKey"] in state["selectedColumns"]
    for column in state["selectedColumns"]:
        kind, name = column.replace("`", "").split(".", 1)
        known = {"metrics": data.metrics, "params": data.params, "attributes": {"Dataset"}}
        assert name in known[kind]


def test_a_run_has_its_data_set_its_description_and_its_source(trained: Trained) -> None:
    run = MlflowClient(trained.tracking_uri).get_run(trained.run_id)
    (given,) = run.inputs.dataset_inputs
    assert given.dataset.digest == run.data.tags["data_hash"][:12]
    assert json.loads(given.dataset.source)["uri"] == str(trained.data.resolve())
    regret = run.data.metrics["best_validation_regret"]
    assert f"validation tasks: {regret:.2%} (NCCL's default" in run.data.tags["mlflow.note.content"]
    assert run.data.tags["mlflow.source.name"]


@pytest.mark.parametrize(
    ("argv", "source"),
    [
        (["/env/bin/dynamiccl-train", "fit", "--data", "x"], "dynamiccl-train fit"),
        (["/env/bin/dynamiccl-train", "--help"], "dynamiccl-train"),
        (["/src/train/cli.py", "study", "--join", "id"], "dynamiccl-train study"),
        (["/home/me/mine.py", "fit"], "mine.py"),
    ],
)
def test_the_source_of_a_run_is_the_command(
    argv: list[str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    assert source_tags()["mlflow.source.name"] == source


def test_the_page_of_the_runs_is_told_with_the_store(trained: Trained) -> None:
    experiment = mlflow.MlflowClient(trained.tracking_uri).get_run(trained.run_id).info
    page = runs_page(experiment.experiment_id)
    assert "workflowType=machine_learning" in page
    told = ui_hint(trained.tracking_uri, trained.run_id)
    assert told.startswith(f"mlflow ui --backend-store-uri {trained.tracking_uri}\n")
    assert told.endswith(f"http://127.0.0.1:5000{page}")


def test_the_default_store_is_that_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each in turn, in one process: a notebook's, or a test's."""
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        new_store(folder)
        monkeypatch.chdir(folder)
        with start_run(DEFAULT_TRACKING_URI, "where", name) as run:
            pass
        assert reopen_run(uri_of(folder), run.run_id).directory == run.directory
        assert run.directory is not None
        assert run.directory.is_relative_to(folder)


def test_trials_that_log_the_same_data_at_once_all_do(tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    runs = [open_run(uri, "study", f"trial {number}") for number in range(4)]
    together = threading.Barrier(len(runs))

    def log(run: Run, digest: str) -> None:
        together.wait()
        run.log_data(str(tmp_path), digest)

    with ThreadPoolExecutor(len(runs)) as pool:
        for number in range(3):
            list(pool.map(log, runs, [f"{number:012x}"] * len(runs)))
