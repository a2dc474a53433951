"""Studies: trials of one run, workers that fail or are killed; and Ctrl-C in long commands."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from optuna.trial import TrialState
from rich.console import Console

from dynamiccl import cli
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.errors import MissingPath
from dynamiccl.evaluate import report
from dynamiccl.train import options
from dynamiccl.train import study as studies
from dynamiccl.train.cli import _study_table
from dynamiccl.train.options import WIDTH, folding_table
from dynamiccl.train.study import latest_trials, open_study
from dynamiccl.train.tracking import CANDIDATE, MODEL_NAME, policy_directory
from tests.cli.in_process import run
from tests.conftest import Trained
from tests.stores import new_store, uri_of

ROOT = Path(__file__).parents[2]
FEW = ["steps=20", "steps_per_epoch=10", "hidden_sizes=8", "num_members=1"]
SPACE = ["learning_rate=1e-4:1e-1:log", "batch_size=16:64", "hidden_sizes=8,16+16"]


def planned(
    data: Path, axes: Sequence[str] = (), recipes: Sequence[str] = ("ddqn-dueling",), **more: Any
) -> studies.Plan:
    given: dict[str, Any] = {"experiment": "x", "settings": FEW, "seeds": 1, **more}
    return studies.checked(studies.Plan(data=str(data), recipes=recipes, axes=axes, **given))


def children(study: optuna.Study, client: MlflowClient) -> list[Run]:
    experiment = client.get_run(study.study_name).info.experiment_id
    runs = client.search_runs([experiment])
    return [run for run in runs if run.data.tags.get("mlflow.parentRunId") == study.study_name]


def test_a_grid_is_every_recipe_with_every_combination_and_seed(tmp_path: Path) -> None:
    recipes, grid = ["ddqn-dueling", "bc"], ["learning_rate=0.1,0.2", "hidden_sizes=8,16+16"]
    plan = planned(Path("data"), grid, recipes, seeds=3)
    study = studies.begin_study(plan, new_store(tmp_path))
    chosen = [trial.system_attrs["fixed_params"] for trial in study.trials]
    assert len(chosen) == 2 * 2 * 2 * 3
    assert [trial.user_attrs["seeds"] for trial in study.trials] == [[0], [1], [2]] * 8
    assert len({plan.setting_of(each) for each in chosen}) == 8
    assert plan.setting_of(chosen[-1]) == "bc learning_rate=0.2 hidden_sizes=16+16"
    recipe = plan.recipe_of(chosen[-1])
    assert (recipe.learning_rate, recipe.hidden_sizes, recipe.steps) == (0.2, (16, 16), 20)
    assert Path(plan.data).is_absolute()
    # A search for all settings or more is the grid.
    axes = ["window_encoder=mlp,cnn", "batch_size=16,32"]
    assert [planned(tmp_path, axes, count=count).count for count in (3, 4, 5)] == [3, 0, 0]
    assert planned(tmp_path, [*axes, "steps=1:9"], count=9).count == 9


def test_study_tells_best(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "BEAT_S", 0.01)
    uri = new_store(tmp_path)
    study = studies.begin_study(planned(data_dir, [], ["ddqn-dueling", "bc"], seeds=2), uri)
    run_id, client = study.study_name, MlflowClient(uri)
    working = studies.work(study, uri)
    line, is_failure = next(working)
    assert line.startswith("trial 0 (ddqn-dueling, seed 0): validation regret ")
    assert not is_failure
    first = study.trials[0]  # its worker told that it lives, while it trained
    assert first.system_attrs["heartbeat"] > first.datetime_start.timestamp()  # type: ignore[union-attr]
    half, failures = studies.end_study(study, uri)
    assert (half.done, half.trials, half.settings[0].low, failures) == (1, 4, None, [])
    assert client.get_run(run_id).info.status == "RUNNING"  # workers elsewhere may go on
    assert len(list(working)) == 3
    assert (
        list(studies.work(studies.open_study(run_id, uri), uri)) == []
    )  # done: nothing runs twice
    summary, _ = studies.end_study(study, uri)
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
    assert sorted(run.data.params["seed"] for run in below) == ["0", "0", "1", "1"]
    assert len({run.data.metrics["loss"] for run in below}) == 4  # a seed is another training
    with pytest.raises(MissingPath, match="no study"):
        studies.open_study(below[0].info.run_id, uri)


def test_what_failed_is_tried_again_once_it_is_mended(data_dir: Path, tmp_path: Path) -> None:
    """Somebody's recipe, which fails in the first worker alone."""
    uri, recipe = new_store(tmp_path), tmp_path / "mine.py"
    text = "from dynamiccl.train.recipe import make_recipe\n\ndef recipe():\n    "
    good = f"{text}return make_recipe('ddqn-dueling')\n"
    recipe.write_text(good)
    study = studies.begin_study(planned(data_dir, [], [str(recipe)], seeds=2), uri)
    working = studies.work(study, uri)
    next(working)
    recipe.write_text(f"{text}raise KeyError('gone')\n")
    list(working)
    summary, (failure,) = studies.end_study(study, uri)
    assert (summary.done, summary.trials) == (1, 2)
    assert "mine.py gives no recipe: KeyError: 'gone'" in failure
    assert MlflowClient(uri).get_run(study.study_name).info.status == "FAILED"
    recipe.write_text(good)
    studies.retry_failed(study)
    assert len(list(studies.work(study, uri))) == 1
    summary, failures = studies.summarise_study(study)
    assert (summary.done, summary.trials, failures) == (2, 2, [])


