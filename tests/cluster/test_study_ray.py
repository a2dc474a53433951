"""Studies on a real Ray cluster of two nodes: both work, one is killed, none is there."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from dynamiccl.errors import MachineError
from tests.cluster.ray_nodes import RayNodes
from tests.cluster.slurm import wait_until
from tests.train.runs import without_package

pytestmark = pytest.mark.cluster

COMMAND = [sys.executable, "-P", "-m", "dynamiccl.train.cli", "study", "--json"]
FEW = ["steps_per_epoch=20", "hidden_sizes=8", "num_members=1"]


@dataclass
class Studies:
    """Studies on the cluster, in a folder and a store of their own."""

    nodes: RayNodes
    folder: Path
    data: Path

    def start(self, seeds: int, steps: int) -> subprocess.Popen[str]:
        settings = [word for s in [*FEW, f"steps={steps}"] for word in ("--set", s)]
        words = ["--data", str(self.data), "--recipe", "ddqn-dueling", *settings]
        words += ["--seeds", str(seeds)]
        return subprocess.Popen(
            self.nodes.wrap([*COMMAND, *words, "--ray", self.nodes.address]),
            env=self.nodes.environ(),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def children(self) -> list[Run]:
        client = MlflowClient(f"sqlite:///{self.folder / 'mlflow.db'}")
        runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
        return [run for run in runs if "mlflow.parentRunId" in run.data.tags]

    def in_the_middle_on(self, node: str) -> str | None:
        """The run of a trial that has made an epoch on a node, and is not over."""
        # Not before the first run's folder is there: two that make the store disturb each other.
        if not list(self.folder.glob("mlruns/*/artifacts/state.pt")):
            return None
        for run in self.children():
            state = Path(urlparse(run.info.artifact_uri).path, "state.pt")
            if run.data.tags.get("host") == node and state.exists():
                return str(run.info.run_id)
        return None


@pytest.fixture
def studies(running_nodes: RayNodes, tmp_path: Path, data_dir: Path) -> Studies:
    return Studies(running_nodes, tmp_path, data_dir)


def ended(process: subprocess.Popen[str]) -> tuple[int, Any, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, json.loads(out) if out else None, err


@pytest.mark.soak
def test_trials_run_on_both_nodes(studies: Studies) -> None:
    code, found, said = ended(studies.start(seeds=2, steps=20))
    assert code == 0, said
    assert (found["done"], found["settings"][0]["seeds"]) == (2, 2)
    assert {run.data.tags["host"] for run in studies.children()} == {"r1", "r2"}


@pytest.mark.soak
def test_a_trial_goes_on_elsewhere_when_its_node_is_killed(studies: Studies) -> None:
    study = studies.start(seeds=2, steps=3000)
    begun: list[str | None] = []

    def is_in_the_middle() -> bool:
        begun.append(studies.in_the_middle_on("r2"))
        return begun[-1] is not None or study.poll() is not None

    wait_until(is_in_the_middle, "a trial in its middle on r2", 120)
    studies.nodes.kill_node("r2")
    code, found, said = ended(study)
    assert code == 0, said
    assert found["done"] == 2
    hosts = {run.info.run_id: run.data.tags["host"] for run in studies.children()}
    assert len(hosts) == 2  # it went on, and did not begin anew
    assert begun[-1] in hosts
    assert set(hosts.values()) == {"r1"}
    studies.nodes.start_node("r2")


def test_who_takes_connections_and_never_answers_is_no_head() -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra 'ray')")
    from dynamiccl.train.ray_join import RayJoin

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(MachineError, match="no end after 2 s; is that a head's port"):
            RayJoin(address, join_s=2.0)


@pytest.mark.soak
def test_a_port_that_is_no_heads_is_told_in_time(studies: Studies) -> None:
    """A listener that never answers would keep Ray itself waiting for minutes."""
    listen = "import socket, time; s = socket.create_server(('127.0.0.1', 7)); time.sleep(600)"
    listener = subprocess.Popen(
        studies.nodes.wrap([sys.executable, "-c", listen]), env=studies.nodes.environ()
    )
    try:
        wanted = ["--data", str(studies.data), "--ray", "127.0.0.1:7"]
        done = subprocess.run(
            studies.nodes.wrap([*COMMAND, *wanted]),
            env=studies.nodes.environ(),
            cwd=studies.folder,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
    finally:
        listener.kill()
        listener.wait()
    assert done.returncode == 4, done.stderr
    assert "cannot join the Ray cluster at '127.0.0.1:7': no end after 30 s" in done.stderr
    assert not (studies.folder / "mlflow.db").exists()  # no study was begun


def test_what_is_no_address_or_does_not_answer_says_so(data_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # free again, once this is closed
    for address, code, words in [
        ("nowhere", 2, "is no address of a head; write HOST:PORT"),
        (f"ray://127.0.0.1:{port}", 2, "is no address of a head; write HOST:PORT"),
        (f"127.0.0.1:{port}", 4, f"no Ray cluster answers at 127.0.0.1:{port}: "),
    ]:
        done = subprocess.run(
            [*COMMAND, "--data", str(data_dir), "--ray", address],
            env=os.environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert words in done.stderr


def test_without_ray_the_message_names_the_extra(data_dir: Path, tmp_path: Path) -> None:
    words = ["study", "--data", str(data_dir), "--ray", "10.79.0.1:6379"]
    done = without_package("ray", tmp_path, *words)
    assert done.returncode == 4, done.stderr
    assert "pip install '.[ray]'" in done.stderr
