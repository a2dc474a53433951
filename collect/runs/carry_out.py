"""`dynamiccl-collect run`: puts strategy, runner, launcher and companions together."""

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from dynamiccl.collect.benchmark.launching import Site
from dynamiccl.collect.launchers import find_launcher
from dynamiccl.collect.launchers.settings import LauncherSettings
from dynamiccl.collect.processes.interrupt import Interrupt
from dynamiccl.collect.runners import RunnerContext, find_plugin, find_runner
from dynamiccl.collect.runs.journal import (
    begin_again,
    begun_here,
    commits_on_disk,
    how_it_ended,
)
from dynamiccl.collect.runs.progress import SweepProgress
from dynamiccl.collect.runs.run import RunSummary, Shard, journal_folder, run_sweep
from dynamiccl.collect.sbatch import BatchJob, Outcome, Work, run_as_batch, run_command
from dynamiccl.collect.strategies import Strategy, make_strategy
from dynamiccl.collect.sweep import Sweep, SweepFile
from dynamiccl.errors import UserError
from dynamiccl.slurm import SlurmQueue

_FIX: Final = "correct launcher.sbatch_header or the sweep's groups"
_SHARD: Final = re.compile(r"(\d+)/([1-9]\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command line options of a run."""

    sweep_file: Path
    out: Path
    runner: str = "nccl-tests"
    #: None = the sweep file's.
    launcher: str | None = None
    nccl_tests_dir: Path | None = None
    resume: bool = False
    retry_failed: bool = False
    take_over: bool = False
    limit: int | None = None
    shard: str | None = None


def carry_out(
    sweep: Sweep, order: RunOptions, *, console: Console, strategy: Strategy | None = None
) -> RunSummary:
    """Run a sweep; raises what `run_sweep` and its parts raise.

    `strategy` replaces the sweep file's, except in a batch job.
    """
    shard = parse_shard(order.shard)
    make_runner = find_runner(order.runner)
    launcher = launcher_of(sweep.file, order.launcher)
    is_batch = find_launcher(launcher.kind).is_batch
    shards = max(shard.count, launcher.array if is_batch else 1)
    if shards > 1 and sweep.file.strategy.kind == "adaptive":
        raise UserError(
            "an adaptive sweep cannot be cut into shards: each would know a part of the history "
            "only; take strategy.kind = 'exhaustive' or 'random', or launcher.array = 1"
        )
    if is_batch:
        return submit(sweep, order, launcher)
    with Interrupt() as interrupt, ExitStack() as stack:
        site = site_of(sweep, order, shard, launcher)
        runner = make_runner(RunnerContext(sweep.file, site, interrupt, stack))
        progress = SweepProgress(sweep.file.name, console, lambda: interrupt.requested)
        return run_sweep(
            sweep,
            strategy or make_strategy(sweep.file, sweep.trials),
            runner,
            order.out,
            resume=order.resume or order.retry_failed,
            retry_failed=order.retry_failed,
            take_over=order.take_over,
            watcher=stack.enter_context(progress),
            shard=shard,
        )


def submit(sweep: Sweep, order: RunOptions, launcher: LauncherSettings) -> RunSummary:
    """Run the sweep inside a Slurm batch job, and watch it until it is done."""
    shards = [Shard(index, launcher.array) for index in range(launcher.array)]
    folders = [journal_folder(sweep, order.out, shard) for shard in shards]
    if any(folder.is_dir() for folder in folders) and not (order.resume or order.retry_failed):
        raise begun_here(folders[0].parent)
    options = ["--runner", order.runner]
    if order.nccl_tests_dir is not None:
        options += ["--nccl-tests-dir", str(order.nccl_tests_dir.absolute())]
    if order.limit is not None:
        options += ["--limit", str(order.limit)]
    if order.retry_failed:
        options.append("--retry-failed")
        for folder in folders:
            begin_again(folder)
    job = BatchJob(
        name=sweep.file.name,
        out=order.out.absolute(),
        command=run_command(order.sweep_file, order.out, *options),
        num_nodes=max(group.hosts for group in sweep.file.groups),
        ranks_per_node=max(group.ranks_per_host for group in sweep.file.groups),
        header=launcher.sbatch_header,
        array=launcher.array,
    )

    def endings() -> set[str | None]:
        return {how_it_ended(folder, sweep.text) for folder in folders}

    work = Work(
        is_complete=lambda: None not in endings(),
        progress=lambda: sum(commits_on_disk(folder) for folder in folders),
    )
    began = work.progress()
    with Interrupt() as interrupt:
        outcome = run_as_batch(job, work, SlurmQueue(_FIX), interrupt)
    ended = "budget" if "budget" in endings() else "done"
    return RunSummary(
        trials=len(sweep.trials),
        rounds_done=0,
        launches_run=work.progress() - began,
        launches_skipped=began,
        rows_written=0,
        rows_by_status={},
        ended=ended if outcome is Outcome.COMPLETE else "detached",
    )


def launcher_of(file: SweepFile, name: str | None) -> LauncherSettings:
    """The sweep's launcher, of another kind when the command line names one.

    Raises UnknownName with the choices.
    """
    if name is None:
        return file.launcher
    find_launcher(name)
    return file.launcher.model_copy(update={"kind": name})


def site_of(sweep: Sweep, order: RunOptions, shard: Shard, launcher: LauncherSettings) -> Site:
    """Where the sweep runs, and with which files."""
    return Site(
        out=order.out,
        work=journal_folder(sweep, order.out, shard) / "work",
        nccl_tests_dir=order.nccl_tests_dir,
        plugin=find_plugin(sweep.file),
        launcher=launcher,
    )


def parse_shard(text: str | None) -> Shard:
    """Read `I/N`, the share I of N counted from 0. Raises UserError.

    >>> parse_shard("1/4")
    Shard(index=1, count=4)
    """
    if text is None:
        return Shard()
    match = _SHARD.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--shard '{text}' is no share; write I/N with I from 0 to N-1, like 0/4")
    return Shard(int(match[1]), int(match[2]))
