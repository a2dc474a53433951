"""Ranks on one GPU under real NCCL, with our libraries: how they are started, and what they left.

Each rank has an NCCL_HOSTID of its own, so NCCL takes each for a node and connects them through
sockets on the loopback: good for seeing what runs, not for timing.
"""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from dynamiccl.datasets import store
from dynamiccl.doctor import Machine
from dynamiccl.nccl import Config
from dynamiccl.serve.artifact import PluginIndex
from dynamiccl.serve.build import own_fingerprint
from tests.serve.abi import prepared_environment, write_bare_artifact
from tests.serve.jobs.thinking import records_of
from tests.serve.tables import uniform

SYSTEM: Final = "one-gpu"
LIMIT_S: Final = 180
#: Whether the stand-in runs in place of nccl-tests, to check a test itself without a GPU.
#   NCCL_TESTS_STAND_IN  tests/gpu: anything: the stand-in for nccl-tests runs, without a GPU.
STAND_IN: Final = bool(os.environ.get("NCCL_TESTS_STAND_IN"))
#: Sockets on the loopback are all that NCCL may use between them.
SOCKETS_ONLY: Final = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
}
Records = npt.NDArray[np.void]


def plain_environment() -> dict[str, str]:
    """This process's environment without settings of NCCL or of ours, which finds our packages."""
    ours = ("NCCL", "DYNAMICCL")
    path = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    found = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def skip_without_nccl(least: tuple[int, int]) -> None:
    """Skip where torch brings no CUDA, no device, or an older NCCL."""
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing was checked")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or no CUDA build of torch: nothing was checked")
    if torch.cuda.nccl.version() < least:
        wanted = ".".join(map(str, least))
        pytest.skip(f"NCCL {torch.cuda.nccl.version()} is older than {wanted}: nothing was checked")


def nccl_code() -> int:
    """What torch's NCCL says that it is: 22809 for 2.28.9."""
    torch = pytest.importorskip("torch")
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(10_000 * major + 100 * minor + patch)


# --- Sweeps of mpirun ---

#: A sweep's launcher where several ranks share a GPU, each a node to NCCL.
SHARED: Final = """
extra_args = ["--oversubscribe"]
prefix = ["sh", "-c", 'NCCL_HOSTID=rank$OMPI_COMM_WORLD_RANK exec "$@"', "rank"]
env = {{ {} }}
"""


def shared(**more: str) -> str:
    """SHARED with its variables."""
    variables = SOCKETS_ONLY | more
    return SHARED.format(", ".join(f'{name} = "{value}"' for name, value in variables.items()))


def collected(folder: Path, sweep: str, limit_s: float, *more: str) -> pl.DataFrame:
    """All rows of a sweep that is run into `folder`/data; it must end well, within the limit."""
    file, data = folder / "sweep.toml", folder / "data"
    file.write_text(sweep)
    command = [sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run", str(file)]
    done = subprocess.run(
        [*command, "--out", str(data), *more],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return store.read(data)


# --- Jobs of torch's NCCL ---


@dataclass(frozen=True)
class Job:
    """What is left of a job: NCCL's log of each rank, and the recorded calls."""

    logs: list[str]
    records: list[Records]

    def assert_loaded(self) -> None:
        """NCCL says that it uses our tuner, on every rank."""
        for log in self.logs:
            loaded = [line for line in log.splitlines() if "TUNER/Plugin: Using" in line]
            assert any("DynamICCL" in line for line in loaded), log


def write_bound_artifact(artifact: Path, plugin: Path, config: Config, ranks: int) -> None:
    """An artifact of one table, which knows this machine."""
    write_bare_artifact(artifact, SYSTEM, uniform(config, ranks, ranks))
    fingerprint = own_fingerprint(Machine(), plugin)
    PluginIndex.read(artifact).bound(SYSTEM, fingerprint).write(artifact)


def run_job(
    root: Path, ranks: int, environment: Mapping[str, str], meanwhile: Callable[[], None]
) -> Job:
    """Run all-reduces on every rank under `root` until `meanwhile` returns."""
    logs = run_ranks(root, ranks, environment, meanwhile, "sums")
    return Job(logs, [records_of(root / "calls", rank) for rank in range(ranks)])


def run_ranks(
    root: Path,
    ranks: int,
    environment: Mapping[str, str],
    meanwhile: Callable[[], None],
    what: str,
) -> list[str]:
    """Run worker.py on every rank under `root`, and what it is to do meanwhile; NCCL's logs."""
    calls = root / "calls"
    calls.mkdir(mode=0o700)
    common = {
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
    logs = [root / f"rank{rank}.log" for rank in range(ranks)]

    def stop() -> None:
        meanwhile()
        (root / "stop").touch()

    worker = str(Path(__file__).with_name("worker.py"))
    own = [common | {"NCCL_DEBUG_FILE": str(log)} for log in logs]
    run_each([sys.executable, worker, what], own, stop)
    return [log.read_text(errors="replace") for log in logs]


def run_each(
    command: Sequence[str], own: Sequence[Mapping[str, str]], meanwhile: Callable[[], object] = list
) -> None:
    """Run a command as each rank, with its own variables, and what there is to do meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(own))}
    common = plain_environment() | SOCKETS_ONLY | where
    processes = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"} | dict(each)
        )
        for rank, each in enumerate(own)
    ]
    try:
        meanwhile()
        codes = [process.wait(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * len(own), f"exit codes {codes} (3: a sum was wrong)"


# --- What the plugin recorded ---


def table_changes(records: Records) -> list[tuple[int, int]]:
    """(sequence number, table) of the first call, and of each with another table than before."""
    told = [(int(row["sequence"]), int(row["table"])) for row in records]
    return [told[0], *(after for before, after in pairwise(told) if before[1] != after[1])]


def assert_ran(records: Records, table: int, config: Config) -> None:
    """All calls under the table of that number ran what it says."""
    rows = records[records["table"] == table]
    ran = {(int(row["algorithm"]), int(row["protocol"])) for row in rows}
    assert ran == {(config.algorithm, config.protocol)}


def choices_of(records: Records, table: int) -> dict[int, set[tuple[int, int]]]:
    """(algorithm, protocol) that ran while a table was in force, by size in bytes."""
    found: dict[int, set[tuple[int, int]]] = {}
    for row in records[records["table"] == table]:
        cell = (int(row["algorithm"]), int(row["protocol"]))
        found.setdefault(int(row["size_bytes"]), set()).add(cell)
    return found
