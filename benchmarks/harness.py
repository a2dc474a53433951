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
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from dynamiccl.datasets.store import git_commit

ROOT: Final = Path(__file__).resolve().parents[1]
#: Results land here, one file for each benchmark; not under version control.
OUT: Final = ROOT / "out" / "bench"
#: By name: the figure, and its interval as NAME_lo and NAME_hi; None where there is none.
Number = float | None
Figures = dict[str, Number]
# A benchmark run as a script finds the tests' builders of rows and manifests, too.
sys.path.append(str(ROOT))


def machine_facts() -> dict[str, float | int | str | None]:
    """Facts about the machine that the figures were measured on."""
    return {
        "commit": git_commit(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count() or 0,
        "python": platform.python_version(),
    }


def write_result(
    name: str,
    figures: Mapping[str, float | int | str | None],
    tables: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write `figures` and the machine they were taken on to out/bench/NAME.json; print them.

    `tables` stand in the file only, under their names.
    """
    record: dict[str, float | int | str | None] = {**figures, **machine_facts()}
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps({**record, **tables}, indent=2) + "\n", encoding="utf-8")
    for key, value in record.items():
        told = f"{value:,.6g}" if isinstance(value, float) else str(value)
        sys.stdout.write(f"{key:<50} {told}\n")
    return path


def run_parts(name: str, parts: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
    """Run the parts that the command line names, or all; the figures of others stay.

    Each part's figures go to out/bench/NAME.json when it ends, with its minutes and commit.
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


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
