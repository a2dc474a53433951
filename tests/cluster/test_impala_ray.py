"""IMPALA's actors on a real Ray cluster of two nodes, one of which is killed in the middle."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynamiccl.errors import MachineError
from tests.cluster.slurm import wait_until
from tests.train.test_online import SWEEP

pytestmark = pytest.mark.cluster

PLACE = "b300-nvlink:decode:busy-host"
FEW = ["jobs=2", "num_steps=4", "episode_rounds=8", "hidden_sizes=8", "state_units=4"]


#: A node that falls silent is given up after some seconds, not after half a minute.
SOON = dict.fromkeys(
    ("health_check_initial_delay_ms", "health_check_period_ms", "health_check_timeout_ms"), 1000
)


@pytest.mark.soak
def test_a_dead_node_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="no Ray (extra 'ray')")
    from dynamiccl.collect.simulated import simulate

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    simulate(SWEEP, tmp_path / "data")
    # Real nodes, each of its own processes and one processor.
    room = {"num_cpus": 1, "object_store_memory": 80 << 20}
    head = {**room, "_system_config": SOON, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(**room)
    # One actor on each node, and epochs that show where the run is.
    settings = [*FEW, f"places={PLACE}", "actors=2", "steps=400", "steps_per_epoch=20"]
    words = ["--data", str(tmp_path / "data"), "--recipe", "impala-lstm", "--ray", cluster.address]
    words += [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-P", "-m", "dynamiccl.train.cli", "fit", "--json", *words]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def has_begun() -> bool:
        return bool(list(tmp_path.rglob("state.pt"))) or run.poll() is not None

    try:
        wait_until(has_begun, "the first epoch", 180)
        assert run.poll() is None, run.communicate()
        cluster.remove_node(other, allow_graceful=False)
        out, err = run.communicate(timeout=400)
    finally:
        run.kill()
        cluster.shutdown()
    assert run.returncode == 0, err
    found = json.loads(out)
    assert found["steps"] == 400
    assert (Path(found["run_directory"]) / "policy" / "policy.pt").is_file()


def test_what_is_no_head_says_so() -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra 'ray')")
    from dynamiccl.train.online.impala import check_cluster

    with pytest.raises(MachineError, match=r"at 'nowhere': .*Invalid address.*; give HOST:PORT as"):
        check_cluster("nowhere")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = listener.getsockname()[1]  # takes connections, and never answers
        with pytest.raises(MachineError, match="no end after 2 s; is that a head's port"):
            check_cluster(f"127.0.0.1:{silent}", join_s=2.0)


def test_without_ray_the_message_names_the_extra(data_dir: Path, tmp_path: Path) -> None:
    settings = [word for each in [*FEW, f"places={PLACE}"] for word in ("--set", each)]
    words = ["--data", str(data_dir), "--recipe", "impala-lstm", *settings, "--ray", "auto"]
    code = "import sys; sys.modules['ray'] = None; from dynamiccl.train.cli import main; main()"
    command = [sys.executable, "-P", "-c", code, "fit", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "pip install '.[ray]'" in done.stderr
