"""Sweeps: simulated ones, and the stand-in for nccl-tests under the real launchers and plugin.

Times of the stand-in are the simulator's without noise, so that a row whose time belongs to another
config is seen; `sweeps-plain` alone keeps them.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import polars as pl
import pytest

from dynamiccl.libraries import SWEEP_NAME
from tests.fakes.nccl_tests.install import install_stand_in
from tests.golden.command import dynamiccl
from tests.golden.frames import equal_frames, packed, read
from tests.golden.golden import Golden
from tests.plugin_build import built

#: Columns by which a row is found again.
_IDENTITY: Final = (
    *("round", "collective", "num_nodes", "num_ranks", "comm_split", "datatype", "launch_profile"),
    *("interference_kind", "interference_level", "default_scope", "size_bytes"),
    *("requested_algorithm", "requested_protocol", "requested_num_channels"),
    *("requested_chunk_bytes", "repeat", "in_place"),
)
#: What a sweep decides and finds out, without times and without what the machine is.
_KEPT: Final = (
    *("system", "sweep", "trial", "run", *_IDENTITY, "reduction_op", "root"),
    *("ranks_per_node", "num_comms", "nccl_version", "is_default", "actual_algorithm"),
    *("actual_protocol", "actual_num_channels", "actual_chunk_bytes", "verified", "job_id"),
    *("behaviour_probability", "status", "reason", "statistic", "time_derived", "wrong_values"),
)
_SUMMARY: Final = ("trials", "rounds_done", "rows_written", "rows_by_status", "ended")
_STILL: Final = {"FAKE_NOISE": "0", "FAKE_LAUNCH": "0"}

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
_RANDOM: Final = """
name = "grid"
system = "sim"
collectives = ["AllReduce"]
datatypes = ["float", "bfloat16"]
num_channels = [0, 8, 32]
groups = [{ num_nodes = 1, ranks_per_node = 8 }]
sizes = { min = "1K", max = "1G", steps_per_octave = 1 }
nccl_version = "2.29.7"
cycles = 3
[simulator]
system = "b300-nvlink"
[strategy]
kind = "random"
"""
_ADAPTIVE: Final = """
name = "grid"
system = "sim"
collectives = ["AllReduce", "ReduceScatter"]
algorithms = ["Ring", "Tree"]
num_channels = [0, 2, 8]
groups = [{ num_nodes = 2, ranks_per_node = 8 }]
sizes = { min = "32K", max = "32M", factor = 4 }
nccl_version = "2.27.5"
cycles = 3
[strategy]
kind = "adaptive"
"""


def _simulated(text: str, directory: Path) -> Any:
    """All columns of a simulated sweep, and its trials' ids."""
    (directory / "s.toml").write_text(text)
    words = ("run", "s.toml", "--runner", "simulator", "--out", "data", "--json")
    summary = dynamiccl("collect", *words, directory=directory).json
    data = directory / "data"
    trials = sorted(set(read(data, "measurements")["trial"]))
    return {
        "summary": {key: summary[key] for key in _SUMMARY},
        # What is on disk goes on under a resume only as long as these are the same.
        "trials": trials[:20],
        "rows": packed(
            read(data, "measurements", order=_IDENTITY), without=("timestamp", "launch")
        ),
    }


_GRID: Final = {
    "name": '"grid"',
    "system": '"box"',
    "collectives": '["AllReduce"]',
    "groups": "[{ num_nodes = 1, ranks_per_node = 4 }]",
    "sizes": '{ min = "1M", max = "16M", factor = 4 }',
    "algorithms": '["Ring", "Tree", "NVLSTree"]',
    "protocols": '["LL", "Simple"]',
    "num_channels": "[0, 4]",
    "cycles": "1",
    "iterations": "5",
    "warmup_iterations": "1",
    "telemetry": "{ enabled = false }",
    "launcher": '{ kind = "local" }',
}


