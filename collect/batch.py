"""A sweep as a Slurm batch job; needs no accounting database, and nobody watches it.

    OUT/.slurm/NAME.sbatch    the script; it resumes the sweep, so it may run any number of times
    OUT/.slurm/NAME/          a lock, while Slurm is asked about it
    OUT/.slurm/NAME-JOB.out   what the job printed

Slurm sends SIGUSR1 to the batch shell before the time limit. The shell becomes the sweep (`exec`: a
`trap` may lose a signal just before its `wait`), which stops, and queues the job again.
"""

import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dynamiccl.collect import journal
from dynamiccl.collect.launch import check_packages
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import Sweep
from dynamiccl.doctor import Machine, ProgramResult
from dynamiccl.errors import InvalidSweep, MachineError, UserError

_log = logging.getLogger(__name__)

#: Every other state, later releases' too, counts as alive (squeue(1), "JOB STATE CODES").
ENDED: Final = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
})  # fmt: skip
#: Such a job may wait for ever, where no node is down (squeue(1)).
_TOO_MUCH: Final = frozenset({"PartitionNodeLimit", "PartitionTimeLimit"})
#: An array; getopt takes `--ar`, too, and `-Ha`: short flags without a value (sbatch 22.05) first.
_ARRAY: Final = re.compile(r"--ar(r(ay?)?)?(=.*)?|-[HOQVWhsv]*a.*", re.DOTALL)
#: For a busy controller (its own MessageTimeout is 10 by default).
_ANSWER_S: Final = 60.0
#: Where Slurm is (sbatch(1), "INPUT ENVIRONMENT VARIABLES").
_KEPT: Final = ("SLURM_CONF", "SLURM_CLUSTERS")

RunnerName = Literal["nccl-tests", "simulator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of `run`."""

    sweep_file: Path
    out: Path
    runner: RunnerName = "nccl-tests"
    nccl_tests_dir: Path | None = None
    resume: bool = False
    batch_script: Path | None = None


def submit_sweep(sweep: Sweep, options: RunOptions) -> dict[str, Any]:
    """Submit the sweep as a batch job, unless its job waits or runs, or it is complete.

    Without a job (null) the state is how the sweep ended: done or budget. Raises UserError
    (another call submits it now, too), InvalidSweep for a header line, and MachineError where Slurm
    refuses or does not answer, or compute beside it lacks a package.
    """
    folder = journal.journal_folder(sweep, options.out)
    script = script_path(options.out, sweep.file.name)
    text = batch_script(sweep, options, script)
    asking = script.with_suffix("")
    asking.mkdir(parents=True, exist_ok=True)
    job, ended = find(script), journal.how_it_ended(folder, sweep.text)
    if job is None and ended is None:
        for setting in dict.fromkeys(trial.setting for trial in sweep.trials):
            check_packages(setting, sweep.file.launcher.container)
        with journal.hold(asking, "submitting", "give the same command again in a moment"):
            if (job := find(script)) is None:  # else of a call that was faster
                if folder.is_dir() and not options.resume:
                    raise UserError(
                        f"{folder} says that this sweep was begun here, work is left, and no job "
                        f"of it waits or runs (what it said: {asking}-*.out); go on with "
                        "--resume, or take another --out or name"
                    )
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
        # A launch that was cut off measures NCCL's default once more.
        "trials_done": min(done, trials),
        "launches_done": launches,
    }


def script_path(out: Path, name: str) -> Path:
    """The batch script; its stem is a valid job name."""
    return out.absolute() / ".slurm" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.sbatch"


