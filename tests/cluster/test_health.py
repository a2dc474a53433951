"""A check of three nodes through real Slurm, several communicators at once."""

import sys
from pathlib import Path

import pytest

from dynamiccl.collect.health import examine
from dynamiccl.collect.sweep import GroupShape, Sizes, load_sweep, sweep_text
from dynamiccl.datasets import store
from tests.cluster.slurm import Slurm
from tests.cluster.test_sweeps import environment

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[2]


def collect(slurm: Slurm, folder: Path, nodes: int, *words: str, **more: str) -> str:
    """Run the command in an allocation of two tasks a node; what it printed."""
    salloc = ["salloc", f"-N{nodes}", "--ntasks-per-node=2", "--exclusive"]
    command = [sys.executable, "-P", "-m", "dynamiccl.collect.cli", *words]
    command += ["--out", str(folder / "out"), "--nccl-tests-dir", str(folder / "bin")]
    done = slurm.run([*salloc, *command], environment(**more), check=False, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    (folder / "health.toml").write_text(sweep_text(example.model_copy(update=update)))
    slow = {"FAKE_SLOW": "5:1.5", "FAKE_NOISE": "0.005"}
    collect(slurm, folder, 3, "run", str(folder / "health.toml"), **slow)
    report = examine(store.read(folder / "out"), least=0.05)
    assert report.nodes == 3
    [pair, link] = sorted(report.findings, key=lambda one: one.kind, reverse=True)
    # It has one partner inside its node of two GPUs, and one on the other nodes.
    assert (pair.kind, pair.where) == ("pair", "n3 GPU 0-1")
    assert (link.kind, link.where) == ("link", "n1 - n3 GPU 1")
