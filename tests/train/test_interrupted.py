"""Ctrl-C in long commands: exit code 130, one line, and what it says works."""

import contextlib
import os
import re
import shlex
import signal
import threading
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

from dynamiccl import cli
from dynamiccl.evaluate import report
from dynamiccl.train import options
from dynamiccl.train.study import latest_trials, open_study
from tests.cli.in_process import run
from tests.conftest import Trained
from tests.stores import new_store, uri_of

ROOT = Path(__file__).parents[2]


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
