"""A run that was killed goes on in the same MLflow run, as if nothing had happened."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mlflow import MlflowClient

from dynamiccl.errors import CorruptFile, MissingPath, UserError
from dynamiccl.train.fit import FitSummary, fit, resume
from dynamiccl.train.loop import read_state, write_state
from dynamiccl.train.policy import load_script
from dynamiccl.train.recipe import Recipe, make_recipe
from dynamiccl.train.tracking import Run
from tests.data_sets import SWEEP, make_data
from tests.stores import new_store
from tests.train.runs import Killed, broken_run

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
