"""Runs sweeps of the nccl-tests stand-in with the real runner, run loop and plugin."""

import io
from collections.abc import Sequence
from pathlib import Path

import polars as pl
from rich.console import Console

from dynamiccl.collect.benchmark.launching import Site
from dynamiccl.collect.benchmark.runner import NcclTestsRunner
from dynamiccl.collect.launchers import LauncherSettings
from dynamiccl.collect.process import Interrupt
from dynamiccl.collect.runs.progress import SweepProgress
from dynamiccl.collect.runs.run import RunSummary, Shard, journal_folder, run_sweep
from dynamiccl.collect.sweep.load import Sweep
from dynamiccl.datasets import store
from tests.collect.cycles import Cycles
from tests.fakes.nccl_tests.install import install_stand_in

ROOT = Path(__file__).resolve().parents[3]


def site(
    made: Sweep,
    folder: Path,
    plugin: Path | None,
    launcher: LauncherSettings | None = None,
) -> Site:
    """A site below `folder` with the stand-in's programs in it."""
    out = folder / "out"
    return Site(
        out=out,
        work=journal_folder(made, out, Shard()) / "work",
        nccl_tests_dir=install_stand_in(folder / "bin"),
        plugin=plugin,
        launcher=launcher or made.file.launcher,
    )


def run(
    made: Sweep,
    folder: Path,
    plugin: Path | None,
    *,
    resume: bool = False,
    interrupt: Interrupt | None = None,
) -> RunSummary:
    """Run the sweep below `folder`."""
    where = site(made, folder, plugin)
    runner = NcclTestsRunner(made.file, where, interrupt)
    strategy = Cycles(made.trials, made.file.cycles)
    watcher = None
    if interrupt is not None:
        nowhere = Console(file=io.StringIO())
        watcher = SweepProgress("test", nowhere, lambda: interrupt.requested)
    summary = run_sweep(made, strategy, runner, where.out, resume=resume, watcher=watcher)
    runner.close()
    return summary


def rows(folder: Path) -> pl.DataFrame:
    """All measurements of the sweep below `folder`."""
    return store.read(folder / "out")


def wanted(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of forced configs that gave a time."""
    return frame.filter(~pl.col("is_default") & (pl.col("status") == "ok"))


def statuses(frame: pl.DataFrame, names: Sequence[str] = ("status",)) -> dict[object, int]:
    """Rows by status."""
    return {key[0] if len(key) == 1 else key: part.height for key, part in frame.group_by(names)}
