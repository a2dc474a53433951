"""The environment of ranks that share one GPU, each a node of its own to NCCL."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import polars as pl

from dynamiccl.datasets import store

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


def plain_environment() -> dict[str, str]:
    """This process's environment without settings of NCCL or of ours."""
    ours = ("NCCL", "DYNAMICCL")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def python_path() -> str:
    """PYTHONPATH of a process that imports our packages, beside what this one finds by it."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def collected(folder: Path, sweep: str, limit_s: float, *more: str) -> pl.DataFrame:
    """All rows of a sweep that is run into `folder`/data; it must end well, within the limit."""
    file, data = folder / "sweep.toml", folder / "data"
    file.write_text(sweep)
    command = [sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run", str(file)]
    done = subprocess.run(
        [*command, "--out", str(data), *more],
        env={**plain_environment(), "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return store.read(data)
