"""Shared by all benchmarks: figures with intervals, work side by side, and where figures go."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.store import git_commit
from dynamiccl.simulator.systems import System

ROOT: Final = Path(__file__).resolve().parents[1]
# A benchmark run as a script finds the tests' builders of rows, jobs and sweeps, too.
sys.path.append(str(ROOT))
from tests.data_sets import sweep_text  # noqa: E402

#: Three collectives that a system's files tell apart, as a sweep's file names them.
COLLECTIVES: Final = '["AllReduce", "AllGather", "ReduceScatter"]'
#: Results land here, one file for each benchmark; not under version control.
OUT: Final = ROOT / "out" / "bench"
#: All draws, in place of a reduced run.
FULL: Final = bool(os.environ.get("FULL"))
#: By name: the figure, and its interval as NAME_lo and NAME_hi; None where there is none.
Number = float | None
Figures = dict[str, Number]


def write_result(name: str, figures: Mapping[str, Any]) -> None:
    """Write `figures` and the machine they were taken on to out/bench/NAME.json; print numbers."""
    machine = {
        "commit": git_commit(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count() or 0,
        "python": platform.python_version(),
    }
    record = {**figures, **machine}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for key, value in record.items():
        if not isinstance(value, dict | list):
            print(f"{key:<50} {f'{value:,.6g}' if isinstance(value, float) else value}")


def run_parts(
    name: str, parts: Mapping[str, Callable[[], Mapping[str, Any]]], **about: int
) -> None:
    """Run the parts that the command line names, or all; the figures of others stay.

    Each part's figures go to out/bench/NAME.json when it ends, with its minutes and commit, and as
    PART_KEY what `about` says of all parts.
    """
    asked = sys.argv[1:] or list(parts)
    if unknown := set(asked) - set(parts):
        sys.exit(f"no part {', '.join(sorted(unknown))}; choose from {', '.join(parts)}")
    path = OUT / f"{name}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part in asked:
        began = time.monotonic()
        found.update(parts[part]())
        minutes = round((time.monotonic() - began) / 60, 2)
        found |= {f"minutes_{part}": minutes, f"commit_{part}": git_commit()}
        found |= {f"{part}_{key}": value for key, value in about.items()}
        write_result(name, found)


def student(values: Sequence[float], name: str = "mean") -> Figures:
    """The mean of some replicates as `name`, and its 95 % interval; None where there is none."""
    from dynamiccl.train.study import student_interval

    low, high = student_interval(values)
    mean = float(np.mean(values)) if values else None
    return {name: mean, f"{name}_lo": low, f"{name}_hi": high}


def parallel(
    work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[Any, Any]]:
    """Each job with its result, as they come; one thread each, on all cores."""
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=get_context("spawn"), initializer=_one_thread
    ) as pool:
        running = {pool.submit(work, *job): job for job in jobs}
        for future in as_completed(running):
            yield running[future], future.result()


def simulated(
    out: Path, seed: int, cycles: int, lines: Mapping[str, object], on: System | None = None
) -> Path:
    """A simulated sweep of H100 nodes with 2 % of noise; `lines` are those of its file."""
    about = {"name": f'"s{seed}"', "system": '"h100-ib-simulated"', **lines, "cycles": cycles}
    noise = about.pop("noise", "noise_sigma = 0.02")
    return simulate(sweep_text(**about, seed=f"{seed}\n{noise}"), out, on)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
