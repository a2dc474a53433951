"""MLflow: where runs go, and what its pages show of experiments and runs."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.tracking import (
    EXPERIMENT_TAGS,
    VIEW_KEY,
    Run,
    open_run,
    reopen_run,
    start_run,
    ui_hint,
)
from tests.conftest import Trained
from tests.stores import new_store, uri_of


def test_experiments_have_our_tags_beside_those_that_they_have(tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    client, held = MlflowClient(uri), {"mlflow.experimentKind": "regression"}
    client.create_experiment("made by hand", artifact_location=tmp_path.as_uri(), tags=held)
    for name, own in (("made by hand", held), ("new", {})):
        open_run(uri, name, "run")
        found = client.get_experiment_by_name(name)
        assert found is not None
        assert found.tags == EXPERIMENT_TAGS | own


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


def test_a_run_has_its_data_set_its_description_its_source_and_its_page(trained: Trained) -> None:
    run = MlflowClient(trained.tracking_uri).get_run(trained.run_id)
    (given,) = run.inputs.dataset_inputs
    assert given.dataset.digest == run.data.tags["data_hash"][:12]
    assert json.loads(given.dataset.source)["uri"] == str(trained.data.resolve())
    regret = run.data.metrics["best_validation_regret"]
    assert f"validation tasks: {regret:.2%} (NCCL's default" in run.data.tags["mlflow.note.content"]
    assert run.data.tags["mlflow.source.type"] == "LOCAL"
    told = ui_hint(trained.tracking_uri, trained.run_id)
    assert told.startswith(f"mlflow ui --backend-store-uri {trained.tracking_uri}\n")
    page = f"/#/experiments/{run.info.experiment_id}/runs?workflowType=machine_learning"
    assert f"http://127.0.0.1:5000{page}" in told


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
