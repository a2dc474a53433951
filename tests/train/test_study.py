"""Studies: a queue of trials that are children of one run; workers that fail and are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from optuna.trial import TrialState

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.errors import MissingPath, UnknownName, UserError
from dynamiccl.train import study as studies
from dynamiccl.train.study import (
    Plan,
    begin_study,
    end_study,
    latest_trials,
    make_plan,
    open_study,
    retry_failed,
    summarise_study,
    work,
)
from dynamiccl.train.tracking import CANDIDATE, MODEL_NAME, policy_directory
from tests.stores import new_store

ROOT = Path(__file__).parents[2]
FEW = ["steps=20", "steps_per_epoch=10", "hidden_sizes=8", "num_members=1"]
SPACE = ["learning_rate=1e-4:1e-1:log", "batch_size=16:64", "hidden_sizes=8,16+16"]


def planned(
    data: Path, axes: Sequence[str] = (), recipes: Sequence[str] = ("ddqn-dueling",), **more: Any
) -> Plan:
    settings: dict[str, Any] = {"experiment": "x", "settings": FEW, "seeds": 1, **more}
    return make_plan(data, recipes=recipes, axes=axes, **settings)


def children(study: optuna.Study, client: MlflowClient) -> list[Run]:
    experiment = client.get_run(study.study_name).info.experiment_id
    runs = client.search_runs([experiment])
    return [run for run in runs if run.data.tags.get("mlflow.parentRunId") == study.study_name]


def test_a_grid_is_every_recipe_with_every_combination_and_seed(tmp_path: Path) -> None:
    recipes, grid = ["ddqn-dueling", "bc"], ["learning_rate=0.1,0.2", "hidden_sizes=8,16+16"]
    plan = planned(Path("data"), grid, recipes, seeds=3)
    study = begin_study(plan, new_store(tmp_path))
    chosen = [trial.system_attrs["fixed_params"] for trial in study.trials]
    assert len(chosen) == 2 * 2 * 2 * 3
    assert [trial.user_attrs["seeds"] for trial in study.trials] == [[0], [1], [2]] * 8
    assert len({plan.setting_of(each) for each in chosen}) == 8
    assert plan.setting_of(chosen[-1]) == "bc learning_rate=0.2 hidden_sizes=16+16"
    recipe = plan.recipe_of(chosen[-1])
    assert (recipe.learning_rate, recipe.hidden_sizes, recipe.steps) == (0.2, (16, 16), 20)
    assert Path(plan.data).is_absolute()


@pytest.mark.parametrize(
    ("axes", "count", "error", "words"),
    [
        (["learning_rate"], 0, UserError, "--grid learning_rate has no values; write key=value"),
        (["rate=1,2"], 0, UnknownName, "learning_rate"),
        (["steps=1,x"], 0, UserError, "whole number|valid integer"),
        (["learning_rate"], 3, UserError, "has no values; write key=low:high"),
        (["lerning_rate=1:2"], 3, UnknownName, "did you mean 'learning_rate'"),
        (["lerning_rate=1,2"], 3, UnknownName, "did you mean 'learning_rate'"),
        (["steps=10:x"], 3, UserError, "whole number|valid integer"),
        (["batch_size=2,x"], 3, UserError, "whole number|valid integer"),
        (["steps=10:20:cube"], 3, UserError, "'cube' is no scale"),
        (["steps=20:10"], 3, UserError, "low must be below high"),
        (["lambda_switch=0:1:log"], 3, UserError, "low must be below high above 0"),
        (["hidden_sizes=8:16"], 3, UserError, "give its values as hidden_sizes=value,value"),
        (["dueling=true:false"], 3, UserError, "give its values as dueling=value,value"),
        (["steps=10:20", "steps=30:40"], 3, UserError, "gives steps twice"),
    ],
)
def test_what_cannot_be_tried_says_why(
    axes: list[str], count: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        planned(Path("d"), axes, count=count)


def test_trials_are_children_and_the_parent_tells_the_best(data_dir: Path, tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    study = begin_study(planned(data_dir, [], ["ddqn-dueling", "bc"], seeds=2), uri)
    run_id, client = study.study_name, MlflowClient(uri)
    working = work(study, uri)
    assert next(working).startswith("trial 0 (ddqn-dueling, seed 0): validation regret ")
    half, failures = summarise_study(study)
    assert (half.done, half.trials, half.settings[0].low, failures) == (1, 4, None, [])
    end_study(half, uri)
    assert client.get_run(run_id).info.status == "FAILED"
    assert len(list(working)) == 3
    assert list(work(open_study(run_id, uri), uri)) == []  # done: nothing runs twice
    summary, _ = summarise_study(study)
    end_study(summary, uri)
    assert [setting.seeds for setting in summary.settings] == [2, 2]
    assert summary.settings[0].mean <= summary.settings[1].mean
    for setting in summary.settings:
        assert setting.low is not None
        assert setting.high is not None
        assert setting.low <= setting.mean <= setting.high
    parent = client.get_run(run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["best_setting"] == summary.settings[0].setting
    assert parent.data.metrics["best_validation_regret"] == summary.settings[0].mean
    candidate = client.get_model_version_by_alias(MODEL_NAME, CANDIDATE)
    assert candidate.run_id == summary.settings[0].best_run
    policy = policy_directory(f"models:/{MODEL_NAME}@{CANDIDATE}", uri)
    assert Manifest.read(policy).recipe == summary.settings[0].setting
    below = children(study, client)
    assert len(below) == 4
    assert {run.data.params["seed"] for run in below} == {"0", "1"}
    with pytest.raises(MissingPath, match="no study"):
        open_study(below[0].info.run_id, uri)


def test_what_failed_is_tried_again_once_it_is_mended(data_dir: Path, tmp_path: Path) -> None:
    """Somebody's recipe, which fails in the first worker alone."""
    uri, recipe = new_store(tmp_path), tmp_path / "mine.py"
    text = "from dynamiccl.train.recipe import make_recipe\n\ndef recipe():\n    "
    good = f"{text}return make_recipe('ddqn-dueling')\n"
    recipe.write_text(good)
    study = begin_study(planned(data_dir, [], [str(recipe)], seeds=2), uri)
    working = work(study, uri)
    next(working)
    recipe.write_text(f"{text}raise KeyError('gone')\n")
    list(working)
    summary, failures = summarise_study(study)
    assert (summary.done, summary.trials) == (1, 2)
    assert len(failures) == 1
    assert "mine.py gives no recipe: KeyError: 'gone'" in failures[0]
    recipe.write_text(good)
    retry_failed(study)
    assert len(list(work(study, uri))) == 1
    summary, failures = summarise_study(study)
    assert (summary.done, summary.trials, failures) == (2, 2, [])


