"""Starts the ranks of a job on one GPU with the real NCCL that torch bundles, and our libraries.

Each rank has an NCCL_HOSTID of its own, so NCCL takes each for a node and connects them through
sockets on the loopback: good for seeing what runs, not for timing.
"""

import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.doctor import Machine
from dynamiccl.nccl import Config
from dynamiccl.serve.artifact import PluginIndex
from dynamiccl.serve.table import MAX_BINS, DecisionTable
from dynamiccl.serve.this_machine import own_fingerprint
from tests.cluster.slurm import free_ports
from tests.gpu.nccl_job import Records, records_by_rank
from tests.gpu.one_gpu import SOCKETS_ONLY, plain_environment, python_path
from tests.serve.abi import prepared_environment, write_bare_artifact

SYSTEM: Final = "one-gpu"
LIMIT_S: Final = 180
_WORKER: Final = Path(__file__).with_name("nccl_worker.py")


@dataclass(frozen=True)
class Job:
    """What is left of a job."""

    logs: list[str]
    records: dict[int, Records]


def skip_without_nccl(least: tuple[int, int]) -> None:
    """Skip where torch brings no CUDA, no device, or an older NCCL."""
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing was checked")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or no CUDA build of torch: nothing was checked")
    if torch.cuda.nccl.version() < least:
        wanted = ".".join(map(str, least))
        pytest.skip(f"NCCL {torch.cuda.nccl.version()} is older than {wanted}: nothing was checked")


def uniform(config: Config, ranks: int) -> DecisionTable:
    """One config for every call of a job in which each rank is a node."""
    return DecisionTable.from_configs([[config] * MAX_BINS] * 5, num_nodes=ranks, num_ranks=ranks)


def write_bound_artifact(artifact: Path, plugin: Path, config: Config, ranks: int) -> None:
    """An artifact of one table, which knows this machine."""
    write_bare_artifact(artifact, SYSTEM, uniform(config, ranks))
    fingerprint = own_fingerprint(Machine(), plugin)
    PluginIndex.read(artifact).bound(SYSTEM, fingerprint).write(artifact)


def run_job(
    root: Path, ranks: int, environment: Mapping[str, str], meanwhile: Callable[[], None]
) -> Job:
    """Run all-reduces on every rank under `root` until `meanwhile` returns."""
    logs = run_ranks(root, ranks, environment, meanwhile, _WORKER)
    return Job(logs, records_by_rank(root / "calls"))


def run_ranks(
    root: Path,
    ranks: int,
    environment: Mapping[str, str],
    meanwhile: Callable[[], None],
    worker: Path,
) -> list[str]:
    """Run a program on every rank under `root`, and what it is to do meanwhile; NCCL's logs."""
    calls = root / "calls"
    calls.mkdir(mode=0o700)
    common = {
        **plain_environment(),
        **SOCKETS_ONLY,
        "PYTHONPATH": python_path(),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING",
        **prepared_environment(root / "artifact", SYSTEM, nccl_code()),
        "DYNAMICCL_JOB": secrets.token_hex(8),
        # Each rank is a node to NCCL, and all are on this host.
        "DYNAMICCL_WORD": "all",
        "DYNAMICCL_KILL_FILE": str(root / "artifact" / "kill"),
        "DYNAMICCL_SAMPLE_PERCENT": "100",
        "DYNAMICCL_CALLS_DIR": str(calls),
        "STOP_FILE": str(root / "stop"),
        **environment,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker)],
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
        meanwhile()
        (root / "stop").touch()
        codes = [process.wait(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    assert codes == [0] * ranks, f"exit codes {codes} (3: a sum was wrong); logs in {root}"
    return [(root / f"rank{rank}.log").read_text(errors="replace") for rank in range(ranks)]


def nccl_code() -> int:
    """What torch's NCCL says that it is: 22809 for 2.28.9."""
    torch = pytest.importorskip("torch")
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(10_000 * major + 100 * minor + patch)
