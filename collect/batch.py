"""A sweep as a Slurm batch job, by Slurm's commands; needs no accounting database.

    OUT/.slurm/NAME.sbatch    the script; it resumes the sweep, so it may run any number of times
    OUT/.slurm/NAME-JOB.out   what the job printed

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dynamiccl.collect import journal
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import Sweep
from dynamiccl.doctor import Machine, ProgramResult
from dynamiccl.errors import InvalidSweep, MachineError, UserError

_log = logging.getLogger(__name__)

#: States in which a job will not run any more (squeue(1), "JOB STATE CODES"). Every other state,
#: those of releases to come included, counts as alive.
ENDED: Final = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
})  # fmt: skip
#: Reasons for which a job may wait for ever, where no node is down (squeue(1)).
_TOO_MUCH: Final = frozenset({"PartitionNodeLimit", "PartitionTimeLimit"})
#: An option of sbatch on a line of its own; of the short ones `-a` alone matters to us.
_OPTION: Final = re.compile(r"(?!--array\b|-a)--?[A-Za-z][^\n]*")
#: Seconds that a busy controller may take to answer (its own MessageTimeout is 10 by default).
_ANSWER_S: Final = 60.0
#: Variables that tell clients where Slurm is (sbatch(1), "INPUT ENVIRONMENT VARIABLES").
_KEPT: Final = ("SLURM_CONF", "SLURM_CLUSTERS")

RunnerName = Literal["nccl-tests", "simulator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command line options of a run."""

    sweep_file: Path
    out: Path
    runner: RunnerName = "nccl-tests"
    nccl_tests_dir: Path | None = None
    resume: bool = False
    #: Inside a batch job: its script, for queueing it again.
    batch_script: Path | None = None


def submit_sweep(sweep: Sweep, options: RunOptions) -> dict[str, Any]:
    """Submit the sweep as a batch job, unless its job waits or runs, or it is complete.

    Returns job (null = none is needed), state (of the job, as Slurm says; without one how the sweep
    ended: done or budget), script, trials (that the strategy expects), trials_done (measured or
    infeasible), launches_done. Raises UserError, InvalidSweep for a header line that sbatch cannot
    take, and MachineError where the job is refused or Slurm does not answer.
    """
    folder = journal.journal_folder(sweep, options.out)
    script = script_path(options.out, sweep.file.name)
    text = batch_script(sweep, options, script)
    ended = journal.how_it_ended(folder, sweep.text)
    job = find(script)
    if job is None and ended is None:
        if folder.is_dir() and not options.resume:
            raise UserError(
                f"{folder} says that this sweep was begun here, work is left, and no job of it "
                f"waits or runs (what it said: {script.with_suffix('')}-*.out); go on with "
                "--resume, or take another --out or name"
            )
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(text, encoding="utf-8")
        job = _submit(script), "submitted"
    number, state = job or (None, ended)
    launches, done = journal.progress_on_disk(folder)
    trials = make_strategy(sweep.file, sweep.trials).expected_picks()
    return {
        "job": number,
        "state": state,
        "script": str(script),
        "trials": trials,
        # What follows a launch that was cut off measures NCCL's default once more.
        "trials_done": min(done, trials),
        "launches_done": launches,
    }


def script_path(out: Path, name: str) -> Path:
    """Path of the batch script of the sweep called `name`; its stem is a valid job name."""
    return out.absolute() / ".slurm" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.sbatch"