def test_a_search_ends_where_nothing_is_left_and_failures_stop_nothing(
    data_dir: Path, tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    study = begin_study(planned(data_dir, ["window_encoder=mlp,nothing,cnn"], count=9), uri)
    told = list(work(study, uri))
    assert len(told) == 3
    summary, failures = summarise_study(study)
    assert (summary.trials, summary.done) == (3, 2)
    found = {setting.setting for setting in summary.settings}
    assert found == {"ddqn-dueling window_encoder=mlp", "ddqn-dueling window_encoder=cnn"}
    assert [failure in told for failure in failures] == [True]
    assert "window_encoder=nothing, seed 0" in failures[0]


def test_what_is_chosen_twice_is_trained_once(data_dir: Path, tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    study = begin_study(planned(data_dir, ["batch_size=16,32"], count=1, seeds=2), uri)
    study.enqueue_trial({}, user_attrs={"seeds": [0, 1]})
    study.enqueue_trial({}, user_attrs={"seeds": [0, 1]})
    assert len(list(work(study, uri))) == 2 * len(
        {trial.params["batch_size"] for trial in study.trials}
    )
    summary, _ = summarise_study(study)
    assert (summary.done, summary.trials) == (6, 6)
    assert {setting.seeds for setting in summary.settings} == {2}
    assert len(children(study, MlflowClient(uri))) == 2 * len(summary.settings) < 6


def test_a_worker_that_finds_the_queue_empty_trains_nothing(data_dir: Path, tmp_path: Path) -> None:
    """Another took the last trial in between."""
    uri = new_store(tmp_path)
    study = begin_study(planned(data_dir), uri)
    study.add_trial(optuna.create_trial(state=TrialState.WAITING))
    trial = study.trials[0]
    study._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
    study.optimize(studies._Worker(study, uri).try_one, n_trials=1)
    assert [each.state for each in study.trials] == [TrialState.RUNNING, TrialState.FAIL]
    assert list(latest_trials(study)) == [0]
    assert summarise_study(study)[1] == []


WORKER = """
import sys
from dynamiccl.train.study import open_study, work
uri, run_id = sys.argv[1:]
list(work(open_study(run_id, uri), uri))
"""


def test_the_trial_of_a_worker_that_is_killed_is_run_by_another(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search, killed in the middle of its first training: it comes to what it would have."""
    plan = planned(data_dir, SPACE, settings=[*FEW, "steps=120"], count=2)
    (tmp_path / "whole").mkdir()
    uri = new_store(tmp_path / "whole")
    whole = begin_study(plan, uri)
    list(work(whole, uri))
    uri = new_store(tmp_path)
    study = begin_study(plan, uri)
    command = [sys.executable, "-P", "-c", WORKER, uri, study.study_name]
    first = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    until = time.monotonic() + 300
    while not list(tmp_path.glob("mlruns/*/artifacts/state.pt")):
        assert first.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    (begun,) = children(study, MlflowClient(uri))
    monkeypatch.setattr(studies, "STALE_S", 3.0)
    assert len(list(work(study, uri))) == 2
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]
    assert begun.info.run_id in {run.info.run_id for run in children(study, MlflowClient(uri))}
    found, wanted = summarise_study(study)[0], summarise_study(whole)[0]
    assert (found.done, found.trials) == (2, 2)
    assert [(each.setting, each.mean) for each in found.settings] == [
        (each.setting, each.mean) for each in wanted.settings
    ]
    for trial in latest_trials(study).values():
        recipe = plan.recipe_of(trial.params)
        assert 1e-4 <= recipe.learning_rate <= 1e-1
        assert 16 <= recipe.batch_size <= 64
        assert recipe.hidden_sizes in {(8,), (16, 16)}
        assert recipe.steps == 120
