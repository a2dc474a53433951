"""Parquet of sweeps: a simulated one, and the stand-in for nccl-tests under launchers and plugin.

Times of the stand-in are the simulator's without noise, so that a row whose time belongs to another
config is seen.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest

from dynamiccl.libraries import SWEEP_NAME
from tests.fakes.nccl_tests.install import install_stand_in
from tests.golden.command import dynamiccl, library
from tests.golden.golden import Golden, tables

#: Columns by which a row is found again.
_IDENTITY: Final = (
    *("round", "collective", "num_nodes", "num_ranks", "comm_split", "datatype", "launch_profile"),
    *("interference_kind", "interference_level", "default_scope", "size_bytes"),
    *("requested_algorithm", "requested_protocol", "requested_num_channels"),
    *("requested_chunk_bytes", "repeat", "in_place", "algorithm", "protocol"),
)
#: What the machine is, and when it was.
_HERE: Final = (
    *("timestamp", "launch", "source_file", "source_line", "hosts", "gpu", "node_fingerprint"),
    *("cpu_vendor", "nic_kind", "nics_per_node", "nic_gbits_per_s", "mig", "exclusive_node"),
    *("compute_capability", "nvlink_generation", "nvlinks_per_gpu", "nvswitch", "cuda_version"),
    *("driver_version", "nccl_tests_version", "partial_launch", "process_times_us"),
)
_SUMMARY: Final = ("trials", "rounds_done", "rows_written", "rows_by_status", "ended")
_SIMULATED: Final = """
name = "grid"
system = "sim"
collectives = ["AllReduce", "AllGather", "Broadcast"]
algorithms = ["Ring", "Tree", "NVLS"]
num_channels = [0, 4, 16]
groups = [
  { num_nodes = 1, ranks_per_node = 8 },
  { num_nodes = 4, ranks_per_node = 8 },
  { num_nodes = 4, ranks_per_node = 8, split = "DIV 8" },
]
sizes = { min = "16K", max = "64M", factor = 8 }
nccl_version = "2.27.5"
cycles = 2
interference = [{ kind = "none" }, { kind = "congestion", level = 0.5 }]
[simulator]
seed = 5
"""
_MEASURED: Final = """
name = "grid"
system = "box"
collectives = ["AllReduce", "AllGather"]
sizes = { min = "1M", max = "16M", factor = 4 }
algorithms = ["Ring", "NVLSTree"]
protocols = ["LL", "Simple"]
num_channels = [0, 4]
cycles = 1
iterations = 5
warmup_iterations = 1
telemetry = { enabled = false }
"""
#: Two collectives in two profiles, played by the plugin.
_PLAIN: Final = """
groups = [{ num_nodes = 1, ranks_per_node = 8 }]
profiles = [{ name = "default" }, { name = "net", env = { NCCL_NET = "Socket" } }]
launcher = { kind = "local" }
"""
#: Four processes under Open MPI, in one communicator and in two at once; more than there are cores.
_MPIRUN: Final = """
groups = [
  { num_nodes = 1, ranks_per_node = 4 },
  { num_nodes = 1, ranks_per_node = 4, split = "MOD 2" },
]
launcher = { kind = "mpirun", extra_args = ["--oversubscribe"] }
"""


_STAND_IN: Final = "--nccl-tests-dir bin"


def _run(directory: Path, *words: str) -> Any:
    """What each of some runs says, and the tables."""
    said = []
    for more in words:
        asked = ("run", "s.toml", "--out", "data", *more.split(), "--json")
        settings = {"FAKE_NOISE": "0", "FAKE_LAUNCH": "0"}
        code, document = dynamiccl("collect", *asked, directory=directory, settings=settings)
        assert code == 0, asked
        said.append({key: document[key] for key in _SUMMARY})
    return {"summary": said, **tables(directory / "data", _IDENTITY, _HERE)}


def _simulated(directory: Path) -> Any:
    (directory / "s.toml").write_text(_SIMULATED)
    return _run(directory, "--runner simulator")


def _staged(directory: Path, text: str) -> None:
    install_stand_in(directory / "bin")
    plugin = json.dumps(str(library(SWEEP_NAME)))
    (directory / "s.toml").write_text(f"{text}[runner]\nplugin = {plugin}\n")


def _plain(directory: Path) -> Any:
    _staged(directory, _MEASURED + _PLAIN)
    return _run(directory, _STAND_IN)


def _mpirun(directory: Path) -> Any:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: Open MPI is not installed")
    _staged(directory, _MEASURED.replace('"NVLSTree"', '"Tree"') + _MPIRUN)
    return _run(directory, _STAND_IN)


GOLDENS: Final = (
    Golden("sweeps-simulated", _simulated),
    Golden("sweeps-plain", _plain),
    Golden("sweeps-mpirun", _mpirun),
)
