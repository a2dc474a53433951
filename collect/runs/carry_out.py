"""`dynamiccl-collect run`: puts strategy, runner, launcher and companions together."""

import logging
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from dynamiccl.collect.benchmark.launching import Site
from dynamiccl.collect.launchers import LauncherSettings, find_launcher
from dynamiccl.collect.process import Interrupt
from dynamiccl.collect.runners import RunnerContext, find_plugin, find_runner
from dynamiccl.collect.runs.journal import begin_again, how_it_ended, progress_on_disk
from dynamiccl.collect.runs.progress import SweepProgress
from dynamiccl.collect.runs.run import RunSummary, Shard, journal_folder, run_sweep
from dynamiccl.collect.sbatch import BatchJob, find_job, queue_again, script_path, submit
from dynamiccl.collect.strategies import Strategy, make_strategy
from dynamiccl.collect.sweep.load import Sweep
from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.errors import MachineError, UserError

_log = logging.getLogger(__name__)

#: What Slurm sends before a time limit (`sbatch.batch_script`).
_WARNING: Final = "SIGUSR1"
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
    #: Inside a batch job: its script, for queueing it again.
    batch_script: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A sweep's batch job, and how far it is."""

    #: None = none is needed.
    job: str | None
    #: Of the job, as Slurm says; without a job how the sweep ended: done or budget.
    state: str
    script: Path
    #: That the strategy expects, and that are measured or infeasible.
    trials: int
    trials_done: int
    launches_done: int


def carry_out(
    sweep: Sweep, order: RunOptions, *, console: Console, strategy: Strategy | None = None
) -> RunSummary:
    """Run a sweep here; raises what `run_sweep` and its parts raise.

    With `order.batch_script` it is inside a batch job, which is queued again where work is left
    after something was measured: before the time limit, or when the machine failed.
    """
    shard = parse_shard(order.shard)
    make_runner = find_runner(order.runner)
    launcher = launcher_of(sweep.file, order.launcher)
    _refuse_shards(sweep, shard.count)
    folder = journal_folder(sweep, order.out, shard)
    measured = _measured(folder)
    interrupt = Interrupt()
    try:
        with interrupt, ExitStack() as stack:
            site = site_of(sweep, order, shard, launcher)
            runner = make_runner(RunnerContext(sweep.file, site, interrupt, stack))
            progress = SweepProgress(sweep.file.name, console, lambda: interrupt.requested)
            summary = run_sweep(
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
    except MachineError as error:
        if order.batch_script is not None and _measured(folder) != measured:
            _log.warning("%s", error)
            queue_again(order.batch_script, os.environ)
        raise
    # SIGTERM alone is somebody's scancel, or a preemption after which Slurm queues it itself.
    if order.batch_script is None or summary.ended != "interrupted" or interrupt.cause != _WARNING:
        return summary
    if _measured(folder) == measured:
        raise MachineError(
            "the time limit came before anything was measured, so the job is not queued again: "
            "give it more in launcher.sbatch_header (--time), then --resume"
        )
    queue_again(order.batch_script, os.environ)
    return summary


def submit_sweep(sweep: Sweep, order: RunOptions) -> Submission:
    """Submit the sweep as a Slurm batch job, unless its job waits or runs, or it is complete.

    Raises:
        UserError: it was begun, no job of it is there, and neither `resume` nor `retry_failed` is
            set; or `retry_failed` while its job is there.
        InvalidSweep, MachineError: as `sbatch.submit`.
    """
    find_runner(order.runner)
    if order.shard is not None:
        raise UserError("--shard is a process's; the elements of a batch job are launcher.array")
    launcher = launcher_of(sweep.file, order.launcher)
    _refuse_shards(sweep, launcher.array)
    shards = [Shard(index, launcher.array) for index in range(launcher.array)]
    folders = [journal_folder(sweep, order.out, shard) for shard in shards]
    script = script_path(order.out, sweep.file.name)
    job = find_job(script)
    if job is not None and order.retry_failed:
        raise UserError(
            f"job {job.number} of this sweep is {job.state}: give --retry-failed when it has ended"
        )
    ended = {how_it_ended(folder, sweep.text) for folder in folders}
    if job is None and (None in ended or order.retry_failed):
        if any(f.is_dir() for f in folders) and not (order.resume or order.retry_failed):
            raise UserError(
                f"{folders[0].parent} says that this sweep was begun here, work is left, and no "
                f"job of it waits or runs (what it said: {script.with_suffix('')}-*.out); go on "
                "with --resume, or take another --out or name"
            )
        for folder in folders if order.retry_failed else ():
            begin_again(folder)
        job = submit(_batch_job(sweep, order, launcher, script))
    progress = [progress_on_disk(folder) for folder in folders]
    trials = make_strategy(sweep.file, sweep.trials).expected_picks()
    done = sum(one.measured + one.infeasible for one in progress)
    return Submission(
        job=None if job is None else job.number,
        state=job.state if job is not None else "budget" if "budget" in ended else "done",
        script=script,
        trials=trials,
        # What follows a launch that was cut off measures NCCL's default once more.
        trials_done=min(done, trials),
        launches_done=sum(one.launches for one in progress),
    )


def _batch_job(
    sweep: Sweep, order: RunOptions, launcher: LauncherSettings, script: Path
) -> BatchJob:
    paths = [str(order.sweep_file.absolute()), "--out", str(order.out.absolute())]
    options = ["--launcher", "srun", "--resume", "--runner", order.runner]
    if order.nccl_tests_dir is not None:
        options += ["--nccl-tests-dir", str(order.nccl_tests_dir.absolute())]
    if order.limit is not None:
        options += ["--limit", str(order.limit)]
    if order.retry_failed:
        options.append("--retry-failed")
    options += ["--batch-script", str(script)]
    return BatchJob(
        script=script,
        command=(sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run", *paths, *options),
        num_nodes=max(group.hosts for group in sweep.file.groups),
        ranks_per_node=max(group.ranks_per_host for group in sweep.file.groups),
        header=launcher.sbatch_header,
        array=launcher.array,
    )


def _measured(folder: Path) -> tuple[int, int]:
    """What grows with each launch that measures something."""
    found = progress_on_disk(folder)
    return found.launches, found.measured


def _refuse_shards(sweep: Sweep, count: int) -> None:
    if count > 1 and sweep.file.strategy.kind == "adaptive":
        raise UserError(
            "an adaptive sweep cannot be cut into shards: each would know a part of the history "
            "only; take strategy.kind = 'exhaustive' or 'random', or launcher.array = 1"
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
