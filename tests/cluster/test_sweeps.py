"""Whole sweeps through real Slurm: the stand-in, the plugin, the command line."""

import shutil
import sys
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect.health import examine
from dynamiccl.collect.sweep import GroupShape, Sizes, load_sweep, sweep_text
from dynamiccl.datasets import store
from dynamiccl.simulator.system import Group
from tests.cluster.slurm import Slurm
from tests.collect.benchmark.stand_in import share_near_truth, text_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
#: Measurements of a cycle: 3 sizes x (the default twice, Ring x 2 protocols with
#: and without a number of channels, the reference default twice). The simulated machine has no
#: NVLSTree with two ranks on a node.
PICKS = 3 * (2 + 4 + 2)


def small(plugin: Path, launcher: str = 'kind = "srun"', **keys: str) -> str:
    """A sweep for what happens around it: little work, and no start-up of samplers."""
    fixed = "startup_timeout_s = 60, retry_after_s = 0.1, read_back = false"
    return text_of(
        groups="[{ num_nodes = 2, ranks_per_node = 1 }]",
        sizes='{ min = "1M", max = "4M", factor = 4 }',
        algorithms='["Ring"]',
        protocols='["LL128", "Simple"]',
        num_channels="[0]",
        iterations="2",
        warmup_iterations="1",
        runner=f'{{ plugin = "{plugin}", {fixed} }}',
        launcher=f"{{ {launcher} }}",
        **keys,
    )


#: Measurements of a cycle and a collective: 2 sizes x (the default twice, Ring x 2 protocols, the
#: reference default twice).
SMALL_PICKS = 2 * (2 + 2 + 2)


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
    assert share_near_truth(forced, Group(2, 2)) > 0.9
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


def test_sweep_inside_an_allocation(slurm: Slurm, folder: Path, sweep_path: Path) -> None:
    """By srun; by mpirun in tests/golden/sweeps.py, and its ranks on nodes in test_steps.py."""
    keys = {
        "groups": "[{ num_nodes = 2, ranks_per_node = 2 }]",
        "sizes": '{ min = "1M", max = "16M", factor = 4 }',
        "algorithms": '["Ring", "NVLSTree"]',
        "protocols": '["LL128", "Simple"]',
        "runner": f'{{ plugin = "{sweep_path}", startup_timeout_s = 60 }}',
        "launcher": '{ kind = "srun" }',
        "telemetry": "{ enabled = true }",
    }
    (folder / "sweep.toml").write_text(text_of(cycles="1", **keys))
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
    (folder / "sweep.toml").write_text(small(sweep_path, cycles="1"))
    salloc = ["salloc", "-N2", "--ntasks-per-node=2", "--exclusive"]
    done = slurm.run([*salloc, *command(folder)], environment(), timeout_s=120, check=False)
    assert done.returncode == 4, done.stderr
    assert "NVML: Driver/library version mismatch" in done.stderr, done.stderr
    (folder / "broken").unlink()
    slurm.run([*salloc, *command(folder, "--resume")], environment(), timeout_s=120)
    assert "failed" not in check_picks(folder, SMALL_PICKS)["status"].to_list()


def test_the_example_for_health_names_the_slow_gpus_pairs(slurm: Slurm, folder: Path) -> None:
    # The sixth process is GPU 1 of the third node; all its communicators are slow. Each launch
    # between three nodes leaves one over.
    example = load_sweep(ROOT / "examples" / "health.toml").file
    groups = tuple(
        GroupShape(num_nodes=3, ranks_per_node=2, split=split, spare=split != "AND 0x6")
        for split in ("AND 0x6", "AND 0x5", "AND 0x3")
    )
    update = {
        "groups": groups,
        "sizes": Sizes(min=1 << 18, max=1 << 19),
        "iterations": 5,
        "small_iterations": 5,
        "telemetry": example.telemetry.model_copy(update={"enabled": False}),
    }
    (folder / "sweep.toml").write_text(sweep_text(example.model_copy(update=update)))
    slow = {"FAKE_SLOW": "5:1.5", "FAKE_NOISE": "0.005"}
    salloc = ["salloc", "-N3", "--ntasks-per-node=2", "--exclusive"]
    slurm.run([*salloc, *command(folder)], environment(**slow), timeout_s=120)
    report = examine(store.read(folder / "out"), least=0.05)
    assert report["nodes"] == 3
    [pair, link] = sorted(report["findings"], key=lambda one: one["kind"], reverse=True)
    # It has one partner inside its node of two GPUs, and one on the other nodes.
    assert (pair["kind"], pair["where"]) == ("pair", "n3 GPU 0-1")
    assert (link["kind"], link["where"]) == ("link", "n1 - n3 GPU 1")
