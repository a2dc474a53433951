"""Figures of the simulator: speed, and held-out errors of fits.

    python benchmarks/bench_simulator.py

Collectives a second of processor time of one thread, the best of several rounds of a quarter of a
second: the machine's other work makes rounds slower and none faster. Half the calls follow NCCL,
half a config that was drawn at random. Errors are those of simulator_fit.py, which compares with
published sweeps that do not ship with the project; without them its figures are null. Writes
out/bench/simulator.json.
"""

import time
from dataclasses import replace
from typing import Final

import numpy as np
import simulator_fit
from harness import write_result

from dynamiccl.errors import MissingPath
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import Workload, make_workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import Course, JobCalls, Tables

JOBS: Final = 2048
ROUND_S: Final = 0.25
ROUNDS: Final = 12
CONFIGS: Final = (
    ABSTAIN,
    *(Config(a, p) for a in (Algorithm.Tree, Algorithm.Ring) for p in Protocol),
    Config(Algorithm.NVLS, Protocol.Simple),
    Config(Algorithm.NVLSTree, Protocol.Simple),
)
LOOP: Final = ("ddp", "fsdp", "megatron", "moe")


def speeds() -> dict[str, float]:
    """Rates with and without observations, and the ratio of rates of short and long workloads."""
    loop = make_workload(LOOP, Group(4, 8))
    world = _world(loop)
    long = _world(replace(loop, calls=loop.calls * 100))
    return {
        "collectives_per_s_per_core": _rate(world, observed=False),
        "steps_with_observation_per_s_per_core": _rate(world, observed=True),
        "speed_jobs": float(JOBS),
        "speed_trace_calls": float(len(loop.calls)),
        # Both in turn, so that a slow minute is slow for both.
        "speed_of_100x_trace": _ratio(long, world),
    }


def _world(loop: Workload) -> World:
    return World(find_system("h100-ib"), loop, CONFIGS, find_scenario("congested"))


def _env(world: World, *, observed: bool) -> tuple[JobCalls, np.ndarray]:
    course = Course(episode_calls=1 << 60, delay_calls=20, observed=observed)
    env = JobCalls(world, Tables.of(world, ["default"]), JOBS, course)
    env.reset(seed=0)
    # A config for each key and job that does not change: drawing one is the player's work.
    random = np.random.default_rng(0)
    drawn = (random.random((JOBS, *world.mask.shape)) * world.mask).argmax(axis=2)
    drawn[::2] = 0
    return env, drawn


def _steps_per_s(env: JobCalls, drawn: np.ndarray) -> float:
    job = np.arange(JOBS)
    steps, began = 0, time.process_time()
    while (spent := time.process_time() - began) < ROUND_S:
        for _ in range(8):
            env.step(drawn[job, env.jobs.key])
        steps += 8 * JOBS
    return steps / spent


def _rate(world: World, *, observed: bool) -> float:
    env, drawn = _env(world, observed=observed)
    return max(_steps_per_s(env, drawn) for _ in range(ROUNDS))


def _ratio(first: World, second: World) -> float:
    pairs = [_env(world, observed=False) for world in (first, second)]
    ratios = [_steps_per_s(*pairs[0]) / _steps_per_s(*pairs[1]) for _ in range(ROUNDS)]
    return float(np.median(ratios))


#: Bars: what each figure has to reach.
LEAST: Final = {
    "collectives_per_s_per_core": 1_000_000.0,
    "steps_with_observation_per_s_per_core": 300_000.0,
}


def main() -> None:
    """Measure and write."""
    found: dict[str, float | int | str | None] = {**speeds()}
    try:
        found |= simulator_fit.figures()
    except MissingPath as error:
        # Named in the file, so that nobody takes it for a figure.
        found["simulator_fit_not_measured"] = str(error)
    found |= {f"{name}_bar": bar for name, bar in LEAST.items()}
    write_result("simulator", found)
    for name, bar in LEAST.items():
        if float(found[name] or 0.0) < bar:
            print(f"{name}: {found[name]} is below its bar of {bar:,.4g}")


if __name__ == "__main__":
    main()
