"""Studies as arrays on a real Slurm: trials that are cancelled, followers that leave, scripts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.cluster.slurm import Slurm, wait_until

pytestmark = pytest.mark.cluster

#: A trial takes some seconds, so that something can happen to it.
SETTINGS = ["steps=1200", "steps_per_epoch=20", "hidden_sizes=8", "num_members=1"]


@dataclass
class Studies:
    """Studies of four trials on the cluster, in a folder and a store of their own."""

    slurm: Slurm
    folder: Path

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder / 'mlflow.db'}"

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.uri)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The command, in its folder; the default store is there."""
        path = f"{self.slurm.clients}:{os.environ['PATH']}"
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dynamiccl.train.cli", "study", "--json", *words],
            env={**os.environ, "PATH": path},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, Any, str]:
        """Exit code, document and what it said besides."""
        return ended(self.start(*words))

    def parent(self) -> Run:
        (experiment,) = [e for e in self.client.search_experiments() if e.name == "dynamiccl"]
        runs = self.client.search_runs([experiment.experiment_id])
        (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
        return parent

    def children(self) -> dict[str, Run]:
        """By number of the trial; every trial has one run."""
        runs = self.client.search_runs([self.parent().info.experiment_id])
        found = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
        by_number = {run.data.tags["dynamiccl.trial"]: run for run in found}
        assert len(by_number) == len(found)
        return by_number

    def has_begun(self, number: str) -> bool:
        # Not before the script is there: two that make the store at once disturb each other.
        if not list(self.folder.glob("dynamiccl-slurm/*/trials.sbatch")) or not self.job():
            return False
        return number in self.children()

    def has_state(self, number: str) -> bool:
        """Whether a trial is in its middle."""
        return (
            self.has_begun(number)
            and Path(artifacts_of(self.children()[number]), "state.pt").exists()
        )

    def job(self) -> str:
        return str(self.parent().data.tags.get("slurm_job", ""))

    def script(self) -> str:
        (path,) = self.folder.glob("dynamiccl-slurm/*/trials.sbatch")
        return path.read_text(encoding="utf-8")


def artifacts_of(run: Run) -> str:
    return unquote(urlparse(run.info.artifact_uri).path)


def ended(process: subprocess.Popen[str]) -> tuple[int, Any, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, json.loads(out) if out else None, err


def wait_long(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, what, seconds=90)


@pytest.fixture
def studies(slurm: Slurm, tmp_path: Path) -> Studies:
    folder = tmp_path / "my studies, 100%"
    folder.mkdir()
    return Studies(slurm, folder)


@pytest.fixture
def options(data_dir: Path) -> list[str]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return [
        "--data",
        str(data_dir),
        "--recipe",
        "ddqn-dueling",
        "--recipe",
        "bc",
        *settings,
        "--seeds",
        "2",
    ]


@pytest.mark.soak
def test_a_trial_that_is_cancelled_fails_alone_and_goes_on_when_resumed(
    studies: Studies, options: list[str]
) -> None:
    study = studies.start(*options, "--slurm", "--jobs", "2", "--sbatch-option=--mem=400")
    wait_long(lambda: studies.has_state("1") or study.poll() is not None, "trial 1 in its middle")
    assert "--array=0-3%2\n" in studies.script()
    assert "--mem=400\n" in studies.script()
    first = studies.job()
    studies.slurm.run(["scancel", f"{first}_1"])
    code, found, said = ended(study)
    assert code == 3, said
    assert "trial 1 (ddqn-dueling, seed 1): " in said
    assert f"(job {first}_1 CANCELLED" in said
    assert (found["done"], found["trials"]) == (3, 4)
    assert studies.parent().info.status == "FAILED"
    begun = studies.children()["1"].info.run_id
    code, found, said = studies.run("--resume", found["run_id"], "--slurm")
    assert code == 0, said
    assert "1 of 4 trials to run" in said
    assert (found["done"], studies.parent().info.status) == (4, "FINISHED")
    assert "--array=1\n" in studies.script()
    assert studies.job() != first
    children = studies.children()
    assert children["1"].info.run_id == begun  # it went on, and did not begin anew
    hosts = {run.data.tags["host"] for run in children.values()}
    assert not studies.slurm.namespaces or hosts <= set(studies.slurm.nodes)


@pytest.mark.soak
def test_an_array_that_was_left_alone_is_followed_again(
    studies: Studies, options: list[str]
) -> None:
    study = studies.start(*options, "--slurm", "--jobs", "1")
    wait_long(lambda: studies.has_begun("0"), "trial 0 of four, one after the other")
    study.send_signal(signal.SIGINT)
    code, _, said = ended(study)
    job = studies.job()
    assert code == 130, said
    assert f"leaving job {job} to itself" in said
    run_id = studies.parent().info.run_id
    code, found, said = studies.run("--resume", run_id, "--slurm")
    assert code == 0, said
    assert f"job {job} of an earlier call is still there" in said
    assert (found["done"], studies.job()) == (4, job)  # nothing was submitted twice


@pytest.mark.soak
def test_a_script_can_be_submitted_by_hand_and_summed_up_later(
    studies: Studies, data_dir: Path
) -> None:
    settings = [word for s in (*SETTINGS, "steps=20") for word in ("--set", s)]
    options = ["--data", str(data_dir), "--recipe", "ddqn-dueling", *settings, "--seeds", "2"]
    code, found, said = studies.run(*options, "--slurm", "--script-only")
    assert code == 0, said
    assert (found["trials"], studies.job()) == ([0, 1], "")
    studies.slurm.run(["sbatch", "--wait", found["script"]], timeout_s=200)
    code, found, said = studies.run("--resume", found["run_id"])
    assert code == 0, said
    assert "0 of 2 trials to run" in said
    assert (found["done"], len(found["settings"])) == (2, 1)


@pytest.mark.soak
def test_a_search_submits_an_array_for_each_round(studies: Studies, data_dir: Path) -> None:
    words = [
        "--data",
        str(data_dir),
        "--recipe",
        "ddqn-dueling",
        "--set",
        "steps=20",
        "--seeds",
        "2",
    ]
    words += ["--set", "steps_per_epoch=10", "--set", "num_members=1"]
    search = ["--optuna", "2", "--space", "learning_rate=1e-4:1e-2:log", "--jobs", "2"]
    code, found, said = studies.run(*words, *search, "--slurm")
    assert code == 0, said
    assert (found["done"], len(found["settings"])) == (4, 2)
    assert len([line for line in said.splitlines() if " submitted (" in line]) == 2
    assert "--array=2-3%2\n" in studies.script()


@pytest.mark.soak
def test_what_sbatch_refuses_is_told(studies: Studies, options: list[str]) -> None:
    code, _, said = studies.run(*options, "--slurm", "--sbatch-option=--partition=none")
    assert code == 4
    assert "invalid partition" in said
    assert "correct what --sbatch-option gives, then go on with --resume" in said
