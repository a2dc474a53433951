"""A policy is named by run id, registered version or directory, to every command alike."""

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from dynamiccl.train import tracking
from tests.cli.conftest import MODULES, Shell, refused
from tests.conftest import Trained


@pytest.mark.parametrize("command", MODULES)
def test_every_command_says_its_release(command: str, shell: Shell) -> None:
    done = shell(command, "--version")
    assert (done.code, done.out, done.err) == (0, f"{version('dynamiccl')}\n", "")
    assert "--version" in shell(command, "--help").out


@pytest.fixture(name="uri")
def uri_fixture(trained: Trained, tmp_path: Path) -> str:
    """A copy of the run's store, since a champion is named in it."""
    shutil.copy(trained.tracking_uri.removeprefix("sqlite:///"), tmp_path / "store.db")
    uri = f"sqlite:///{tmp_path / 'store.db'}"
    tracking.register(uri, trained.run_id, tracking.CHAMPION)
    return uri


def test_export_takes_every_name_of_a_policy(trained: Trained, uri: str, shell: Shell) -> None:
    names = (trained.run_id, "models:/dynamiccl@champion", trained.policy, trained.run_directory)
    found = [
        shell("dynamiccl-deploy", "export", name, "--out", f"out-{i}", "--tracking-uri", uri)
        for i, name in enumerate(names)
    ]
    assert [done.code for done in found] == [0] * len(names)
    hashes = {Path(f"out-{i}/policy.pt").read_bytes() for i in range(len(names))}
    assert hashes == {(trained.policy / "policy.pt").read_bytes()}


@pytest.mark.parametrize(
    "arguments",
    [
        ("dynamiccl-deploy", "export", "badc0de", "--out", "out"),
        ("dynamiccl-deploy", "export", "models:/dynamiccl@nobody", "--out", "out"),
        ("dynamiccl-evaluate", "gate", "--policy", "badc0de", "--data", "DATA", "--out", "out"),
        ("dynamiccl-evaluate", "report", "--policy", "badc0de", "--data", "DATA", "--out", "out"),
        ("dynamiccl-evaluate", "simulate", "--policy", "badc0de", "--out", "out"),
        ("dynamiccl-train", "promote", "badc0de"),
    ],
    ids=lambda arguments: f"{arguments[1]}-{arguments[2]}",
)
def test_a_name_that_is_nothing_is_repeated_in_the_error(
    arguments: tuple[str, ...], trained: Trained, uri: str, shell: Shell
) -> None:
    words = [str(trained.data) if word == "DATA" else word for word in arguments]
    line = refused(shell(*words, "--tracking-uri", uri), 2)
    assert "badc0de" in line or "nobody" in line
    without = refused(shell(*words), 2)
    assert "no MLflow store at mlflow.db" in without or "badc0de" in without
    assert not Path("mlflow.db").exists()  # a look for a run leaves nothing behind
