"""Whole sweeps through real Slurm and real Open MPI: the stand-in, the plugin, the command line."""

import shutil
import sys
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.datasets import store
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator import h100
from tests.cluster.slurm import Slurm

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
SWEEP = """
name = "grid"
system = "four-nodes"
collectives = ["AllReduce"]
groups = [{{ num_nodes = 2, ranks_per_node = 2 }}]
sizes = {{ min = "1M", max = "16M", factor = 4 }}
algorithms = ["Ring", "NVLSTree"]
protocols = ["LL128", "Simple"]
num_channels = [0, 4]
cycles = 1
iterations = 5
warmup_iterations = 1
[runner]
plugin = "{plugin}"
startup_timeout_s = 60
[launcher]
kind = "{launcher}"
{more}
"""
#: Measurements of a cycle: 3 sizes x (the default twice, Ring x 2 protocols with
#: and without a number of channels, the reference default twice). The simulated machine has no
#: NVLSTree with two ranks on a node.
PICKS = 3 * (2 + 4 + 2)

#: For what happens around a sweep: little work, and no start-up of samplers.
SMALL = """
name = "grid"
system = "four-nodes"
collectives = {collectives}
groups = [{{ num_nodes = 2, ranks_per_node = 1 }}]
sizes = {{ min = "1M", max = "4M", factor = 4 }}
algorithms = ["Ring"]
protocols = ["LL128", "Simple"]
cycles = {cycles}
iterations = 2
warmup_iterations = 1
[runner]
plugin = "{plugin}"
startup_timeout_s = 60
retry_after_s = 0.1
read_back = false
[telemetry]
enabled = false
[launcher]
kind = "{launcher}"
{more}
"""
#: Measurements of a cycle and a collective: 2 sizes x (the default twice, Ring x 2 protocols, the
#: reference default twice).
SMALL_PICKS = 2 * (2 + 2 + 2)


def write(folder: Path, plugin: Path, launcher: str, *, more: str = "") -> Path:
    path = folder / "sweep.toml"
    path.write_text(SWEEP.format(plugin=plugin, launcher=launcher, more=more))
    return path


def command(folder: Path, *more: str) -> list[str]:
    head = [sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run", str(folder / "sweep.toml")]
    return [*head, "--out", str(folder / "out"), "--nccl-tests-dir", str(folder / "bin"), *more]


def environment(**more: str) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def check(folder: Path) -> pl.DataFrame:
    """Every pick is there once, verified, and its time is that of the simulated machine."""
    found = check_picks(folder, PICKS)
    lost = found.filter(pl.col("reason") == "NCCL's cost table has no such cell here")
    assert lost.height == 3 * 2
    timed = found.filter(pl.col("status") == "ok")
    forced = timed.filter(~pl.col("is_default"))
    assert forced["verified"].all()
    assert (forced["requested_algorithm"] == forced["actual_algorithm"]).all()
    assert (forced["requested_protocol"] == forced["actual_protocol"]).all()
    assert timed.select("num_nodes", "ranks_per_node", "num_ranks").unique().rows() == [(2, 2, 4)]
    group = h100.Group(2, 2)
    close = [
        0.9 < row["time_us"] / true_us(group, row) < 1.15 for row in forced.iter_rows(named=True)
    ]
    assert sum(close) > 0.9 * len(close)
    return found


def check_picks(folder: Path, picks: int) -> pl.DataFrame:
    """What a sweep wrote; so many picks are there once, in place and out of place.

    What follows a launch that was cut off measures the default once more.
    """
    found = store.read(folder / "out")
    timed = found.filter(pl.col("status") == "ok")
    key = ["trial", "run", "repeat", "default_scope"]
    assert timed.select(key).unique().height == timed.height
    assert timed.filter(pl.col("repeat") < 2).height == 2 * picks
    return found


def true_us(group: h100.Group, row: dict[str, object]) -> float:
    return h100.true_us(
        group,
        Collective.parse(str(row["collective"])),
        Algorithm.parse(str(row["actual_algorithm"])),
        Protocol.parse(str(row["actual_protocol"])),
        int(str(row["size_bytes"])),
        num_channels=row["requested_num_channels"],  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_sweep_inside_an_allocation(
    launcher: str, slurm: Slurm, folder: Path, sweep_path: Path
) -> None:
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    if launcher == "mpirun" and not slurm.namespaces:
        pytest.skip("mpirun needs nodes with names of their own: no network namespaces here")
    more = 'extra_args = ["--mca", "btl_tcp_if_include", "eth0", "--oversubscribe"]'
    write(folder, sweep_path, launcher, more=more if launcher == "mpirun" else "")
    salloc = ["salloc", "-N2", "--ntasks-per-node=2", "--exclusive"]
    slurm.run([*salloc, *command(folder)], environment(), timeout_s=120)
    found = check(folder)
    assert set(found["exclusive_node"].drop_nulls()) == {True}


#: What stands where a benchmark did: it dies on one node of two, as long as that one is broken.
#: Ranks on the other node are up and wait for those, as in MPI_Init, until srun ends them.
BROKEN_NODE = """#!/bin/sh
if [ "${{SLURM_STEP_NUM_TASKS:-1}}" -gt 1 ] && [ -e "{folder}/broken" ]; then
  [ "$SLURM_NODEID" = 1 ] || {{ touch "{folder}/$SLURM_STEP_ID"; exec sleep 60; }}
  while [ ! -e "{folder}/$SLURM_STEP_ID" ]; do sleep 0.1; done
  echo "NVML: Driver/library version mismatch" >&2
  sleep 0.5; exit 3  # srun may lose what a rank says as it dies
fi
exec "{folder}/good/${{0##*/}}" "$@"
"""


def test_a_node_whose_launches_always_die_ends_the_sweep_until_it_is_mended(
    slurm: Slurm, folder: Path, sweep_path: Path
) -> None:
    """Each config was blamed, and `--resume` had nothing left to measure."""
    shutil.copytree(folder / "bin", folder / "good", symlinks=True)
    for program in (folder / "bin").glob("*_perf"):
        program.unlink()
        program.write_text(BROKEN_NODE.format(folder=folder))
        program.chmod(0o755)
    (folder / "broken").touch()
    values = {"launcher": "srun", "plugin": sweep_path, "collectives": '["AllReduce"]', "more": ""}
    (folder / "sweep.toml").write_text(SMALL.format(cycles=1, **values))
    salloc = ["salloc", "-N2", "--ntasks-per-node=2", "--exclusive"]
    done = slurm.run([*salloc, *command(folder)], environment(), timeout_s=120, check=False)
    assert done.returncode == 4, done.stderr
    assert "NVML: Driver/library version mismatch" in done.stderr, done.stderr
    (folder / "broken").unlink()
    slurm.run([*salloc, *command(folder, "--resume")], environment(), timeout_s=120)
    assert "failed" not in check_picks(folder, SMALL_PICKS)["status"].to_list()
