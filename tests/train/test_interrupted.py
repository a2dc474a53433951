"""Ctrl-C in long commands: exit code 130, one line, and what it says works."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamiccl import cli
from dynamiccl.train.commands import options
from tests.conftest import Trained
from tests.stores import new_store

ROOT = Path(__file__).parents[2]


def interrupted(command: list[str], ready: str, folder: Path) -> str:
    """Start a command, send SIGINT once it wrote a file like `ready`; its last line on stderr."""
    if not (folder / "mlflow.db").exists():
        new_store(folder)
    before = time.time()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not any(path.stat().st_mtime > before for path in folder.rglob(ready)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130, error[-900:]
    assert "Traceback" not in error
    return error.rstrip("\n").rpartition("\n")[2]


def test_fit_names_its_run_and_goes_on(data_dir: Path, tmp_path: Path) -> None:
    fit = ["dynamiccl.train.cli", "fit", "--data", str(data_dir)]
    settings = ["--set", "steps=4000", "--set", "steps_per_epoch=20", "--set", "hidden_sizes=8"]
    said = interrupted([*fit, *settings], "state.pt", tmp_path)
    found = re.fullmatch(r"interrupted: run (\w+) is kept; go on with: dynamiccl-(\w+) (.*)", said)
    assert found is not None, said
    words = shlex.split(found[3])
    assert words[-1] == found[1]
    begin = ["dynamiccl.train.cli", *words]
    again = interrupted(begin, "state.pt", tmp_path)
    assert found[1] in again


def test_study_names_itself(data_dir: Path, tmp_path: Path) -> None:
    study = ["dynamiccl.train.cli", "study", "--data", str(data_dir), "--jobs", "1"]
    said = interrupted([*study, "--seeds", "2"], "begun.json", tmp_path)
    assert re.fullmatch(
        r"interrupted: study (\w+) keeps what is done; go on with: dynamiccl-train study --resume "
        r"\1 --tracking-uri sqlite:///.*mlflow.db",
        said,
    )


def test_report_says_that_nothing_is_kept(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    command = ["dynamiccl.evaluate.cli", "report", "--data", str(trained.data), "--out", "out"]
    code = (
        "import sys, os, signal; from dynamiccl.evaluate import cli, report;"
        "report.make_policies = lambda *a: os.kill(os.getpid(), signal.SIGINT);"
        f"sys.argv = {[*command, '--policy', str(trained.policy)]!r}; cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130
    # A busy machine may say before that it loads PyTorch.
    assert "\ninterrupted: a report is written at the end" in f"\n{done.stderr}"


def test_what_takes_long_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with options.open_bar() as bar:
        task = bar.add_task("quiet", total=10)
        bar.advance(task)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(options, "EVERY_S", 0.0)
    with options.progress_bar("ddqn-dueling") as show:
        show(200, 4000, {"validation_regret": 0.0123})
    assert capsys.readouterr().err == "ddqn-dueling: 200 of 4,000, validation regret 1.23%\n"
