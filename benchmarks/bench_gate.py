"""The gate's decisions against the simulator's true times.

    python benchmarks/bench_gate.py             # two gates; FULL=1: thirty

Twenty group shapes of H100 nodes, three collectives, half-octave sizes: a policy is trained on
three noisy cycles, and gated by eight fresh ones, with other seeds each time. The judge is a sweep
without noise that holds every size bin. *Share worse*: of the bins that the gates let through,
those in which the config is truly slower than NCCL's default by over 1 %. *Gain kept*: the sum of
log(default / gated) over that of log(default / oracle), all bins, the mean over gates. The same for
the policy without a gate. *Stretch*: of bins that passed as part of a stretch, not alone.

Writes out/bench/gate.json. A minute a gate on one core.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from harness import write_result

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.cells import tuned
from dynamiccl.datasets.scoring import TaskGrid, task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.evaluate.gate.evidence import costs_of
from dynamiccl.evaluate.gate.gate import pass_gate
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe

SHAPES: Final = [(nodes, ranks) for nodes in (2, 4, 8, 16, 32) for ranks in (1, 2, 4, 8)]
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
RECIPE: Final = "ddqn-dueling"


def main() -> None:
    """Train, gate, judge."""
    torch.set_num_threads(1)
    num_gates = 30 if os.environ.get("FULL") else 2
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        policy = trained_policy(out)
        exact = sweep_text("truth", cycles=1, seed=3, noise=NO_NOISE)
        truth = simulate(exact.replace("steps_per_octave = 2", "steps_per_octave = 4"), out / "t")
        grid = task_grid(tuned(read(truth)), policy.manifest.actions(), list(Split))
        ours, stretches, seconds = [], [], []
        for gate in range(num_gates):
            fresh = sweep(out / f"fresh-{gate}", f"fresh-{gate}", cycles=8, seed=100 + gate)
            began = time.perf_counter()
            gated = pass_gate(policy, read(fresh), costs=costs_of(fresh))
            seconds.append(time.perf_counter() - began)
            wanted = [cell for cell in gated.cells if cell.verdict is not Verdict.ABSTAINS]
            kept = [cell for cell in wanted if cell.verdict is not Verdict.REFUSED]
            ours.append(judged(grid, kept))
            inferred = [cell for cell in kept if cell.verdict is Verdict.INFERRED]
            stretches.append(judged(grid, inferred))
    bare = judged(grid, wanted)  # the same every time
    num_kept = sum(each.acting for each in ours)
    in_stretches = sum(each.acting for each in stretches)
    write_result(
        "gate",
        {
            "recipe": RECIPE,
            "cells": grid.tasks.height,
            "gates": num_gates,
            "gate_kept_cells": num_kept,
            "gate_share_worse": sum(each.worse for each in ours) / max(num_kept, 1),
            "gate_stretch_cells": in_stretches,
            "gate_stretch_share_worse": sum(s.worse for s in stretches) / max(in_stretches, 1),
            "gate_gain_kept": float(np.mean([each.gain_kept for each in ours])),
            "gate_gain_kept_least": float(np.min([each.gain_kept for each in ours])),
            "ungated_cells": bare.acting,
            "ungated_share_worse": bare.worse / max(bare.acting, 1),
            "ungated_gain_kept": bare.gain_kept,
            "gate_s": float(np.median(seconds)),
        },
    )


def trained_policy(out: Path) -> TorchPolicy:
    """One training run."""
    data = sweep(out / "trained", "trained", cycles=3, seed=1)
    uri = f"sqlite:///{out / 'mlflow.db'}"
    run = fit(data, make_recipe(RECIPE), experiment="gate", tracking_uri=uri, seed=0)
    return TorchPolicy.load(Path(run.run_directory) / "policy")


def sweep(
    out: Path,
    name: str,
    *,
    cycles: int,
    seed: int,
    noise: str = "",
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> Path:
    """A simulated sweep over some shapes."""
    return simulate(sweep_text(name, cycles=cycles, seed=seed, noise=noise, shapes=shapes), out)


def sweep_text(
    name: str,
    *,
    cycles: int,
    seed: int,
    noise: str = "",
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> str:
    """Its sweep file."""
    groups = ", ".join(f"{{ num_nodes = {n}, ranks_per_node = {r} }}" for n, r in shapes)
    return SWEEP.format(name=name, groups=groups, cycles=cycles, seed=seed, noise=noise)


@dataclass(frozen=True, slots=True)
class Judged:
    """Number of acting cells, of those slower by over 1 %, and the gain kept."""

    acting: int
    worse: int
    gain_kept: float


def judged(grid: TaskGrid, cells: list[Cell]) -> Judged:
    """Some cells' configs against NCCL's default, by noise-free times."""
    acts = {(c.num_nodes, c.num_ranks, c.collective, c.bin): c.action for c in cells}
    keys = grid.tasks.select("num_nodes", "num_ranks", "collective", "bin").iter_rows()
    actions = np.array([acts.get(key, 0) for key in keys])
    times = grid.chosen_us(actions)
    acting = actions > 0
    worse = int((times > 1.01 * grid.default_us)[acting].sum())
    gain = np.log(grid.default_us / times).sum() / np.log(grid.default_us / grid.oracle_us).sum()
    return Judged(int(acting.sum()), worse, float(gain))


if __name__ == "__main__":
    main()
