"""Searches by Optuna: what can be searched, what is tried next, and going on after a kill."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from dynamiccl.errors import DynamicclError, UnknownName, UserError
from dynamiccl.train.search import JOURNAL_NAME, Search, check_space, suggest
from dynamiccl.train.study import (
    StudySummary,
    begin_study,
    end_study,
    extend_study,
    missing_trials,
    plan_search,
    read_study,
    run_trial,
    summarise_study,
)
from dynamiccl.train.tracking import reopen_run
from tests.stores import new_store, uri_of
from tests.train.runs import without_package

FEW = ("steps=20", "steps_per_epoch=10", "hidden_sizes=8", "num_members=1")
SPACE = ("learning_rate=1e-4:1e-1:log", "batch_size=16:64", "hidden_sizes=8,16+16")


def search(*space: str, recipes: tuple[str, ...] = ("ddqn-dueling",), count: int = 3) -> Search:
    return Search(recipes, FEW, space, count=count, seeds=1, per_round=1)


def run_study(run_id: str, uri: str) -> StudySummary:
    """Run a search to its end, in this process; trials that fail are left out."""
    tried: set[int] = set()
    while True:
        for number in set(missing_trials(run_id, uri)) - tried:
            tried.add(number)
            try:
                run_trial(run_id, number, uri)
            except (DynamicclError, ValueError, AssertionError):
                continue
        if not extend_study(run_id, uri):
            summary = summarise_study(run_id, uri)
            end_study(summary, uri)
            return summary


@pytest.mark.parametrize(
    ("space", "error", "words"),
    [
        (("learning_rate",), UserError, "has no values; write key=low:high"),
        (("lerning_rate=1:2",), UnknownName, "did you mean 'learning_rate'"),
        (("lerning_rate=1,2",), UnknownName, "did you mean 'learning_rate'"),
        (("steps=10:x",), UserError, "=.*valid integer"),
        (("batch_size=2,x",), UserError, "=.*valid integer"),
        (("steps=10:20:cube",), UserError, "'cube' is no scale"),
        (("steps=20:10",), UserError, "low must be below high"),
        (("lambda_switch=0:1:log",), UserError, "low must be below high above 0"),
        (("hidden_sizes=8:16",), UserError, "give its values as hidden_sizes=value,value"),
        (("dueling=true:false",), UserError, "give its values as dueling=value,value"),
        (("steps=10:20", "steps=30:40"), UserError, "gives steps twice"),
    ],
)
def test_what_cannot_be_searched_says_why(
    space: tuple[str, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_space(search(*space))


def test_suggestions_lie_in_the_space_and_are_the_same_again() -> None:
    wanted = search(*SPACE, recipes=("ddqn-dueling", "cql"))
    first = suggest(wanted, [], 30)
    assert first == suggest(wanted, [], 30)
    for chosen in first:
        recipe = wanted.recipe_of(chosen)
        assert recipe.name in {"ddqn-dueling", "cql"}
        assert 1e-4 <= recipe.learning_rate <= 1e-1
        assert 16 <= recipe.batch_size <= 64
        assert recipe.hidden_sizes in {(8,), (16, 16)}
        assert recipe.steps == 20
    below = [chosen for chosen in first if float(chosen["learning_rate"]) < 10**-2.5]
    assert 5 < len(below) < 25  # half of them, on a logarithmic axis
    assert len({wanted.setting_of(chosen) for chosen in first}) == 30
    later = replace(wanted, asked=tuple(first))
    assert suggest(later, [1.0] * 30, 1)[0] not in first


def test_suggestions_follow_what_was_good() -> None:
    """Where regret is the distance from 1e-2, TPE looks there more than chance would."""
    wanted = search("learning_rate=1e-6:1:log", count=40)
    regrets: list[float | None] = []
    while len(regrets) < 40:
        (chosen,) = suggest(wanted, regrets, 1)
        regrets.append(abs(math.log10(float(chosen["learning_rate"])) + 2))
        wanted = replace(wanted, asked=(*wanted.asked, chosen))
    late = sorted(regret for regret in regrets[20:] if regret is not None)
    assert late[len(late) // 2] < 0.75  # by chance the median distance would be about 1.7


def test_a_search_ends_where_nothing_is_left_and_failures_stop_nothing(
    data_dir: Path, tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    planned = plan_search(
        data_dir, experiment="x", search=search("window_encoder=mlp,nothing,cnn", count=9)
    )
    run_id = begin_study(planned, uri)
    summary = run_study(run_id, uri)
    assert (summary.trials, summary.done) == (3, 2)
    found = {setting.setting for setting in summary.settings}
    assert found == {"ddqn-dueling window_encoder=mlp", "ddqn-dueling window_encoder=cnn"}
    folder = reopen_run(uri, run_id).directory
    assert folder is not None
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL_NAME)))
    trials = optuna.load_study(study_name="dynamiccl", storage=storage).trials
    states = {trial.params["window_encoder"]: trial.state.name for trial in trials}
    assert states == {"mlp": "COMPLETE", "nothing": "FAIL", "cnn": "COMPLETE"}


@pytest.mark.soak
def test_without_optuna_the_message_names_the_extra(data_dir: Path, tmp_path: Path) -> None:
    words = ["study", "--data", str(data_dir), "--optuna", "3", "--space", "steps=10:20"]
    done = without_package("optuna", tmp_path, *words)
    assert done.returncode == 4, done.stderr
    assert "needs the package 'optuna', which is not installed" in done.stderr
    assert "pip install '.[optuna]'" in done.stderr
    assert not (tmp_path / "mlflow.db").exists()  # no study was begun


@pytest.mark.soak
def test_a_search_that_is_killed_goes_on_as_if_it_had_not_been(
    data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    uri = new_store(tmp_path / "whole")
    planned = plan_search(data_dir, experiment="x", search=search(*SPACE))
    whole_id = begin_study(planned, uri)
    whole = run_study(whole_id, uri)
    assert whole.done == 3
    base = [sys.executable, "-P", "-m", "dynamiccl.train.cli", "study", "--json"]
    words = [w for setting in FEW for w in ("--set", setting)]
    words += [w for axis in SPACE for w in ("--space", axis)]
    words += ["--recipe", "ddqn-dueling", "--optuna", "3", "--seeds", "1", "--jobs", "1"]
    study = subprocess.Popen(
        [*base, *words, "--data", str(data_dir)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert study.stderr is not None
    line = study.stderr.readline()
    run_id = line.split()[1].rstrip(":")
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("mlruns/*/artifacts/policy/policy.pt")):
        assert time.monotonic() < deadline, "no trial was done in time"
        time.sleep(0.05)
    os.killpg(study.pid, signal.SIGKILL)
    study.communicate()
    killed = read_study(run_id, uri_of(tmp_path))
    assert killed.search is not None
    assert 0 < len(killed.search.asked) < 3
    done = subprocess.run(
        [*base, "--resume", run_id], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["done"] == 3
    resumed = read_study(run_id, uri_of(tmp_path))
    assert resumed.search == read_study(whole_id, uri).search
    assert [(s["setting"], s["mean"]) for s in found["settings"]] == [
        (s.setting, s.mean) for s in whole.settings
    ]
