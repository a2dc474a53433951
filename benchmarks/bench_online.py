"""Learning inside the simulated network: what A3C and IMPALA gain there, and how fast they play.

    python benchmarks/bench_online.py            # an hour and a half on 2 cores
    python benchmarks/bench_online.py speeds     # the speeds alone, five minutes

In each of `PLACES` (learning_scenarios.py) the recipes of `RECIPES` learn from the same sweep as
the offline policy, at the workload's calls moved to octaves for training, under the place's
scenario in strengths, dwell times and times that are drawn anew for each episode. All then play the
real workload, under the scenario as it was recorded and *shifted* (half as strong again, twice as
fast: outside of what was drawn), beside NCCL, the offline policy with its Trigger, a fitted
threshold rule, and an oracle that knows the state and is as late as ranks agree.

*Gain* is the share of NCCL's communication time that is saved; figures are ratios of its sums over
places to the delayed oracle's, with 95 % bootstraps of seeds and jobs. Writes
out/bench/online.json: keys without a recipe's name are those of the recipe that gains most in the
scenario as recorded on seed 0, and are of the other seeds where there are any.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from harness import OUT, write_result
from learning_scenarios import JOBS, NCCL, OURS, RULE, gain_row, play_place

from dynamiccl.collect.simulate import simulate
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.online.impala import Learner
from dynamiccl.train.online.make import make_loop
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe

#: Of learning_scenarios.py, and where actors play there.
PLACES: Final = {
    "b300, decode and lora, busy-host": "b300-nvlink:decode+lora:busy-host:1x8",
    "h100 4x8, decode, congested": "h100-ib:decode:congested:4x8",
}
RECIPES: Final = ("a3c", "a3c-lstm", "impala-lstm")
SEEDS: Final = 2
WORLDS: Final = {"as recorded": "", "shifted": "_shifted"}
#: Updates in a measurement of speed, and pairs of measurements.
SPEED_UPDATES: Final = 40
PAIRS: Final = 5
SWEEP: Final = """
name = "quiet"
system = "b300-nvlink"
collectives = ["AllReduce"]
groups = [{ num_nodes = 1, ranks_per_node = 8 }]
sizes = { min = "64K", max = "64M" }
cycles = 2
[simulator]
system = "b300-nvlink"
seed = 0
"""
Times = dict[tuple[str, str, str], list[npt.NDArray[np.float64]]]


def main() -> None:
    """Train, play, and time."""
    path = OUT / "online.json"
    figures: dict[str, Any] = {}
    if sys.argv[1:]:
        if path.exists():
            figures = json.loads(path.read_text(encoding="utf-8"))
    else:
        figures = _gains()
    with tempfile.TemporaryDirectory() as folder:
        simulate(SWEEP, Path(folder))
        figures |= _speeds(load_data(Path(folder), 0, with_costs=True))
    write_result("online", figures)


def _gains() -> dict[str, Any]:
    found: Times = {}
    figures: dict[str, Any] = {"seeds": SEEDS}
    for seed in range(SEEDS):
        for place, at in PLACES.items():
            settings = [f"places={at}"]
            others = {name: partial(_trained, name, settings, seed) for name in RECIPES}
            with tempfile.TemporaryDirectory() as folder:
                for (row, world), times in play_place(Path(folder), place, seed, others).items():
                    found.setdefault((row, world, place), []).append(times)
            print(place, seed, {r: _seeds_gain(found, r, [-1]) for r in (*RECIPES, OURS, RULE)})
    best = max(RECIPES, key=lambda row: _seeds_gain(found, row, [0]))
    judged = {name: times[1:] or times for name, times in found.items()}
    figures |= {"recipe": best, "data_sets": {}}
    for world, suffix in WORLDS.items():
        rows = dict.fromkeys(row for row, *_ in found)
        table = {row: gain_row(found, row, world, tuple(PLACES)) for row in rows}
        figures["data_sets"][f"online, {world}"] = table
        of = "gain_of_delayed_oracle"
        named = suffix or "_of_delayed_oracle"
        for key, row in ((f"gain{named}", best), (f"rule_gain{named}", RULE)):
            mine = gain_row(judged, row, world, tuple(PLACES))
            figures |= {f"{key}{end}": mine[f"{of}{end}"] for end in ("", "_lo", "_hi")}
        figures |= _ratio(judged, best, NCCL, world, f"time_vs_default{suffix}")
        figures |= _ratio(judged, best, OURS, world, f"time_vs_offline_policy{suffix}")
    return figures


def _trained(name: str, settings: Sequence[str], seed: int, data: Path) -> TorchPolicy:
    uri = f"sqlite:///{data.parent / f'{name}-online.db'}"
    recipe = make_recipe(name, settings)
    done = fit(data, recipe, experiment="online", tracking_uri=uri, seed=seed)
    print(f"{name}: {done.seconds:.0f} s")
    return TorchPolicy.load(Path(done.run_directory) / "policy")


def _seeds_gain(found: Mapping[tuple[str, str, str], Any], row: str, seeds: list[int]) -> float:
    """Mean share of NCCL's time that is saved, in the places that were played."""
    pairs = [
        (times[seed].sum(), found[NCCL, world, place][seed].sum())
        for (name, world, place), times in found.items()
        for seed in seeds
        if name == row and world == "as recorded"
    ]
    return float(np.mean([1.0 - mine / usual for mine, usual in pairs]))


