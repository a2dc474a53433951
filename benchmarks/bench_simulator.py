"""Figures of the simulator: speed, and held-out errors of fits.

    python benchmarks/bench_simulator.py

Collectives a second of processor time of one thread, the best of several rounds of a quarter of a
second: the machine's other work makes rounds slower and none faster. Half the calls follow NCCL,
half a config that was drawn at random. Errors: every shipped system that says `fitted` is fitted
from its own numbers to published sweeps, which do not ship with the project (without them its
figures are null), and what a fit without each size says of it is compared with what was measured.
Writes out/bench/simulator.json.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import write_result

from dynamiccl.collect import fit_simulator as fitting
from dynamiccl.collect.imports import import_files
from dynamiccl.errors import MissingPath
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import PARAMETRIC, SystemFile, find_system, system_file
from dynamiccl.simulator.workloads import Workload, make_workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import JobCalls, Tables

DATA: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "sweeps"
SWEEPS: Final = (
    "b300_nvlink_allreduce.csv",
    "gb10_roce_ring.csv",
    "rtx5090_socket_tables.csv",
    "rtx5090_socket_raw_repeats.csv",
)

#: A built-in system, and the published one of another number of ranks that no fit has seen.
BASE: Final = "rtx5090-sockets"
UNSEEN: Final = (
    "rtx-5090-workstation-3-ranks-on-one-gpu-tcp-sockets-p2p-and-shm-off-a-host-id-per-rank"
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
    env = JobCalls(world, Tables.of(world, ["default"]), JOBS, delay=20, observed=observed)
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


def imported(folder: Path) -> Path:
    """A store of the published sweeps. Raises MissingPath without them."""
    if not DATA.is_dir():
        raise MissingPath("published sweeps", DATA, "put the folder that holds them there")
    import_files([DATA / name for name in SWEEPS], folder)
    return folder


def unseen(store: Path) -> dict[str, Any]:
    """Errors above 1 MiB of the built-in parameters on three ranks, which their fit leaves out."""
    document = system_file(BASE).model_dump()
    document["fit"] |= {"systems": (UNSEEN,)}
    document["groups"] = [{"num_nodes": 3, "ranks_per_node": 1}]
    told = SystemFile.model_validate(_by_name(document))
    cells, _ = fitting.read_cells(store, told)
    judged = fitting.predict(told, cells)
    return fitting.errors_of(
        [cell for cell in judged if cell.call.size_bytes > fitting.LARGE_BYTES]
    )


def _by_name(document: dict[str, Any]) -> dict[str, Any]:
    """The dump with NCCL's names instead of its numbers, as a file has them."""

    def named(value: Any) -> Any:
        if hasattr(value, "wire"):
            return value.wire
        if isinstance(value, Mapping):
            return {key: named(one) for key, one in value.items()}
        return [named(one) for one in value] if isinstance(value, list | tuple) else value

    found: dict[str, Any] = named(document)
    return found


def fit_errors() -> dict[str, float | int | str | None]:
    """Held-out errors above 1 MiB by system (0.05 = five per cent), and by size class.

    Keys end in the system's name with underscores: `fit_median_error_b300_nvlink`,
    `fit_p90_error_*`, `repeat_noise_*` (None where nothing was measured twice),
    `fit_held_out_cells_*`, `fit_reaches_bar_*` (1 or 0), and
    `fit_median_error_*_to_16_mib` for each class. `unseen_median_error_*` are the shipped numbers'
    errors on measurements outside every fit. Raises MissingPath without the data.
    """
    found: dict[str, float | int | str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = imported(Path(folder))
        fitted = [file for name in PARAMETRIC if (file := system_file(name)).kind == "fitted"]
        fits = [fitting.fit_system(file, store) for file in fitted]
        errors = unseen(store)
    names = {"median": "unseen_median_error", "p90": "unseen_p90_error", "cells": "unseen_cells"}
    found |= {f"{name}_{_key(BASE)}": errors[key] for key, name in names.items()}
    for fit in fits:
        name = _key(fit.file.name)
        said = fitting.to_json(fit)
        errors = said["held_out_above_1mib"]
        found[f"fit_median_error_{name}"] = errors["median"]
        found[f"fit_p90_error_{name}"] = errors["p90"]
        found[f"repeat_noise_{name}"] = errors["noise"]
        found[f"fit_held_out_cells_{name}"] = errors["cells"]
        found[f"fit_reaches_bar_{name}"] = int(not said["misses"])
        for size, part in said["by_size"].items():
            found[f"fit_median_error_{name}_{_key(size)}"] = part["median"]
            found[f"fit_p90_error_{name}_{_key(size)}"] = part["p90"]
    return found


def _key(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


#: Bars: what each figure has to reach.
LEAST: Final = {
    "collectives_per_s_per_core": 1_000_000.0,
    "steps_with_observation_per_s_per_core": 300_000.0,
}


def main() -> None:
    """Measure and write."""
    found: dict[str, float | int | str | None] = {**speeds()}
    try:
        found |= fit_errors()
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