def batch_script(sweep: Sweep, options: RunOptions, script: Path) -> str:
    """The batch script (pure); the user's options win. Raises InvalidSweep for a header line."""
    given = sweep.file.launcher.sbatch_header
    header = [line.strip().removeprefix("#SBATCH").strip() for line in given]
    for line in header:
        if not _is_option(line):
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
    # sbatch reads a percent sign as a pattern, and a backslash in quotes.
    log = str(script.with_suffix("")).replace("%", "%%")
    log = log.replace("\\", "\\\\").replace('"', '\\"')
    lines = [
        f"--job-name={script.stem}",
        f"--nodes={max(group.hosts for group in sweep.file.groups)}",
        f"--ntasks-per-node={max(group.ranks_per_host for group in sweep.file.groups)}",
        f'--output="{log}-%j.out"',
        # Queued again, a job keeps its number and log.
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--requeue",
        # sbatch takes the last of two.
        *header,
    ]
    head = "".join(f"#SBATCH {line}\n" for line in lines)
    return (
        f"#!/bin/bash\n{head}\n"
        "# Written by dynamiccl-collect. It resumes the sweep, so it may run any number of times.\n"
        f"exec {shlex.join(argv)}\n"
    )


def _is_option(line: str) -> bool:
    """Whether a header line begins with an option, and none of its words asks for an array."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quotation without end
        return False
    begins = re.fullmatch(r"--?[A-Za-z][^\n]*", line) is not None
    return begins and not any(map(_ARRAY.fullmatch, words))


def find(script: Path) -> tuple[str, str] | None:
    """Number and state of this script's job that waits or runs. Raises MachineError."""
    layout = ("--noheader", "--states=all", "--format=%i|%T|%r|%N|%o")
    ran = _slurm("squeue", f"--user={os.getuid()}", *layout)
    if not ran.worked:
        raise MachineError(f"squeue says nothing about our jobs: {_words(ran)}")
    for line in [one for one in ran.output.splitlines() if one.count("|") > 3]:
        number, state, reason, nodes, path = line.strip().split("|", 4)
        if path == str(script) and state not in ENDED:
            fix = ": more than its partition has now or allows; scancel it, and ask for less"
            why = f" ({reason}{fix * (reason in _TOO_MUCH)})" * (reason != "None")
            place = f" on {nodes}" if nodes else ""
            return number, state + (why if state == "PENDING" else place)
    return None


def queue_again(script: Path, environ: Mapping[str, str]) -> None:
    """Queue the job of `environ` again, or another one after it. Raises MachineError."""
    number = environ["SLURM_JOB_ID"]
    # Slurm ends this process soon after.
    _log.warning("work is left: queueing job %s again", number)
    ran = _slurm("scontrol", "requeue", number)
    if not ran.worked:
        follower = _submit(script, f"--dependency=afterany:{number}")
        _log.warning("job %s follows in its place, since Slurm says: %s", follower, _words(ran))


def _submit(script: Path, *options: str) -> str:
    """The new job's number; options given here win over the script's."""
    # Else the next job would inherit this one's variables, such as memory per CPU, and our LC_ALL.
    ours = [n for n in os.environ if n.startswith("SLURM_") and n not in _KEPT]
    drop = [word for name in (*ours, "LC_ALL") for word in ("-u", name)]
    locale = [f"LC_ALL={os.environ['LC_ALL']}"] if "LC_ALL" in os.environ else []
    ran = _slurm("env", *drop, *locale, "sbatch", "--parsable", *options, str(script))
    # "1234", or "1234;cluster", after warnings and what a site's wrapper says.
    lines = [re.fullmatch(r"\s*(\d+)(;.*)?\s*", line) for line in ran.output.splitlines()]
    numbers = [found[1] for found in lines if found]
    if not ran.worked and shutil.which("sbatch") is None:
        raise MachineError(f"no sbatch on PATH: {_words(ran)}; run this where Slurm's commands are")
    if not ran.worked or not numbers:
        raise MachineError(
            f"sbatch refused {script}: {_words(ran)}; correct launcher.sbatch_header or the "
            "sweep's groups"
        )
    return numbers[-1]


def _slurm(*argv: str) -> ProgramResult:
    ran = Machine().run(*argv, limit_s=_ANSWER_S)
    if ran.returncode is None:
        raise MachineError(f"no answer from Slurm to '{' '.join(argv)}': {ran.output}")
    return ran


def _words(ran: ProgramResult) -> str:
    return " | ".join(ran.output.strip().splitlines()) or "no message"