class Bench:
    """A folder with the stand-in's programs, a sweep file, and what the sweep wrote."""

    def __init__(self, folder: Path, *, runner: Mapping[str, str] | None = None, **keys: str):
        for program in ("c++", "cmake"):
            if shutil.which(program) is None:
                pytest.skip(f"no {program} to build the sweep plugin with")
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        install_stand_in(folder / "bin")
        runner = {"plugin": json.dumps(str(built() / SWEEP_NAME)), **(runner or {})}
        lines = [f"{key} = {value}" for key, value in (_GRID | keys).items()] + ["[runner]"]
        lines += [f"{key} = {value}" for key, value in runner.items()]
        (folder / "s.toml").write_text("\n".join(lines))

    def words(self, *more: str) -> tuple[str, ...]:
        """The command's words."""
        return ("run", "s.toml", "--out", "data", "--nccl-tests-dir", "bin", "--json", *more)

    def run(self, *more: str, **settings: str) -> Any:
        """Run the sweep: its summary, or the exit code where that is not 0."""
        done = dynamiccl(
            "collect", *self.words(*more), directory=self.folder, settings=_STILL | settings
        )
        if done.code != 0:
            return {"exit": done.code}
        return {key: done.json[key] for key in _SUMMARY}

    def frame(self) -> pl.DataFrame:
        """All rows in the order of their identity; none where nothing was written."""
        if not (self.folder / "data" / "measurements").is_dir():
            return pl.DataFrame()
        return read(self.folder / "data", "measurements", order=_IDENTITY)

    def rows(self, *more: str) -> Any:
        """What is kept of the rows."""
        frame = self.frame()
        return packed(frame.select(*_KEPT, *more)) if frame.height else None

    def launches(self) -> Any:
        """The launches that measured, in the order of time."""
        keys = ("launch", "round", "collective", "num_nodes", "launch_profile", "default_scope")
        found = (
            self.frame()
            .filter(pl.col("hosts").is_not_null())
            .group_by(keys)
            .agg(
                pl.col("timestamp").min(),
                pl.len().alias("rows"),
                pl.col("size_bytes").n_unique().alias("sizes"),
            )
            .sort("timestamp")
        )
        return packed(found, without=("timestamp", "launch"))


def _plain(directory: Path) -> Any:
    """Two collectives in two profiles, played by the plugin."""
    bench = Bench(
        directory,
        collectives='["AllReduce", "AllGather"]',
        algorithms='["Ring", "NVLSTree"]',
        profiles='[{ name = "default" }, { name = "net", env = { NCCL_NET = "Socket" } }]',
        groups="[{ num_nodes = 1, ranks_per_node = 8 }]",
    )
    summary = bench.run()
    data = directory / "data"
    order = ("launch_profile", "collective", "algorithm", "protocol")
    found = [path for path in data.rglob("*") if path.is_file() and ".journal" not in path.parts]
    return {
        "summary": summary,
        "rows": bench.rows("time_us", "busbw_gbytes_per_s"),
        "launches": bench.launches(),
        "costs": packed(read(data, "costs", order=order), without=("source_file",)),
        "others": sorted(str(p.relative_to(data)) for p in found if not p.name.startswith("part-")),
    }


def _mpirun(directory: Path) -> Any:
    """Four processes under Open MPI, in one communicator and in two at once."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: Open MPI is not installed")
    groups = (
        "{ num_nodes = 1, ranks_per_node = 4 }",
        '{ num_nodes = 1, ranks_per_node = 4, split = "MOD 2" }',
    )
    bench = Bench(
        directory,
        groups=f"[{', '.join(groups)}]",
        algorithms='["Ring"]',
        # More processes than cores.
        launcher='{ kind = "mpirun", extra_args = ["--oversubscribe"] }',
    )
    summary = bench.run()
    return {"summary": summary, "rows": bench.rows(), "launches": bench.launches()}


def _no_machine(directory: Path) -> Any:
    """A machine on which no communicator is made marks nothing, and goes on when it is mended."""
    bench = Bench(directory, runner={"retry_after_s": "0"}, algorithms='["Ring"]')
    broken = bench.run(FAKE_INIT_FAILS="1")
    rows = bench.rows()
    refused = bench.run()
    return {
        "broken": broken,
        "rows": rows,
        "refused": refused,
        "mended": bench.run("--resume"),
        "all": bench.rows(),
        "more": bench.run("--resume"),
    }


def _limited(directory: Path) -> Any:
    """A budget that ends the sweep, and a larger one that goes on."""
    bench = Bench(directory, algorithms='["Ring"]', cycles="3", budget="{ max_measurements = 20 }")
    first = bench.run()
    text = (directory / "s.toml").read_text()
    (directory / "s.toml").write_text(text.replace("= 20 }", "= 40 }"))
    more = bench.run("--resume")
    return {"budget": [first, more], "rows": bench.rows()}


_MAKERS: Final[Mapping[str, Callable[[Path], Any]]] = {
    "exhaustive": partial(_simulated, _SIMULATED),
    "random": partial(_simulated, _RANDOM),
    "adaptive": partial(_simulated, _ADAPTIVE),
    "plain": _plain,
    "mpirun": _mpirun,
    "no_machine": _no_machine,
    "limited": _limited,
}
GOLDENS: Final = tuple(
    Golden(f"sweeps-{name}", make, equal_frames) for name, make in _MAKERS.items()
)
