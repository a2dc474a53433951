"""Overhead of the plugin: nccl-tests without it, with it abstaining, and with it recording.

The three take turns, so that what else happens on the machine meets all of them; differences are
taken between neighbours of one round and their interval over rounds.
"""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dynamiccl.errors import MachineError
from dynamiccl.libraries import PROFILER_NAME
from dynamiccl.machine import Machine

WITHOUT: Final = "without"
ABSTAINING: Final = "abstaining"
RECORDING: Final = "recording"
VARIANTS: Final = (WITHOUT, ABSTAINING, RECORDING)
BINARY: Final = "all_reduce_perf"
_OURS: Final = ("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN")
_SIZES: Final = ("-b", "8", "-e", "64M", "-f", "2")
_CALLS: Final = ("-w", "20", "-n", "200", "-c", "0")
_TIMEOUT_S: Final = 600.0
#: Columns of nccl-tests' text: size, count, type, redop, root, then out-of-place time in us.
_TIME_COLUMN: Final = 5
_DRAWS: Final = 2000
#: Times in us by size, of one variant in one round.
Times = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Cost:
    """Slowdown of a variant relative to no plugin, over all sizes."""

    variant: str
    median_percent: float
    #: 95 % interval over rounds.
    low_percent: float
    high_percent: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """The measured overheads."""

    num_gpus: int
    num_rounds: int
    #: Size -> variant -> median over rounds, in us.
    medians_us: dict[int, dict[str, float]]
    costs: list[Cost]


def measure(
    machine: Machine, plugin: Path, nccl_tests: Path, calls_dir: Path, num_rounds: int
) -> Overhead:
    """Measure on all GPUs of this node; raises MachineError where that is not possible."""
    num_gpus = sum(
        line.startswith("GPU ") for line in machine.run("nvidia-smi", "-L").output.splitlines()
    )
    if num_gpus < 2:
        raise MachineError(
            f"{num_gpus} GPUs here (nvidia-smi -L): a collective needs two; run this on a GPU node"
        )
    binary = nccl_tests / BINARY
    if not os.access(binary, os.X_OK):
        raise MachineError(f"no {binary}; build nccl-tests and name its folder with --nccl-tests")
    command = [str(binary), *_SIZES, *_CALLS, "-g", str(num_gpus)]
    environments = {name: environment(name, plugin, calls_dir) for name in VARIANTS}
    return compare(
        lambda variant: _run(command, environments[variant]), num_gpus=num_gpus, rounds=num_rounds
    )


def compare(run: Callable[[str], Times], *, num_gpus: int, rounds: int) -> Overhead:
    """Run the variants in alternating order, and compare."""
    times: dict[str, list[Times]] = {variant: [] for variant in VARIANTS}
    for index in range(rounds):
        shift = index % len(VARIANTS)
        for variant in (*VARIANTS[shift:], *VARIANTS[:shift]):
            times[variant].append(run(variant))
    sizes = sorted(set.intersection(*(set(t) for found in times.values() for t in found)))
    medians = {
        size: {v: float(np.median([t[size] for t in found])) for v, found in times.items()}
        for size in sizes
    }
    costs = [_cost(variant, times, sizes) for variant in VARIANTS[1:]]
    return Overhead(num_gpus, rounds, medians, costs)


def environment(variant: str, plugin: Path, calls_dir: Path) -> dict[str, str]:
    """The user's environment plus the plugin settings of a variant."""
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DYNAMICCL_") and name not in _OURS
    }
    if variant == ABSTAINING:  # without an artifact
        found |= dict.fromkeys(_OURS, str(plugin))
    elif variant == RECORDING:
        found |= {
            "NCCL_PROFILER_PLUGIN": str(plugin.with_name(PROFILER_NAME)),
            "DYNAMICCL_MODE": "observe",
            "DYNAMICCL_CALLS_DIR": str(calls_dir),
        }
    return found


def read_times(text: str) -> dict[int, float]:
    """Size -> out-of-place time in us of nccl-tests' text."""
    rows = (line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+\w+", line))
    return {int(row[0]): float(row[_TIME_COLUMN]) for row in rows if len(row) > _TIME_COLUMN}


def _run(command: Sequence[str], env: Mapping[str, str]) -> Times:
    try:
        done = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"{command[0]} had not ended after {_TIMEOUT_S:g} s") from None
    times = read_times(done.stdout)
    if done.returncode != 0 or not times:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise MachineError(f"{command[0]} ended with {done.returncode}: {last[:200] or 'no rows'}")
    return times


def _cost(variant: str, times: Mapping[str, Sequence[Times]], sizes: Sequence[int]) -> Cost:
    rounds = np.array(
        [
            np.mean([np.log(with_it[size] / without[size]) for size in sizes])
            for with_it, without in zip(times[variant], times[WITHOUT], strict=True)
        ]
    )
    draws = np.random.default_rng(0).choice(rounds, size=(_DRAWS, len(rounds))).mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    percents = [100.0 * float(np.expm1(x)) for x in (np.median(rounds), low, high)]
    return Cost(variant, *percents)
