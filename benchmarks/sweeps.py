"""Sweeps of simulated H100 nodes, and data sets with systems left out."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from dynamiccl.collect.simulated import simulate

SWEEP: Final = """
name = "{name}"
system = "h100-ib-simulated"
collectives = ["AllReduce", "AllGather", "ReduceScatter"]
algorithms = ["Ring", "Tree", "NVLSTree"]
groups = [{groups}]
sizes = {{ min = "1K", max = "1G", steps_per_octave = 2 }}
nccl_version = "2.27.5"
cycles = {cycles}
[simulator]
seed = {seed}
{noise}
"""
NO_NOISE: Final = "noise_sigma = 0.0\ntail_probability = 0.0\ndrift_sigma = 0.0"


def sweep(
    out: Path,
    name: str,
    *,
    cycles: int,
    seed: int,
    shapes: Sequence[tuple[int, int]],
    noise: str = "",
) -> Path:
    """A simulated sweep over some shapes."""
    groups = ", ".join(f"{{ num_nodes = {n}, ranks_per_node = {r} }}" for n, r in shapes)
    text = SWEEP.format(name=name, groups=groups, cycles=cycles, seed=seed, noise=noise)
    return simulate(text, out)


def without(data: Path, out: Path, systems: Iterable[str]) -> Path:
    """A copy of a data set with all files of some systems left out."""
    ignored = shutil.ignore_patterns(*(f"system={system}" for system in systems))
    shutil.copytree(data, out, ignore=ignored)
    return out
