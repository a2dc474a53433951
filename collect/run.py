"""Run a sweep: cycles of all trials in random order, one part on disk for each finished cycle.

The cycle is the outer loop, so that slow drift of the machine is shared by all configs and the
default is interleaved with what is compared with it. A cycle is a run: its measurements are
correlated, those of different cycles are independent.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from dynamiccl.collect.runner import Row, Runner
from dynamiccl.collect.sweep import Sweep, Trial
from dynamiccl.datasets.provenance import run_record
from dynamiccl.datasets.rows import measurements_table
from dynamiccl.datasets.schema import Status
from dynamiccl.datasets.store import (
    part_paths,
    part_provenance,
    scan,
    sweep_folder,
    write_part,
)
from dynamiccl.errors import UserError


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a sweep left on disk."""

    trials: int
    cycles_done: int
    cycles_skipped: int
    rows_written: int
    rows_by_status: dict[str, int]


def run_name(cycle: int) -> str:
    """Name of the run that a cycle makes."""
    return f"cycle-{cycle}"


def run_sweep(
    sweep: Sweep,
    runner: Runner,
    out: Path,
    *,
    resume: bool,
    progress: Callable[[], None] = lambda: None,
) -> RunSummary:
    """Measure every trial once a cycle and write a part after each cycle.

    Args:
        sweep: what to measure.
        runner: what measures it.
        out: data directory; made when missing.
        resume: skip cycles whose part is on disk, instead of refusing to add to them.
        progress: called after every trial.

    Raises:
        UserError: the sweep is in `out` already and `resume` is False, or with other trials.
    """
    runner.check(sweep.trials)
    out.mkdir(parents=True, exist_ok=True)
    done = _finished_runs(sweep, out)
    if done and not resume:
        raise UserError(
            f"{out} already holds {len(done)} cycles of sweep '{sweep.file.name}' on "
            f"'{sweep.file.system}'; go on with --resume, or take another --out or name"
        )
    if done:
        _check_same_trials(sweep, out)
    rows_written = 0
    by_status: dict[str, int] = {}
    todo = [cycle for cycle in range(sweep.file.cycles) if run_name(cycle) not in done]
    for cycle in todo:
        rows = _one_cycle(sweep, runner, cycle, progress)
        write_part(
            out,
            measurements_table(rows),
            provenance=run_record(
                "run",
                sweep_file=sweep.text,
                trials=_trials_hash(sweep),
                runner=type(runner).__name__,
            ),
        )
        rows_written += len(rows)
        for row in rows:
            status = str(row.get("status", Status.OK.value))
            by_status[status] = by_status.get(status, 0) + 1
    skipped = sweep.file.cycles - len(todo)
    return RunSummary(len(sweep.trials), len(todo), skipped, rows_written, by_status)


def _one_cycle(sweep: Sweep, runner: Runner, cycle: int, progress: Callable[[], None]) -> list[Row]:
    order: list[Trial] = list(sweep.trials)
    random.Random(f"{sweep.file.name}:{cycle}").shuffle(order)
    rows: list[Row] = []
    for trial in order:
        rows.extend(runner.measure(trial, run=run_name(cycle), repeat=cycle))
        progress()
    return rows


def _trials_hash(sweep: Sweep) -> str:
    keys = "\n".join(trial.key for trial in sweep.trials)
    return hashlib.sha256(keys.encode()).hexdigest()


def _check_same_trials(sweep: Sweep, out: Path) -> None:
    """Refuse to go on with another grid under the same name: its gaps would never be filled."""
    folder = sweep_folder(out, sweep.file.system, sweep.file.name)
    for path in (path for path in part_paths(out) if path.parent == folder):
        found = part_provenance(path).get("trials")
        if found != _trials_hash(sweep):
            raise UserError(
                f"{path} was made by a sweep '{sweep.file.name}' with other trials (the file was "
                "edited, or --limit differs); give the new grid another name, or take another --out"
            )


def _finished_runs(sweep: Sweep, out: Path) -> set[str]:
    if not part_paths(out):
        return set()
    mine = scan(out).filter(
        (pl.col("system") == sweep.file.system) & (pl.col("sweep") == sweep.file.name)
    )
    return set(mine.select("run").unique().collect()["run"])
