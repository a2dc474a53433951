"""`dynamiccl-collect run`: from the command's options to a sweep that runs, or is submitted."""

import logging
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from dynamiccl.collect.journal import (
    Shard,
    begin_again,
    how_it_ended,
    journal_folder,
    progress_on_disk,
)
from dynamiccl.collect.launch import NcclTestsRunner
from dynamiccl.collect.launchers import LauncherSettings, find_launcher
from dynamiccl.collect.nodes import Nodes, NodeWatch, Watch, ask_nodes
from dynamiccl.collect.process import Interrupt
from dynamiccl.collect.programs import Site
from dynamiccl.collect.progress import SweepProgress
from dynamiccl.collect.run import RunSummary, run_sweep
from dynamiccl.collect.runner import Runner
from dynamiccl.collect.sbatch import BatchJob, find_job, queue_again, script_path, submit
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import Sweep, SweepFile
from dynamiccl.errors import MachineError, MissingPath, UnknownName, UserError
from dynamiccl.libraries import JOB_NAMES, SWEEP_NAME, built

_log = logging.getLogger(__name__)

#: What may measure a sweep.
RUNNERS: Final = ("nccl-tests", "simulator")
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


def start_sweep(sweep: Sweep, options: RunOptions, *, console: Console) -> RunSummary:
    """Run a sweep here; raises what `run_sweep` and its parts raise.

    With `options.batch_script` it is inside a batch job, which is queued again where work is left
    after something was measured: before the time limit, or when the machine failed.
    """
    shard = parse_shard(options.shard)
    _check_runner(options.runner)
    launcher = launcher_of(sweep.file, options.launcher)
    _refuse_shards(sweep, shard.count)
    folder = journal_folder(sweep, options.out, shard)
    measured = _measured(folder)
    interrupt = Interrupt()
    try:
        with interrupt, ExitStack() as stack:
            site = Site(
                out=options.out,
                work=folder / "work",
                nccl_tests_dir=options.nccl_tests_dir,
                plugin=find_plugin(sweep.file),
                launcher=launcher,
            )
            runner: Runner = (
                _nccl_tests(sweep.file, site, interrupt, stack)
                if options.runner == NcclTestsRunner.name
                else SimulatorRunner(sweep.file, options.out)
            )
            progress = SweepProgress(sweep.file.name, console, lambda: interrupt.requested)
            summary = run_sweep(
                sweep,
                make_strategy(sweep.file, sweep.trials),
                runner,
                options.out,
                resume=options.resume or options.retry_failed,
                retry_failed=options.retry_failed,
                take_over=options.take_over,
                progress=stack.enter_context(progress),
                shard=shard,
            )
    except MachineError as error:
        if options.batch_script is not None and _measured(folder) != measured:
            _log.warning("%s", error)
            queue_again(options.batch_script, os.environ)
        raise
    # SIGTERM alone is somebody's scancel, or a preemption after which Slurm queues it itself.
    warned = summary.ended == "interrupted" and interrupt.cause == _WARNING
    if options.batch_script is None or not warned:
        return summary
    if _measured(folder) == measured:
        raise MachineError(
            "the time limit came before anything was measured, so the job is not queued again: "
            "give it more in launcher.sbatch_header (--time), then --resume"
        )
    queue_again(options.batch_script, os.environ)
    return summary


def submit_sweep(sweep: Sweep, options: RunOptions) -> Submission:
    """Submit the sweep as a Slurm batch job, unless its job waits or runs, or it is complete.

    Raises:
        UserError: it was begun, no job of it is there, and neither `resume` nor `retry_failed` is
            set; or `retry_failed` while its job is there.
        InvalidSweep, MachineError: as `sbatch.submit`.
    """
    _check_runner(options.runner)
    if options.shard is not None:
        raise UserError("--shard is a process's; the elements of a batch job are launcher.array")
    launcher = launcher_of(sweep.file, options.launcher)
    _refuse_shards(sweep, launcher.array)
    shards = [Shard(index, launcher.array) for index in range(launcher.array)]
    folders = [journal_folder(sweep, options.out, shard) for shard in shards]
    script = script_path(options.out, sweep.file.name)
    job = find_job(script)
    if job is not None and options.retry_failed:
        raise UserError(
            f"job {job.number} of this sweep is {job.state}: give --retry-failed when it has ended"
        )
    ended = {how_it_ended(folder, sweep.text) for folder in folders}
    if job is None and (None in ended or options.retry_failed):
        if any(f.is_dir() for f in folders) and not (options.resume or options.retry_failed):
            raise UserError(
                f"{folders[0].parent} says that this sweep was begun here, work is left, and no "
                f"job of it waits or runs (what it said: {script.with_suffix('')}-*.out); go on "
                "with --resume, or take another --out or name"
            )
        for folder in folders if options.retry_failed else ():
            begin_again(folder)
        job = submit(_batch_job(sweep, options, launcher, script))
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
    sweep: Sweep, options: RunOptions, launcher: LauncherSettings, script: Path
) -> BatchJob:
    paths = [str(options.sweep_file.absolute()), "--out", str(options.out.absolute())]
    words = ["--launcher", "srun", "--resume", "--runner", options.runner]
    if options.nccl_tests_dir is not None:
        words += ["--nccl-tests-dir", str(options.nccl_tests_dir.absolute())]
    if options.limit is not None:
        words += ["--limit", str(options.limit)]
    if options.retry_failed:
        words.append("--retry-failed")
    words += ["--batch-script", str(script)]
    return BatchJob(
        script=script,
        command=(sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run", *paths, *words),
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


def _check_runner(name: str) -> None:
    if name not in RUNNERS:
        raise UnknownName("runner", name, RUNNERS)


def _nccl_tests(
    file: SweepFile, site: Site, interrupt: Interrupt, stack: ExitStack
) -> NcclTestsRunner:
    """The runner of real sweeps, with samplers on its nodes until the stack is closed."""
    nodes = Nodes(site.launcher)
    num_nodes = max(group.hosts for group in file.groups)
    facts = ask_nodes(nodes, num_nodes, os.environ)
    watch = Watch()
    if file.telemetry.enabled:
        watch = stack.enter_context(NodeWatch(nodes, num_nodes))
    runner = NcclTestsRunner(file, site, interrupt, watch=watch, facts=facts)
    # After an error the last launch may not be in the journal yet.
    stack.push(lambda error, *_: runner.close() if error is None else None)
    return runner


def launcher_of(file: SweepFile, name: str | None) -> LauncherSettings:
    """The sweep's launcher, of another kind when the command line names one.

    Raises UnknownName with the choices.
    """
    if name is None:
        return file.launcher
    find_launcher(name)
    return file.launcher.model_copy(update={"kind": name})


def find_plugin(file: SweepFile) -> Path | None:
    """Path of the sweep plugin: `runner.plugin` of the sweep file, else our build, else None.

    Raises MissingPath when the named file does not exist, and UserError when it is the plugin for
    jobs.
    """
    if file.runner.plugin is None:
        ours = built(SWEEP_NAME)
        return ours.resolve() if ours.is_file() else None
    named = Path(file.runner.plugin).expanduser()
    if not named.is_file():
        raise MissingPath(
            "tuner plugin", named, "build it with 'make plugin', or correct runner.plugin"
        )
    if named.name in JOB_NAMES:
        raise UserError(
            f"runner.plugin is {named}, which is for jobs and plays no schedule; name "
            f"{SWEEP_NAME} beside it"
        )
    return named.resolve()


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
