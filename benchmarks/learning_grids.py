"""Recipes and baselines on simulated full grids with known truth, in several replicates.

`simulated_grid` scores them at sizes that were left out, `shape_figures` at group shapes.

A *replicate* is a noisy sweep of its own (three cycles), recipes trained on it with a seed of their
own, and baselines fitted to it. Each is scored once on the test sizes, by the same sweep without
noise; half of the sizes are no powers of two. Intervals are Student's over replicates, so that they
hold the noise of the data and the seed together.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
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
from learning_figures import over_replicates, parallel

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import tuned, usable
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.datasets.scoring import task_grid
from dynamiccl.datasets.splits import Split, Splits
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.baselines import GradientBoosting, make_policies
from dynamiccl.evaluate.metrics import summarise
from dynamiccl.evaluate.policies import LearnedPolicy, NcclDefault
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe

NAME: Final = "h100-ib-simulated"
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
#: The part of the test tasks on which there is something to gain.
BEYOND: Final = f"{NAME}, where NCCL's default loses over 1 %"
#: On nodes with fewer ranks the model's best is NCCL's default, everywhere.
SHAPES: Final = [(nodes, ranks) for nodes in (2, 4, 8, 16, 32) for ranks in (4, 8)]
#: What "slower than the default" means where there is no noise.
WORSE: Final = 0.01
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


def simulated_grid(out: Path, recipes: Sequence[str], seeds: int) -> dict[str, Any]:
    """Figures by policy, the validation regrets by recipe, and which recipe these choose."""
    truth = sweep(out / "truth", "truth", cycles=1, seed=1000, noise=NO_NOISE, shapes=SHAPES)
    measured = {s: data for (_, s), data in parallel(measure, [(out, s) for s in range(seeds)])}
    jobs = [(measured[seed], recipe, seed) for seed in range(seeds) for recipe in recipes]
    regrets: dict[str, list[float]] = {recipe: [] for recipe in recipes}
    learned: dict[int, list[tuple[str, Path]]] = {seed: [] for seed in range(seeds)}
    for (_, recipe, seed), (regret, policy) in parallel(train, jobs):
        regrets[recipe].append(regret)
        learned[seed].append((recipe, policy))
    draws: dict[str, dict[str, list[dict[str, Any]]]] = {NAME: {}, BEYOND: {}}
    for seed in range(seeds):
        for data_set, found in _score(measured[seed], truth, learned[seed]):
            draws[data_set].setdefault(found["policy"], []).append(found)
    chosen = min(recipes, key=lambda recipe: float(np.mean(regrets[recipe])))
    return {
        "data_sets": {
            data_set: {name: over_replicates(each) for name, each in policies.items()}
            for data_set, policies in draws.items()
        },
        "grid_tasks": {name: policies[chosen][0]["tasks"] for name, policies in draws.items()},
        "grid_validation_regret": {name: float(np.mean(each)) for name, each in regrets.items()},
        "chosen_recipe": chosen,
    }


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
    _, path = train(data, BELIEF, turn, f"shape-{data.name}", [f"split={split}"])
    policy = TorchPolicy.load(path)
    frame, catalogue = tuned(read(data)), policy.manifest.actions()
    parts = Splits.of(frame, split)
    told = task_grid(parts.assign(frame), catalogue, [Split.TRAIN, Split.VALIDATION])
    # Of the two collectives that last equally long here one tells.
    exact = parts.assign(tuned(read(truth))).filter(pl.col("collective") != "ReduceScatter")
    asked = task_grid(exact, catalogue, [Split.TEST])
    rivals = NcclDefault(), GradientBoosting(told, catalogue)
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
) -> tuple[float, Path]:
    """Train a recipe with one seed: its validation regret, and its policy."""
    uri = f"sqlite:///{data.parent / f'mlflow-{name}-{recipe}-{seed}.db'}"
    done = fit(data, make_recipe(recipe, settings), experiment="grid", tracking_uri=uri, seed=seed)
    return done.validation_regret, Path(done.run_directory) / "policy"


def _score(
    data: Path, truth: Path, learned: Sequence[tuple[str, Path]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    frame = tuned(read(data))
    catalogue = Catalogue.from_frame(usable(frame))
    parts = [task_grid(frame, catalogue, [s]) for s in (Split.TRAIN, Split.VALIDATION, Split.TEST)]
    loaded = [(name, TorchPolicy.load(path)) for name, path in learned]
    exact = task_grid(tuned(read(truth)), catalogue, [Split.TEST])
    assert exact.tasks.select(TASK_COLUMNS).equals(parts[2].tasks.select(TASK_COLUMNS))
    everywhere = np.arange(exact.tasks.height)
    beyond = np.flatnonzero(exact.default_us > (1.0 + WORSE) * exact.oracle_us)
    # Searchers try what was measured; the oracle is the truth's own.
    choices = {
        player.name: player.choose(exact if player.name == "oracle" else parts[2])
        for player in make_policies(parts[0], parts[1], catalogue, loaded)
    }
    for name, rows in ((NAME, everywhere), (BEYOND, beyond)):
        for summary in summarise(exact, rows, choices, WORSE).to_dicts():
            yield name, summary
