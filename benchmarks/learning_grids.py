"""The belief at group shapes that nobody measured: ten of H100 nodes, two left out in each turn.

A sweep of all shapes is noisy (three cycles); judge is the same sweep without noise. Half of the
sizes are no powers of two.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from harness import parallel
from learning_belief import (
    Row,
    by,
    in_parallel,
    judged,
    mean_of,
    ratio,
    summed,
    upper,
    with_interval,
)

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.cells import task_grid, tuned
from dynamiccl.datasets.splits import Split, Splits
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.baselines import NCCL_DEFAULT, GradientBoosting, LearnedPolicy
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe import make_recipe

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
#: On nodes with fewer ranks the model's best is NCCL's default, everywhere.
SHAPES: Final = [(nodes, ranks) for nodes in (2, 4, 8, 16, 32) for ranks in (4, 8)]
#: The recipe of the belief.
BELIEF: Final = "gaussian-process"


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


def shape_figures(out: Path, seeds: int) -> dict[str, Any]:
    """Two of the ten shapes left out in turn: what the belief and rivals make of the others."""
    truth = sweep(out / "truth", "truth", cycles=1, seed=1000, noise=NO_NOISE, shapes=SHAPES)
    measured = [data for _, data in parallel(measure, [(out, s) for s in range(seeds)])]
    jobs = [(data, truth, turn) for data in measured for turn in range(len(SHAPES))]
    rows = in_parallel(_shape_left_out, jobs)
    figures: dict[str, Any] = {"shape_left_out_turns": len(jobs)}
    for policy, mine in by(rows, "policy").items():
        by_turn = [summed(each) for each in by(mine, "turn").values()]
        name = "shape_left_out" if policy == BELIEF else f"shape_left_out_{policy}"
        figures |= with_interval(f"{name}_mean_regret", mine, mean_of("regret"))
        figures |= with_interval(f"{name}_gain_kept", by_turn, ratio("gain", "possible"))
        figures[f"{name}_share_worse"] = upper(by_turn, "acts")
        figures[f"{name}_share_worse_all"] = upper(by_turn, "sizes")
    return figures


def _shape_left_out(data: Path, truth: Path, turn: int) -> list[Row]:
    """Scores at the shapes that are for test in a turn, by truth."""
    split = f"shape:{turn}"
    path = train(data, BELIEF, turn, f"shape-{data.name}", [f"split={split}"])
    policy = TorchPolicy.load(path)
    frame, catalogue = tuned(read(data)), policy.manifest.actions()
    parts = Splits.of(frame, split)
    told = task_grid(parts.assign(frame), catalogue, [Split.TRAIN, Split.VALIDATION])
    # Of the two collectives that last equally long here one tells.
    exact = parts.assign(tuned(read(truth))).filter(pl.col("collective") != "ReduceScatter")
    asked = task_grid(exact, catalogue, [Split.TEST])
    rivals = NCCL_DEFAULT, GradientBoosting(told, catalogue)
    players = (LearnedPolicy(policy, catalogue, BELIEF), *rivals)
    log_time = np.log(np.where(asked.mask, asked.times_us, np.inf))
    return [
        {"policy": each.name, "turn": turn} | judged(log_time, each.choose(asked))
        for each in players
    ]


def measure(out: Path, seed: int) -> Path:
    """The data of one replicate."""
    return sweep(out / f"data-{seed}", f"cycles-{seed}", cycles=3, seed=seed, shapes=SHAPES)


def train(
    data: Path, recipe: str, seed: int, name: str = "grid", settings: Sequence[str] = ()
) -> Path:
    """Train a recipe with one seed: its policy."""
    uri = f"sqlite:///{data.parent / f'mlflow-{name}-{recipe}-{seed}.db'}"
    done = fit(data, make_recipe(recipe, settings), experiment="grid", tracking_uri=uri, seed=seed)
    return Path(done.run_directory) / "policy"