def _ratio(found: Times, row: str, other: str, world: str, name: str) -> dict[str, float]:
    """Mean over places and seeds of a row's time over another's, with its interval."""
    random = np.random.default_rng(0)
    pairs = [
        both
        for place in PLACES
        for both in zip(found[row, world, place], found[other, world, place], strict=True)
    ]

    def ratio(which: npt.NDArray[np.int64], jobs: npt.NDArray[np.int64]) -> float:
        return float(np.mean([pairs[i][0][jobs].sum() / pairs[i][1][jobs].sum() for i in which]))

    every = np.arange(len(pairs))
    drawn = [
        ratio(random.integers(len(pairs), size=len(pairs)), random.integers(JOBS, size=JOBS))
        for _ in range(500)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    value = ratio(every, np.arange(JOBS))
    return {name: value, f"{name}_lo": float(low), f"{name}_hi": float(high)}


def _speeds(data: TrainingData) -> dict[str, float]:
    """Simulated calls a second: A3C by one actor and by two, in turns; and IMPALA by two."""
    rates: dict[str, list[float]] = {"a3c 1": [], "a3c 2": [], "impala-lstm 2": []}
    busy: list[float] = []
    for pair in range(PAIRS):
        for name, found in rates.items():
            recipe_name, actors = name.split()
            settings = ["places=b300-nvlink:decode:busy-host:1x8", f"actors={actors}"]
            settings += ["steps_per_epoch=20", f"steps={SPEED_UPDATES + 20}"]
            recipe = make_recipe(recipe_name, settings)
            loop, _ = make_loop(data, recipe, pair, uses_cost=True)
            loop.run_epoch()  # until all play
            before, began = loop.curves["calls"][-1], time.monotonic()
            while not loop.is_over:
                loop.run_epoch()
            found.append((loop.curves["calls"][-1] - before) / (time.monotonic() - began))
            if isinstance(loop.updates, Learner):
                busy.append(loop.updates.metrics["learner_utilisation"])
    ratios = [two / one for one, two in zip(rates["a3c 1"], rates["a3c 2"], strict=True)]
    return {
        "a3c_env_steps_per_s_1": statistics.median(rates["a3c 1"]),
        "a3c_env_steps_per_s_2": statistics.median(rates["a3c 2"]),
        "a3c_scaling_2": statistics.median(ratios),
        "a3c_scaling_2_lo": min(ratios),
        "a3c_scaling_2_hi": max(ratios),
        "impala_env_steps_per_s": statistics.median(rates["impala-lstm 2"]),
        "learner_utilisation": statistics.median(busy),
    }


if __name__ == "__main__":
    main()
