"""`dynamiccl-collect run`: from the command's options to a sweep that runs, or is submitted.

As a Slurm batch job it queues itself again while work is left:

    OUT/.slurm/NAME.sbatch    the script; it resumes the sweep, so it may run any number of times
    OUT/.slurm/NAME-JOB.out   what the job printed
    OUT/.slurm/NAME.jobs/1    numbers of the jobs of the first submission; 2 of the next, and so on

`submit_sweep` returns as soon as Slurm has the job; nobody watches it. Slurm sends SIGUSR1 to the
batch shell before the time limit (`--signal=B:USR1@120`). The shell replaces itself by the sweep
(`exec`), which so gets the signal itself, finishes its trial, stops, and queues the job again. A
shell that forwards signals by `trap` may lose one that comes just before its `wait`.
"""

import logging
import os
import re
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console

from dynamiccl.collect import journal
from dynamiccl.collect.journal import Shard, journal_folder, progress_on_disk
from dynamiccl.collect.launch import NcclTestsRunner, Site
from dynamiccl.collect.launchers import Interrupt
from dynamiccl.collect.nodes import Nodes, ask_nodes, watch_health
from dynamiccl.collect.run import Runner, Summary, SweepProgress, run_sweep
from dynamiccl.collect.schedule import without_slow
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import Sweep, SweepFile
from dynamiccl.errors import InvalidSweep, MachineError, MissingPath, UserError
from dynamiccl.libraries import SWEEP_NAME, built
from dynamiccl.slurm import BatchScript, bare_option, option_name, quoted

_log = logging.getLogger(__name__)

RunnerName = Literal["nccl-tests", "simulator"]
WHOLE: Final = "0/1"
_FIX: Final = "correct launcher.sbatch_header or the sweep's groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command line options of a run."""

    sweep_file: Path
    out: Path
    runner: RunnerName = "nccl-tests"
    nccl_tests_dir: Path | None = None
    resume: bool = False
    retry_failed: bool = False
    take_over: bool = False
    shard: str = WHOLE
    #: Inside a batch job: its script, for queueing it again.
    batch_script: Path | None = None


def start_sweep(sweep: Sweep, options: RunOptions, *, console: Console) -> Summary:
    """Run a sweep here; raises what `run_sweep` and its parts raise.

    With `options.batch_script` it is inside a batch job, which is queued again where work is left
    after something was measured: before the time limit, or when the machine failed.
    """
    shard = parse_shard(options.shard)
    _check_shards(sweep, shard.count)
    folder = journal_folder(sweep, options.out, shard)
    launches, _ = progress_on_disk(folder)
    interrupt = Interrupt()
    try:
        with interrupt, ExitStack() as stack:
            plugin = find_plugin(sweep.file)
            runner: Runner = SimulatorRunner(sweep.file, options.out)
            if options.runner == NcclTestsRunner.name:
                sweep = without_slow(sweep)
                work, programs = folder / "work", options.nccl_tests_dir
                site = Site(options.out, work, programs, plugin, sweep.file.launcher)
                runner = _nccl_tests(sweep.file, site, interrupt, stack)
            progress = SweepProgress(sweep.file.name, console, lambda: interrupt.requested)
            summary = run_sweep(
                *(sweep, make_strategy(sweep.file, sweep.trials), runner, options.out),
                resume=options.resume or options.retry_failed,
                retry_failed=options.retry_failed,
                take_over=options.take_over,
                progress=stack.enter_context(progress),
                shard=shard,
            )
    except MachineError as error:
        if options.batch_script is not None and progress_on_disk(folder)[0] > launches:
            _log.warning("%s", error)
            BatchScript(options.batch_script, _FIX).submit_again(os.environ)
        raise
    # SIGTERM alone is somebody's scancel, or a preemption after which Slurm queues it itself.
    warned = summary["ended"] == "interrupted" and interrupt.cause == "SIGUSR1"
    if options.batch_script is not None and warned:
        if progress_on_disk(folder)[0] == launches:
            raise MachineError(
                "the time limit came before anything was measured, so the job is not queued again: "
                "give it more in launcher.sbatch_header (--time), then --resume"
            )
        BatchScript(options.batch_script, _FIX).submit_again(os.environ)
    return summary


def _nccl_tests(
    file: SweepFile, site: Site, interrupt: Interrupt, stack: ExitStack
) -> NcclTestsRunner:
    """The runner of real sweeps, with samplers on its nodes until the stack is closed."""
    nodes = Nodes(site.launcher)
    num_nodes = max(group.hosts for group in file.groups)
    facts = ask_nodes(nodes, num_nodes, os.environ)
    is_watched = file.telemetry.enabled
    health = stack.enter_context(watch_health(nodes, num_nodes)) if is_watched else None
    runner = NcclTestsRunner(file, site, interrupt, health=health, facts=facts)
    # After an error the last launch may not be in the journal yet.
    stack.push(lambda error, *_: runner.close() if error is None else None)
    return runner


def _check_shards(sweep: Sweep, count: int) -> None:
    if count > 1 and sweep.file.strategy.kind == "adaptive":
        raise UserError(
            "an adaptive sweep cannot be cut into shards: each would know a part of the history "
            "only; take strategy.kind = 'exhaustive' or 'random', or launcher.array = 1"
        )


