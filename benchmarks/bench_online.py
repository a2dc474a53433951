"""Learning inside the simulated network: what A3C gains there, and how fast it plays.

    python benchmarks/bench_online.py        # half an hour on 2 cores

Of each place a quiet sweep is measured (simulated), and `a3c` learns at the workload's calls, moved
to octaves of sizes for training, under the place's scenario. Policies play the real workload, as
recorded and *shifted* (half as strong again and twice as fast; learning_scenarios.py), beside
NCCL's own choice, the best quiet table and an oracle that knows the state and is as late as ranks
agree. *Gain* is the share of NCCL's time that is saved; figures are ratios of sums over places and
seeds to the delayed oracle's gain, with 95 % bootstraps of (place, seed) and of jobs.

Writes out/bench/online.json.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from harness import write_result
from learning_scenarios import SWEEP, shifted

from dynamiccl.collect.simulate import simulate
from dynamiccl.evaluate.simulate.lineup import (
    DELAYED,
    NCCL,
    Setting,
    policy_contenders,
    simple_contenders,
)
from dynamiccl.evaluate.simulate.rollout import roll_out
from dynamiccl.train.data import load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.online.a3c import make_loop
from dynamiccl.train.online.places import Place
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe

PLACES: Final = ("b300-nvlink:decode:busy-host:1x8", "h100-ib:decode:congested:4x8")
SEEDS: Final = 3
CALLS: Final = 30_000
JOBS: Final = 8
OURS: Final = "a3c"
QUIET: Final = "best quiet table"
#: Updates in a measurement of speed, and pairs of measurements.
SPEED_UPDATES: Final = 40
PAIRS: Final = 5
Times = Mapping[str, npt.NDArray[np.float64]]  # (JOBS,) us of communication, by player


def main() -> None:
    """Train, play, and time."""
    found: dict[str, list[Times]] = {"": [], "_shifted": []}
    figures: dict[str, float | int | str | None] = {"seeds": SEEDS, "calls": CALLS, "jobs": JOBS}
    with tempfile.TemporaryDirectory() as scratch:
        data = {place: _measured(Path(scratch) / str(i), place) for i, place in enumerate(PLACES)}
        for place, folder in data.items():
            for seed in range(SEEDS):
                policy, seconds = _trained(folder, place, seed)
                figures[f"train_s {place} {seed}"] = seconds
                for suffix, times in _played(place, policy, seed).items():
                    found[suffix].append(times)
        figures |= _speeds(data[PLACES[0]])
    for suffix, times in found.items():
        for name, player in (("gain", OURS), ("quiet_gain", QUIET)):
            figures |= _gain(times, player, f"{name}_of_delayed_oracle{suffix}")
        figures |= _ratio(times, OURS, NCCL, f"time_vs_default{suffix}")
    write_result("online", figures)


def _measured(folder: Path, place: str) -> Path:
    at = Place.parse(place)
    shape = at.workload.calls[0].group
    group = f"{{ num_nodes = {shape.num_nodes}, ranks_per_node = {shape.ranks_per_node} }}"
    names = list(dict.fromkeys(call.collective.wire for call in at.workload.calls))
    system = at.system.name
    text = SWEEP.format(system=system, collectives=names, groups=group, seed=0)
    simulate(text, folder)
    return folder


def _trained(data: Path, place: str, seed: int) -> tuple[TorchPolicy, float]:
    with tempfile.TemporaryDirectory() as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        recipe = make_recipe(OURS, [f"places={place}"])
        done = fit(data, recipe, experiment="online", tracking_uri=uri, seed=seed)
        return TorchPolicy.load(Path(done.run_directory) / "policy"), done.seconds


def _played(place: str, policy: TorchPolicy, seed: int) -> dict[str, Times]:
    at = Place.parse(place)
    setting = Setting(at.system, at.workload, at.scenario, calls=CALLS, jobs=JOBS)
    found = {}
    for suffix, scenario in (("", at.scenario), ("_shifted", shifted(at.scenario))):
        here = replace(setting, scenario=scenario)
        rows = [row for row in simple_contenders(here) if row.name in {NCCL, QUIET, DELAYED}]
        rows += policy_contenders(here, OURS, policy, None)
        times = {}
        for row in rows:
            env, player = row.prepare(here, seed)
            times[row.name] = roll_out(env, player, seed=10_000 + seed)[0].total_us
        found[suffix] = times
    return found


def _gain(times: Sequence[Times], player: str, name: str) -> dict[str, float]:
    """Of what the delayed oracle gains."""

    def ratio(picked: Sequence[Times], jobs: npt.NDArray[np.int64]) -> float:
        def gain(who: str) -> float:
            return sum(1.0 - float(t[who][jobs].sum() / t[NCCL][jobs].sum()) for t in picked)

        return gain(player) / gain(DELAYED)

    return _with_interval(times, ratio, name)


def _ratio(times: Sequence[Times], player: str, other: str, name: str) -> dict[str, float]:
    def ratio(picked: Sequence[Times], jobs: npt.NDArray[np.int64]) -> float:
        return float(np.mean([t[player][jobs].sum() / t[other][jobs].sum() for t in picked]))

    return _with_interval(times, ratio, name)


def _with_interval(times, figure, name: str) -> dict[str, float]:  # type: ignore[no-untyped-def]
    random = np.random.default_rng(0)
    every = np.arange(JOBS)
    drawn = [
        figure(
            [times[i] for i in random.integers(len(times), size=len(times))],
            random.integers(JOBS, size=JOBS),
        )
        for _ in range(500)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {name: figure(times, every), f"{name}_lo": float(low), f"{name}_hi": float(high)}


def _speeds(data: Path) -> dict[str, float]:
    """Simulated calls a second by one actor and by two, in turns."""
    loaded = load_data(data, 0, with_costs=True)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for pair in range(PAIRS):
        for actors in (1, 2):
            settings = [f"places={PLACES[0]}", f"actors={actors}", "steps_per_epoch=20"]
            steps = f"steps={SPEED_UPDATES + 20}"
            recipe = make_recipe(OURS, [*settings, steps])
            loop, _ = make_loop(loaded, recipe, pair, uses_cost=True)
            loop.run_epoch()  # until all play
            before, began = loop.curves["calls"][-1], time.monotonic()
            while not loop.is_over:
                loop.run_epoch()
            played = loop.curves["calls"][-1] - before
            rates[actors].append(played / (time.monotonic() - began))
            loop.close()
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    return {
        "a3c_env_steps_per_s_1": statistics.median(rates[1]),
        "a3c_env_steps_per_s_2": statistics.median(rates[2]),
        "a3c_scaling_2": statistics.median(ratios),
        "a3c_scaling_2_lo": min(ratios),
        "a3c_scaling_2_hi": max(ratios),
    }


if __name__ == "__main__":
    main()