def batch_script(sweep: Sweep, options: RunOptions, script: Path) -> str:
    """The text of the batch script (pure): our options, the user's, which win, and the command.

    Raises InvalidSweep for a header line that is no option, or asks for a job array.
    """
    given = sweep.file.launcher.sbatch_header
    header = [line.strip().removeprefix("#SBATCH").strip() for line in given]
    for line in header:
        if not _OPTION.fullmatch(line):
            raise InvalidSweep(
                f"sbatch_header line '{line}' is no option of sbatch that a sweep can have; write "
                'one option a line, e.g. "--time=02:00:00", and no --array'
            )
    argv = [sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run"]
    argv += [str(options.sweep_file.absolute()), "--out", str(options.out.absolute())]
    argv += ["--resume"]
    if options.nccl_tests_dir is not None:
        argv += ["--nccl-tests-dir", str(options.nccl_tests_dir.absolute())]
    argv += ["--batch-script", str(script)]
    # sbatch reads a percent sign in a file name as a pattern, and a backslash in quotes.
    log = str(script.with_suffix("")).replace("%", "%%")
    log = log.replace("\\", "\\\\").replace('"', '\\"')
    lines = [
        f"--job-name={script.stem}",
        f"--nodes={max(group.hosts for group in sweep.file.groups)}",
        f"--ntasks-per-node={max(group.ranks_per_host for group in sweep.file.groups)}",
        f'--output="{log}-%j.out"',
        # A job that is queued again keeps its number, and its log goes on.
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--requeue",
        # Of an option that is given twice sbatch takes the last.
        *header,
    ]
    head = "".join(f"#SBATCH {line}\n" for line in lines)
    return (
        f"#!/bin/bash\n{head}\n"
        "# Written by dynamiccl-collect. It resumes the sweep, so it may run any number of times.\n"
        f"exec {shlex.join(argv)}\n"
    )


def find(script: Path) -> tuple[str, str] | None:
    """Number and state of our job of this script that waits or runs; None without one.

    Raises MachineError where Slurm does not answer.
    """
    layout = ("--noheader", "--states=all", "--format=%i|%T|%r|%N|%o")
    ran = _slurm("squeue", f"--user={os.getuid()}", *layout)
    if not ran.worked:
        raise MachineError(f"squeue says nothing about our jobs: {_words(ran)}")
    # Beside our jobs it may warn.
    for line in [one for one in ran.output.splitlines() if one.count("|") > 3]:
        number, state, reason, nodes, path = line.strip().split("|", 4)
        if path == str(script) and state not in ENDED:
            fix = ": more than its partition has now or allows; scancel it, and ask for less"
            why = f" ({reason}{fix * (reason in _TOO_MUCH)})" * (reason != "None")
            place = f" on {nodes}" if nodes else ""
            return number, state + (why if state == "PENDING" else place)
    return None


def queue_again(script: Path, environ: Mapping[str, str]) -> None:
    """Have Slurm run the job that we are in again; where that is refused, another one after it.

    Slurm ends this process soon after, so it is logged before. `environ` is the job's environment.
    Raises MachineError.
    """
    number = environ["SLURM_JOB_ID"]
    _log.warning("work is left: queueing job %s again", number)
    ran = _slurm("scontrol", "requeue", number)
    if not ran.worked:
        follower = _submit(script, f"--dependency=afterany:{number}")
        _log.warning("job %s follows in its place, since Slurm says: %s", follower, _words(ran))


def _submit(script: Path, *options: str) -> str:
    """Run sbatch; options given here win over the script's. Returns the job's number."""
    # Inside a job, its variables would be the next job's too, as its memory a CPU.
    ours = [n for n in os.environ if n.startswith("SLURM_") and n not in _KEPT]
    drop = [word for name in ours for word in ("-u", name)]
    ran = _slurm("env", *drop, "sbatch", "--parsable", *options, str(script))
    # "1234", or "1234;cluster", behind warnings.
    found = re.fullmatch(r"(\d+)(;.*)?", ran.last_line)
    if not ran.worked or found is None:
        raise MachineError(
            f"sbatch refused {script}: {_words(ran)}; correct launcher.sbatch_header or the "
            "sweep's groups"
        )
    return found[1]


def _slurm(*argv: str) -> ProgramResult:
    """Run a command of Slurm's. Raises MachineError where it is not there or does not answer."""
    ran = Machine().run(*argv, limit_s=_ANSWER_S)
    if ran.returncode is None:
        raise MachineError(f"no answer from Slurm to '{' '.join(argv)}': {ran.output}")
    return ran


def _words(ran: ProgramResult) -> str:
    return " | ".join(ran.output.strip().splitlines()) or "no message"
