"""Workers of a study as a real Slurm array: two elements, of which one is cancelled."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.cluster.slurm import Slurm, wait_until
from tests.stores import new_store

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

#: A trial takes some seconds, so that something can happen to it.
SETTINGS = ["steps=1200", "steps_per_epoch=20", "hidden_sizes=8", "num_members=1"]


def test_a_cancelled_elements_trial_is_run(slurm: Slurm, data_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my studies, 100%"
    folder.mkdir()
    client = MlflowClient(new_store(folder))

    def study(*words: str) -> Any:
        command = [sys.executable, "-P", "-m", "dynamiccl.train.cli", "study", "--json", *words]
        return json.loads(subprocess.check_output(command, cwd=folder, timeout=200))

    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    begun = study("--data", str(data_dir), *settings, "--seeds", "3", "--jobs", "0")
    assert begun["trials"] == 3
    env, store, _, *words = shlex.split(begun["join"])
    join = shlex.join([env, store, sys.executable, "-P", "-m", "dynamiccl.train.cli", *words])
    options = ["--parsable", "--array=1-2", "--nodes=1", "--exclusive", "--wrap", join]
    environment = {"PYTHONPATH": str(Path.cwd())}
    where = f"--output={tmp_path}/%a.out"
    job = slurm.run(["sbatch", *options, where], environment).stdout.strip()

    def has_state() -> bool:
        return len(list(folder.glob("mlruns/*/artifacts/state.pt"))) == 2

    wait_until(has_state, "two trials in their middle", seconds=120)
    slurm.run(["scancel", "--full", "--signal=TERM", f"{job}_1"])
    wait_until(lambda: slurm.state(job).split().count("RUNNING") == 1, "one element ends", 60)
    wait_until(lambda: "RUNNING" not in slurm.state(job), "the other ends", 120)
    found = study("--resume", begun["run_id"])
    assert (found["done"], found["trials"]) == (3, 3)
    experiment = client.get_run(begun["run_id"]).info.experiment_id
    runs = client.search_runs([experiment])
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert len(children) == 3  # the cancelled one went on, and did not begin anew
    hosts = {run.data.tags["host"] for run in children}
    assert hosts <= set(slurm.nodes)
