"""IMPALA's actors on a real Ray cluster of two nodes, one of which is killed in the middle."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.ray_nodes import RayNodes
from tests.cluster.slurm import wait_until
from tests.train.online.conftest import SWEEP

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

PLACE = "b300-nvlink:decode:busy-host"
FEW = ["jobs=2", "num_steps=4", "episode_rounds=8", "hidden_sizes=8", "state_units=4"]


def test_a_node_that_dies_costs_its_trajectories_and_not_the_run(
    running_nodes: RayNodes, tmp_path: Path
) -> None:
    from dynamiccl.collect.simulated import simulate

    simulate(SWEEP, tmp_path / "data")
    command = [sys.executable, "-P", "-m", "dynamiccl.train.cli", "fit", "--json"]
    # One actor on each node, and epochs that show where the run is.
    settings = [*FEW, f"places={PLACE}", "actors=2", "steps=400", "steps_per_epoch=20"]
    words = [
        "--data",
        str(tmp_path / "data"),
        "--recipe",
        "impala-lstm",
        "--ray",
        running_nodes.address,
    ]
    words += [word for setting in settings for word in ("--set", setting)]
    run = subprocess.Popen(
        running_nodes.wrap([*command, *words]),
        env=running_nodes.environ(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def has_begun() -> bool:
        return bool(list(tmp_path.rglob("state.pt"))) or run.poll() is not None

    wait_until(has_begun, "the first epoch", 180)
    assert run.poll() is None, run.communicate()
    running_nodes.kill_node("r2")
    out, err = run.communicate(timeout=400)
    assert run.returncode == 0, err
    found = json.loads(out)
    assert found["steps"] == 400
    assert (Path(found["run_directory"]) / "policy" / "policy.pt").is_file()
