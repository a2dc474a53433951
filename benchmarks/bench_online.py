"""Learning inside the simulated network: what A3C and IMPALA gain there, and how fast they play.

    python benchmarks/bench_online.py            # an hour on 2 cores
    python benchmarks/bench_online.py speeds     # the speeds alone, five minutes

In each of `PLACES` (scenario_places.py) the recipes of `RECIPES` learn from the same sweep as
the offline policy, at the workload's calls moved to octaves for training, under the place's
scenario in strengths, dwell times and times that are drawn anew for each episode. All then play the
real workload, under the scenario as it was recorded and *shifted* (half as strong again, twice as
fast: outside of what was drawn), beside NCCL, the offline policy with its Trigger, a fitted
threshold rule, and an oracle that knows the state and is as late as ranks agree.

*Gain* is the share of NCCL's communication time that is saved; figures are ratios of its sums over
places to the delayed oracle's, with 95 % bootstraps of seeds and jobs. Writes
out/bench/online.json: keys without a recipe's name are those of the recipe that gains most in the
scenario as recorded on seed 0, and are of the other seeds.
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from harness import OUT, write_result
from learning_figures import parallel
from learning_scenarios import OURS, RULE, gain_row, play_place
from scenario_places import JOBS, SWEEP, trained
from scenario_places import PLACES as ALL_PLACES

from dynamiccl.collect.simulated import simulate
from dynamiccl.evaluate.simulate.players import NCCL
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.online.impala import Learner
from dynamiccl.train.online.make import make_loop
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe import make_recipe

#: Of scenario_places.py.
PLACES: Final = ("b300, decode and lora, busy-host", "h100 4x8, decode, congested")
RECIPES: Final = ("a3c-lstm", "impala-lstm")
SEEDS: Final = 3
#: Updates of a run: five minutes and less, where nothing runs beside it.
STEPS: Final = 600
WORLDS: Final = {"as recorded": "", "shifted": "_shifted"}
#: Updates in a measurement of speed, and pairs of measurements.
SPEED_UPDATES: Final = 40
PAIRS: Final = 5
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
        group = "{ num_nodes = 1, ranks_per_node = 8 }"
        what = {"system": "b300-nvlink", "collectives": ["AllReduce"], "groups": group}
        simulate(SWEEP.format(**what, seed=0), Path(folder))
        figures |= _speeds(load_data(Path(folder), 0, with_costs=True))
    write_result("online", figures)


def _gains() -> dict[str, Any]:
    """All recipes on seed 0; the one that gains most there alone on the other seeds."""
    with tempfile.TemporaryDirectory() as folder:
        found = _played(Path(folder), [0], RECIPES)
        best = max(RECIPES, key=lambda row: _gain(found, row))
        print(f"{best} goes on: { ({row: round(_gain(found, row), 4) for row in RECIPES}) }")
        later = _played(Path(folder), list(range(1, SEEDS)), (best,))
    figures: dict[str, Any] = {"seeds": SEEDS, "steps": STEPS, "recipe": best, "data_sets": {}}
    for world, suffix in WORLDS.items():
        for data_set, times in ((f"online, {world}", found), (f"online, {world}, later", later)):
            rows = dict.fromkeys(row for row, *_ in times)
            figures["data_sets"][data_set] = {
                row: gain_row(times, row, world, PLACES) for row in rows
            }
        of = "gain_of_delayed_oracle"
        named = suffix or "_of_delayed_oracle"
        for key, row in ((f"gain{named}", best), (f"rule_gain{named}", RULE)):
            mine = gain_row(later, row, world, PLACES)
            figures |= {f"{key}{end}": mine[f"{of}{end}"] for end in ("", "_lo", "_hi")}
        figures |= _ratio(later, best, NCCL, world, f"time_vs_default{suffix}")
        figures |= _ratio(later, best, OURS, world, f"time_vs_offline_policy{suffix}")
    return figures


def _played(folder: Path, seeds: Sequence[int], recipes: Sequence[str]) -> Times:
    """Time of every row, in each place on each seed."""
    jobs = []
    for seed in seeds:
        for index, place in enumerate(PLACES):
            settings = [f"places={ALL_PLACES[place].text}", f"steps={STEPS}"]
            others = {name: partial(_trained, name, settings, seed) for name in recipes}
            jobs.append((folder / f"{index}-{seed}", place, seed, others))
    found: Times = {}
    for (_, place, seed, _), rows in parallel(play_place, jobs):
        print(place, seed, {row: round(float(us.mean())) for row, us in rows.items()}, flush=True)
        for (row, world), times in rows.items():
            found.setdefault((row, world, place), []).append(times)
    return found


def _trained(name: str, settings: Sequence[str], seed: int, data: Path) -> TorchPolicy:
    began = time.monotonic()
    policy = trained(data, name, settings, seed)
    print(f"{name} in {settings[0]}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    return policy


def _gain(found: Times, row: str) -> float:
    """Mean over places of the share of NCCL's time that is saved."""
    world = "as recorded"
    gains = []
    for place in PLACES:
        mine, usual = (np.sum(found[name, world, place]) for name in (row, NCCL))
        gains.append(1.0 - mine / usual)
    return float(np.mean(gains))


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
            # More than are waited for: no actor stops while others are timed.
            settings += [f"steps={SPEED_UPDATES + 60}"]
            recipe = make_recipe(recipe_name, settings)
            updates: Any = make_loop(data, recipe, pair, uses_cost=True).source
            with contextlib.closing(updates):
                updates.start(0)
                for _ in range(20):  # until all play
                    updates.next()
                began = time.monotonic()
                calls = sum(updates.next().calls for _ in range(SPEED_UPDATES))
                found.append(calls / (time.monotonic() - began))
            if isinstance(updates, Learner):
                busy.append(updates.metrics["learner_utilisation"])
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