def test_a_search_trains_nothing_twice_and_goes_on(data_dir: Path, tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    axes = ["window_encoder=mlp,nothing,cnn", "gamma=0,0.5,0.9"]
    study = studies.begin_study(planned(data_dir, axes, count=8, seeds=2), uri)
    told = list(studies.work(study, uri))
    summary, failures = studies.summarise_study(study)
    settings = [studies.plan_of(study).setting_of(trial.params) for trial in study.trials]
    chosen = [trial.params["window_encoder"] for trial in study.trials]
    assert (summary.trials, summary.done) == (16, 2 * sum(each != "nothing" for each in chosen))
    trainable = {each for each in settings if "nothing" not in each}
    assert {each.setting for each in summary.settings} == trainable
    assert {each.seeds for each in summary.settings} == {2}
    assert len(failures) == chosen.count("nothing") > 0
    assert all(re.search("=nothing gamma=.*, seed 0", failure) for failure in failures)
    assert set(failures) == {line for line, is_failure in told if is_failure}
    trained = [run for run in children(study, MlflowClient(uri)) if run.info.status == "FINISHED"]
    assert len(trained) == 2 * len(summary.settings) < summary.done


def test_a_worker_that_finds_the_queue_empty_trains_nothing(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another took the last trial in between."""
    uri = new_store(tmp_path)
    study = studies.begin_study(planned(data_dir), uri)
    study.add_trial(optuna.create_trial(state=TrialState.WAITING))
    before = studies.latest_trials(study)
    study._storage.set_trial_state_values(before[0]._trial_id, TrialState.RUNNING)
    with monkeypatch.context() as patched:
        patched.setattr(studies, "latest_trials", lambda _: before)
        with pytest.raises(KeyboardInterrupt):
            list(studies.work(study, uri, iter([False, True]).__next__))
    assert [each.state for each in study.trials] == [TrialState.RUNNING, TrialState.FAIL]
    assert list(studies.latest_trials(study)) == [0]
    assert studies.summarise_study(study)[1] == []


def test_a_swallowed_interrupt_stops_at_the_next_epoch(data_dir: Path, tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    study = studies.begin_study(planned(data_dir), uri)
    asked = iter([False, False])  # before the trial, and after its first epoch
    with pytest.raises(KeyboardInterrupt):
        list(studies.work(study, uri, lambda: next(asked, True)))
    assert studies.latest_trials(study)[0].state is TrialState.WAITING


def test_workers_stop_when_who_started_them_is_killed(data_dir: Path, tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    study = studies.begin_study(planned(data_dir, settings=[*FEW, "steps=100000"]), uri)
    words = ["study", "--resume", study.study_name, "--jobs", "1"]
    parent = subprocess.Popen(
        [sys.executable, "-P", "-m", "dynamiccl.train.cli", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": uri},
    )

    def wait_for(condition: Callable[[], object]) -> None:
        until = time.monotonic() + 600
        while not condition():
            assert parent.poll() in {None, -9}
            assert time.monotonic() < until
            time.sleep(0.01)

    try:
        wait_for(lambda: list(tmp_path.glob("mlruns/*/artifacts/state.pt")))
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: studies.latest_trials(study)[0].state is TrialState.WAITING)
    (run,) = children(study, MlflowClient(uri))
    assert run.info.status == "FAILED"


def test_a_trial_dies_four_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch workers are preempted again and again; a trial that kills its workers must end."""
    uri = new_store(tmp_path)
    study = studies.begin_study(planned(tmp_path), uri)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(studies, "fit", interrupt)
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            list(studies.work(study, uri))
    monkeypatch.setattr(studies, "STALE_S", -1.0)
    states = []
    for _ in range(4):
        trial = studies.latest_trials(study)[0]
        study._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
        studies._fail_stale(study)
        states.append(studies.latest_trials(study)[0].state)
    assert states == [*[TrialState.WAITING] * 3, TrialState.FAIL]
    assert studies.summarise_study(study)[1] == ["trial 0: its workers died again and again"]
    studies.retry_failed(study)
    assert studies.latest_trials(study)[0].state is TrialState.WAITING


def test_a_finished_trial_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = new_store(tmp_path)
    study = studies.begin_study(planned(tmp_path), uri)

    def wake(*_: object, **__: object) -> None:
        studies._end(study, 0, 0.5)  # the other worker
        raise KeyboardInterrupt

    monkeypatch.setattr(studies, "fit", wake)
    with pytest.raises(KeyboardInterrupt):
        list(studies.work(study, uri))
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE]


def test_killed_are_rerun(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search, killed in the middle of its first training: it comes to what it would have."""
    plan = planned(data_dir, SPACE, settings=[*FEW, "steps=40"], count=2)
    (tmp_path / "whole").mkdir()
    whole_uri, uri = new_store(tmp_path / "whole"), new_store(tmp_path)
    whole, study = studies.begin_study(plan, whole_uri), studies.begin_study(plan, uri)
    list(studies.work(whole, whole_uri))
    asked = iter([False, False])

    def die() -> bool:
        """As kill -9 would: after the first epoch, and nothing is told."""
        if next(asked, True):
            raise SystemExit
        return False

    with pytest.raises(SystemExit):
        list(studies.work(study, uri, die))
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING, TrialState.WAITING]
    (begun,) = children(study, MlflowClient(uri))
    monkeypatch.setattr(studies, "STALE_S", -1.0)
    studies._fail_stale(study)
    monkeypatch.undo()
    assert len(list(studies.work(study, uri))) == 2
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]
    assert begun.info.run_id in {run.info.run_id for run in children(study, MlflowClient(uri))}
    found, wanted = studies.summarise_study(study)[0], studies.summarise_study(whole)[0]
    assert (found.done, found.trials) == (2, 2)
    assert [(each.setting, each.mean) for each in found.settings] == [
        (each.setting, each.mean) for each in wanted.settings
    ]
    for trial in studies.latest_trials(study).values():
        recipe = plan.recipe_of(trial.params)
        assert 1e-4 <= recipe.learning_rate <= 1e-1
        assert 16 <= recipe.batch_size <= 64
        assert recipe.hidden_sizes in {(8,), (16, 16)}


# --- Tables in a terminal of 100 columns: nothing is wider, and no name is cut ---


def test_a_studys_table_cuts_no_run_id(capsys: pytest.CaptureFixture[str]) -> None:
    run_id = "0123456789abcdef" * 2
    setting = "ddqn-dueling learning_rate=0.0003 hidden_sizes=64+64 batch_size=256"
    each = studies.SettingSummary(setting, 2, 0.0957, -0.3572, 0.5485, run_id, 12345.0)
    summary = studies.StudySummary(run_id, "data", 2, 2, 0.1, [each])
    Console(width=WIDTH).print(_study_table(summary))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any(run_id in line for line in lines)
    assert "0.00% .. 54.85%" in "\n".join(lines)


@pytest.mark.parametrize("width", [80, 100])
def test_no_word_is_broken_that_fits(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    heads = ("collective", "group", "nodes x ranks", "calls", "of step", "NCCL ran", "better")
    row = ("AllReduce", "0:default_pg", "1 x 2", "6", "2.7%", "NVLSTree/Simple/12ch", "NCCL's own")
    table = folding_table(*heads)
    table.add_row(*row)
    Console(width=width).print(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert words >= {word for cell in (*heads, *row) for word in cell.split()}


def last_line(code: object, said: str) -> str:
    assert code == 130, said[-900:]
    assert "Traceback" not in said
    return said.rstrip("\n").rpartition("\n")[2]


def interrupted(line: str, folder: Path, kept: str) -> str:
    """The last line of a command in `folder` that gets SIGINT once a file `kept` is there."""
    new_store(folder)

    def interrupt() -> None:
        deadline = time.monotonic() + 300
        while not any(folder.rglob(kept)) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    watching = threading.Thread(target=interrupt)
    with contextlib.chdir(folder):
        watching.start()
        ended = run(line)
    watching.join()
    return last_line(*ended)


def test_fit_names_its_run_and_goes_on(data_dir: Path, tmp_path: Path) -> None:
    settings = ["steps=80", "steps_per_epoch=10", "hidden_sizes=8", "num_members=1"]
    words = " ".join(f"--set {each}" for each in settings)
    said = interrupted(f"dynamiccl-train fit --data {data_dir} {words}", tmp_path, "state.pt")
    found = re.fullmatch(r"interrupted: run (\w+) is kept; go on with: (dynamiccl-\w+ .*)", said)
    assert found is not None, said
    assert shlex.split(found[2])[-1] == found[1]
    with contextlib.chdir(tmp_path):
        code, said = run(found[2])
    assert code == 0, said
    assert found[1] in said


def test_study_is_named(data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = f"dynamiccl-train study --data {data_dir} --jobs 1 --seeds 2"
    said = interrupted(line, tmp_path, "state.pt")
    assert re.fullmatch(
        r"interrupted: study (\w+) keeps what is done; go on with: "
        r"env MLFLOW_TRACKING_URI=sqlite:///.*mlflow.db dynamiccl-train study --resume \1",
        said,
    )
    assert "interrupted" not in capfd.readouterr().err  # by its worker, too
    study = open_study(said.split()[2], uri_of(tmp_path))
    states = {trial.state for trial in latest_trials(study).values()}
    assert states == {TrialState.WAITING}  # what was in its middle, too


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise KeyError('gone')", "KeyError: 'gone'"),
        ("os.kill(os.getpid(), 9)", "a worker ended with -9"),
    ],
)
def test_what_went_wrong_in_a_worker_is_told_once(
    body: str, told: str, data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "import os, sys\nfrom dynamiccl.train.recipe import make_recipe\n\ndef recipe():\n"
        f"    if '--join' in sys.argv:\n        {body}\n    return make_recipe('bc')\n"
    )
    line = f"dynamiccl-train study --data {data_dir} --recipe {recipe} --seeds 1 --jobs 1"
    new_store(tmp_path)
    with contextlib.chdir(tmp_path):
        code, said = run(line)
    assert code == 3
    assert (said + capfd.readouterr().err).count(told) == 1


def test_report_is_lost(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "make_policies", lambda *_: signal.raise_signal(signal.SIGINT))
    line = f"report --data {trained.data} --policy {trained.policy} --out {tmp_path / 'out'}"
    said = last_line(*run(f"dynamiccl-evaluate {line}"))
    assert said.startswith("interrupted: a report is written at the end")


def test_slow_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with cli.working("fast"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cli, "FIRST_LINE_S", 0.01)
    said = ""
    with cli.working("fitting"):
        until = time.monotonic() + 60
        while not said and time.monotonic() < until:
            time.sleep(0.01)
            said = capsys.readouterr().err
    assert said == "fitting: 0 s\n"


def test_bar_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with options.open_bar() as bar:
        task = bar.add_task("quiet", total=10)
        bar.advance(task)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(options, "EVERY_S", 0.0)
    with options.progress_bar("ddqn-dueling") as show:
        show(200, 4000, {"validation_regret": 0.0123})
    assert capsys.readouterr().err == "ddqn-dueling: 200 of 4,000, validation regret 1.23%\n"
