"""The plugin inside real NCCL, the one that torch brings: 2 and 3 ranks on one GPU.

    pytest -m gpu tests/gpu/test_plugin_nccl.py

It needs a GPU, a CUDA build of torch with NCCL 2.27 or later (the profiler tells what ran) and a
compiler; it takes two minutes. Each rank has an NCCL_HOSTID of its own, so NCCL takes each for a
node and connects them through sockets on the loopback: good for seeing what runs, not for timing.

One adaptive job, driven from outside: the artifact's table is agreed on, a brain in this process
then answers with another, and a kill file at last restores NCCL's own choice.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.machine import ThisMachine
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.serve.brain.server import BrainServer
from dynamiccl.serve.loopback import write_bare_artifact
from dynamiccl.serve.plugin_index import PluginIndex
from dynamiccl.serve.table import MAX_BINS, DecisionTable
from dynamiccl.serve.this_machine import own_fingerprint
from tests.gpu.nccl_job import (
    Records,
    all_alike,
    choices_of,
    is_loaded,
    misread,
    records_by_rank,
    table_changes,
)

pytestmark = pytest.mark.gpu

SYSTEM: Final = "one-gpu"
FIRST: Final = Config(Algorithm.Ring, Protocol.Simple, 2)
SECOND: Final = Config(Algorithm.Ring, Protocol.LL, 2)
WORKER: Final = Path(__file__).with_name("nccl_worker.py")
ROOT: Final = Path(__file__).resolve().parents[2]
#: For agreeing, then for the brain; a hand-over between processes takes milliseconds on one GPU.
ADAPTING_S: Final = 30
KILLED_S: Final = 15
LIMIT_S: Final = 180


class OtherTable:
    """A brain that wants one table whatever it is told, and says so once."""

    def __init__(self, table: DecisionTable) -> None:
        self._tables = [table]

    def decide(self, config: object, history: object) -> DecisionTable | None:
        del config, history
        return self._tables.pop() if self._tables else None


@dataclass(frozen=True)
class Job:
    """What is left of a job."""

    logs: list[str]
    records: dict[int, Records]


def uniform(config: Config, ranks: int) -> DecisionTable:
    return DecisionTable.from_configs([[config] * MAX_BINS] * 5, num_nodes=ranks, num_ranks=ranks)


def run_job(root: Path, plugin: Path, ranks: int) -> Job:
    artifact, calls, run_dir = root / "artifact", root / "calls", root / "run"
    write_bare_artifact(artifact, SYSTEM, uniform(FIRST, ranks))
    fingerprint = own_fingerprint(ThisMachine(), plugin)
    PluginIndex.read(artifact).bound(SYSTEM, fingerprint).write(artifact)
    for folder in (calls, run_dir):
        folder.mkdir(mode=0o700)
    key = root / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    ports = free_ports(2)
    common = {
        **{name: v for name, v in os.environ.items() if not name.startswith(("NCCL", "DYNAMICCL"))},
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "NCCL_TUNER_PLUGIN": str(plugin),
        "NCCL_PROFILER_PLUGIN": str(plugin),
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING",
        "DYNAMICCL_ARTIFACT": str(artifact),
        "DYNAMICCL_MODE": "adaptive",
        "DYNAMICCL_COORDINATOR": f"127.0.0.1:{ports[1]}",
        "DYNAMICCL_KEY_FILE": str(key),
        "DYNAMICCL_JOB_ID": root.name,
        "DYNAMICCL_RUN_DIR": str(run_dir),
        "DYNAMICCL_BRAIN_SOCKET": str(run_dir / "brain"),
        "DYNAMICCL_ADAPT_INTERVAL_S": "1",
        "DYNAMICCL_SAMPLE_PERCENT": "100",
        "DYNAMICCL_PROBE_CALLS": "0",
        "DYNAMICCL_CALLS_DIR": str(calls),
        "STOP_FILE": str(root / "stop"),
    }
    with BrainServer(run_dir / "brain", lambda: OtherTable(uniform(SECOND, ranks))) as server:
        threading.Thread(target=server.serve, daemon=True).start()
        processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER)],
                env={
                    **common,
                    "RANK": str(rank),
                    "NCCL_HOSTID": f"rank{rank}",
                    "NCCL_DEBUG_FILE": str(root / f"rank{rank}.log"),
                },
            )
            for rank in range(ranks)
        ]
        try:
            time.sleep(ADAPTING_S)
            (artifact / "kill").touch(mode=0o600)
            time.sleep(KILLED_S)
            (root / "stop").touch()
            codes = [process.wait(timeout=LIMIT_S) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
    assert codes == [0] * ranks, f"exit codes {codes} (3: a sum was wrong); logs in {root}"
    logs = [(root / f"rank{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    return Job(logs, records_by_rank(calls))


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture(scope="module", params=[2, 3])
def job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, adaptive_path: Path
) -> Job:
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing was checked")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or no CUDA build of torch: nothing was checked")
    if torch.cuda.nccl.version() < (2, 27):
        pytest.skip(f"NCCL {torch.cuda.nccl.version()} is older than 2.27: nothing was checked")
    return run_job(tmp_path_factory.mktemp("job"), adaptive_path, int(request.param))


def test_nccl_loads_the_plugin(job: Job) -> None:
    assert all(is_loaded(log) for log in job.logs)


def test_every_size_runs_what_its_table_says(job: Job) -> None:
    for records in job.records.values():
        own, first, second = [table for _, table in table_changes(records)][:3]
        assert own == 0
        assert misread(records, {first: FIRST, second: SECOND}) == []
        sizes = set(choices_of(records, 0))
        assert set(choices_of(records, first)) == sizes == set(choices_of(records, second))


def test_ranks_switch_at_the_same_calls(job: Job) -> None:
    changes = [table_changes(records) for records in job.records.values()]
    assert len(changes) == len(job.logs)
    assert len(changes[0]) >= 3
    assert all_alike(changes)


def test_kill_file_restores_the_choice_that_nccl_made_before(job: Job) -> None:
    for records in job.records.values():
        last = int(records["table"][-1])
        assert not records["decided"][records["table"] == last].any()
        assert choices_of(records, last) == choices_of(records, 0)