def find_plugin(file: SweepFile) -> Path | None:
    """The tuner plugin that plays schedules: the named one (or MissingPath), our build, or None."""
    named = file.runner.plugin
    path = built(SWEEP_NAME) if named is None else Path(named).expanduser()
    if path.is_file():
        return path.resolve()
    if named is None:
        return None
    raise MissingPath("tuner plugin", path, "build it with 'make plugin', or correct runner.plugin")


def parse_shard(text: str) -> Shard:
    """Read `I/N`, the share I of N counted from 0. Raises UserError.

    >>> parse_shard("1/4")
    Shard(index=1, count=4)
    """
    match = re.fullmatch(r"(\d+)/([1-9]\d*)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--shard '{text}' is no share; write I/N with I from 0 to N-1, like 0/4")
    return Shard(int(match[1]), int(match[2]))


def submit_sweep(sweep: Sweep, options: RunOptions) -> dict[str, Any]:
    """Submit the sweep as a Slurm batch job, unless its job waits or runs, or it is complete.

    Returns job (null = none is needed; several of an array whose elements were submitted again:
    "77,81"), state (of the job, as Slurm says; without one how the sweep ended: done or budget),
    script, trials (that the strategy expects), trials_done (measured or infeasible), launches_done.
    Raises UserError, InvalidSweep for a header line that sbatch cannot take, and MachineError where
    the job is refused or Slurm does not answer.
    """
    array = sweep.file.launcher.array
    _check_shards(sweep, array)
    if options.shard != WHOLE:
        raise UserError("--shard is a process's; the elements of a batch job are launcher.array")
    folders = [journal_folder(sweep, options.out, Shard(index, array)) for index in range(array)]
    script = script_path(options.out, sweep.file.name)
    text = batch_script(sweep, options, script)
    batch = BatchScript(script, _FIX)
    job = batch.find()
    if job is not None and options.retry_failed:
        raise UserError(
            f"job {job[0]} of this sweep is {job[1]}: give --retry-failed when it has ended"
        )
    ended = {journal.how_it_ended(folder, sweep.text) for folder in folders}
    if job is None and (None in ended or options.retry_failed):
        if any(f.is_dir() for f in folders) and not (options.resume or options.retry_failed):
            raise UserError(
                f"{folders[0].parent} says that this sweep was begun here, work is left, and no "
                f"job of it waits or runs (what it said: {script.with_suffix('')}-*.out); go on "
                "with --resume, or take another --out or name"
            )
        if options.retry_failed:
            for folder in folders:
                (folder / journal.COMPLETE).unlink(missing_ok=True)
        job = batch.submit(text)
    number, state = job or (None, "budget" if "budget" in ended else "done")
    progress = [progress_on_disk(folder) for folder in folders]
    trials = make_strategy(sweep.file, sweep.trials).expected_picks()
    return {
        "job": number,
        "state": state,
        "script": str(script),
        "trials": trials,
        # What follows a launch that was cut off measures NCCL's default once more.
        "trials_done": min(sum(done for _, done in progress), trials),
        "launches_done": sum(launches for launches, _ in progress),
    }


def script_path(out: Path, name: str) -> Path:
    """Path of the batch script of the sweep called `name`; its stem is a valid job name."""
    return out.absolute() / ".slurm" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.sbatch"


def batch_script(sweep: Sweep, options: RunOptions, script: Path) -> str:
    """The text of the batch script (pure): our options, the user's, which win, and the command.

    Raises InvalidSweep for a header line that is no option, or that sets the array.
    """
    launcher = sweep.file.launcher
    for line in launcher.sbatch_header:
        if option_name(line) in {None, "array"}:
            raise InvalidSweep(
                f"sbatch_header line '{line}' is no option of sbatch that a sweep can have; write "
                'one option a line, e.g. "--time=02:00:00", and --array as launcher.array'
            )
    argv = [sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run"]
    argv += [str(options.sweep_file.absolute()), "--out", str(options.out.absolute())]
    argv += ["--launcher", "srun", "--resume", "--runner", options.runner]
    programs = options.nccl_tests_dir
    argv += [] if programs is None else ["--nccl-tests-dir", str(programs.absolute())]
    argv += ["--retry-failed"] if options.retry_failed else []
    command = shlex.join([*argv, "--batch-script", str(script)])
    # sbatch reads a percent sign in a file name as a pattern.
    log = str(script.with_suffix("")).replace("%", "%%")
    lines = [
        f"--job-name={script.stem}",
        f"--nodes={max(group.hosts for group in sweep.file.groups)}",
        f"--ntasks-per-node={max(group.ranks_per_host for group in sweep.file.groups)}",
        f"--output={quoted(log + ('-%A_%a.out' if launcher.array > 1 else '-%j.out'))}",
        # A job that is queued again keeps its number, and its log goes on.
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--requeue",
    ]
    if launcher.array > 1:
        lines.append(f"--array=0-{launcher.array - 1}")
        command += f' --shard "$SLURM_ARRAY_TASK_ID/{launcher.array}"'
    # Of an option that is given twice sbatch takes the last.
    lines += map(bare_option, launcher.sbatch_header)
    head = "".join(f"#SBATCH {line}\n" for line in lines)
    return (
        f"#!/bin/bash\n{head}\n"
        "# Written by dynamiccl-collect. It resumes the sweep, so it may run any number of times.\n"
        f"exec {command}\n"
    )
