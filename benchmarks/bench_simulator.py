"""Figures of the simulator: speed, and held-out errors of fits.

    python benchmarks/bench_simulator.py

Collectives a second of processor time of one thread, the best of several rounds: the machine's
other work makes rounds slower and none faster. Half the calls follow NCCL, half a config that was
drawn at random. Errors above 1 MiB (0.05 = five per cent): every shipped system that says `fitted`
is fitted from its own numbers to published sweeps, which do not ship with the project, and what a
fit without each size says of it is compared with what was measured.
"""

import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
from harness import write_result
from sweeps import SWEEPS

from dynamiccl.collect import fit_simulator as fitting
from dynamiccl.collect.imports import import_files
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import PARAMETRIC, find_system, system_file
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import JobCalls, Tables

FILES: Final = (
    "b300_nvlink_allreduce.csv",
    "gb10_roce_ring.csv",
    "rtx5090_socket_tables.csv",
    "rtx5090_socket_raw_repeats.csv",
)
JOBS: Final = 2048
ROUND_S: Final = 0.25
ROUNDS: Final = 12
CONFIGS: Final = (
    ABSTAIN,
    *(Config(a, p) for a in (Algorithm.Tree, Algorithm.Ring) for p in Protocol),
    Config(Algorithm.NVLS, Protocol.Simple),
    Config(Algorithm.NVLSTree, Protocol.Simple),
)
#: Bars: what each rate, without and with observations, has to reach.
LEAST: Final = {
    "collectives_per_s_per_core": 1_000_000.0,
    "steps_with_observation_per_s_per_core": 300_000.0,
}


def rate(world: World, *, observed: bool) -> float:
    """Calls a second, in the best round."""
    env = JobCalls(world, Tables.of(world, ["default"]), JOBS, delay=20, observed=observed)
    env.reset(seed=0)
    # A config for each key and job that does not change: drawing one is the player's work.
    random = np.random.default_rng(0)
    drawn = (random.random((JOBS, *world.mask.shape)) * world.mask).argmax(axis=2)
    drawn[::2] = 0
    job, rates = np.arange(JOBS), []
    for _ in range(ROUNDS):
        steps, began = 0, time.process_time()
        while (spent := time.process_time() - began) < ROUND_S:
            for _ in range(8):
                env.step(drawn[job, env.jobs.key])
            steps += 8 * JOBS
        rates.append(steps / spent)
    return max(rates)


def fit_errors() -> dict[str, float | int | str | None]:
    """By system; `repeat_noise_*` is None where nothing was measured twice."""
    found: dict[str, float | int | str | None] = {}
    if not SWEEPS.is_dir():
        return {"simulator_fit_not_measured": f"no published sweeps in {SWEEPS}"}
    with tempfile.TemporaryDirectory() as folder:
        import_files([SWEEPS / name for name in FILES], Path(folder))
        for file in map(system_file, PARAMETRIC):
            if file.kind != "fitted":
                continue
            said = fitting.to_json(fitting.fit_system(file, Path(folder)))
            name, errors = file.name.replace("-", "_"), said["held_out_above_1mib"]
            found[f"fit_median_error_{name}"] = errors["median"]
            found[f"fit_p90_error_{name}"] = errors["p90"]
            found[f"repeat_noise_{name}"] = errors["noise"]
            found[f"fit_held_out_cells_{name}"] = errors["cells"]
            found[f"fit_reaches_bar_{name}"] = int(not said["misses"])
    return found


def main() -> None:
    """Measure and write."""
    loop = make_workload(("ddp", "fsdp", "megatron", "moe"), Group(4, 8))
    world = World(find_system("h100-ib"), loop, CONFIGS, find_scenario("congested"))
    rates = {name: rate(world, observed="observation" in name) for name in LEAST}
    write_result("simulator", rates | fit_errors())
    for name, bar in LEAST.items():
        if rates[name] < bar:
            print(f"{name}: {rates[name]} is below its bar of {bar:,.4g}")


if __name__ == "__main__":
    main()
