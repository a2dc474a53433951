"""Runs a sweep as a Slurm batch job that queues itself again while work is left.

    OUT/.slurm/NAME.sbatch    the script; it resumes the sweep, so it may run any number of times
    OUT/.slurm/NAME-JOB.out   what the job printed
    OUT/.slurm/NAME.jobs/1    numbers of the jobs of the first submission; 2 of the next, and so on

`submit` returns as soon as Slurm has the job; nobody watches it. Slurm sends SIGUSR1 to the batch
shell before the time limit (`--signal=B:USR1@120`). The shell replaces itself by the sweep
(`exec`), which so gets the signal itself, finishes its trial, stops, and calls `queue_again`. A
shell that forwards signals by `trap` may lose one that comes just before its `wait`.
"""

import logging
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.errors import InvalidSweep, MachineError, UserError
from dynamiccl.slurm import NoAnswer, SlurmQueue, bare_option, option_name, quoted, summarise

_log = logging.getLogger(__name__)

_QUEUE: Final = SlurmQueue("correct launcher.sbatch_header or the sweep's groups")


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A sweep as a batch job."""

    #: Absolute path of the batch script, from `script_path`.
    script: Path
    #: What an element of the job runs.
    command: tuple[str, ...]
    #: Nodes, and ranks on each, of the largest group.
    num_nodes: int
    ranks_per_node: int
    #: The user's lines, e.g. "--time=02:00:00".
    header: tuple[str, ...] = ()
    #: Elements of the job array that share the sweep.
    array: int = 1


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that waits or runs."""

    #: Its number; of an array whose elements were submitted again, several: "77,81".
    number: str
    #: As `summarise` words it, e.g. "RUNNING on n[1-2]".
    state: str


def script_path(out: Path, name: str) -> Path:
    """Path of the batch script of the sweep called `name`; its stem is a valid job name."""
    return out.absolute() / ".slurm" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.sbatch"


def batch_script(job: BatchJob) -> str:
    """The text of the batch script (pure): our options, the user's, which win, and the command.

    Raises:
        InvalidSweep: a header line that is no option, or that sets the array.
    """
    for line in job.header:
        if option_name(line) is None:
            raise InvalidSweep(
                f"sbatch_header line '{line}' is no option of sbatch; write one option a line, "
                'e.g. "--time=02:00:00"'
            )
        if option_name(line) == "array":
            raise InvalidSweep(
                "sbatch_header sets --array, which the sweep's shards depend on; set launcher.array"
            )
    # sbatch reads a percent sign in a file name as a pattern.
    log = str(job.script.with_suffix("")).replace("%", "%%")
    command = shlex.join(job.command)
    options = [
        f"--job-name={job.script.stem}",
        f"--nodes={job.num_nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--output={quoted(log + ('-%A_%a.out' if job.array > 1 else '-%j.out'))}",
        # A job that is queued again keeps its number, and its log goes on.
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--requeue",
    ]
    if job.array > 1:
        options.append(f"--array=0-{job.array - 1}")
        command += f' --shard "$SLURM_ARRAY_TASK_ID/{job.array}"'
    # Of an option that is given twice sbatch takes the last.
    options += map(bare_option, job.header)
    head = "".join(f"#SBATCH {option}\n" for option in options)
    return (
        f"#!/bin/bash\n{head}\n"
        "# Written by dynamiccl-collect. It resumes the sweep, so it may run any number of times.\n"
        f"exec {command}\n"
    )


def find_job(script: Path) -> QueuedJob | None:
    """The job of an earlier call that waits or runs; None where all have ended.

    Raises:
        MachineError: Slurm does not answer.
        UserError: another call is in the midst of submitting.
    """
    submission = _last_submission(script)
    if submission == 0:
        return None
    path, numbers = _numbers_file(script, submission), list[str]()
    with suppress(FileNotFoundError):  # refused at this moment
        numbers = path.read_text(encoding="utf-8").split()
    if not numbers:
        raise _being_submitted(path)
    # Another cluster, or the same one years later, may know another job by this number.
    found = [e for e in _QUEUE.elements(",".join(numbers)) if e.script == str(script)]
    alive = tuple(element for element in found if not element.ended)
    if not alive:
        return None
    jobs = dict.fromkeys(element.id.partition("_")[0] for element in alive)
    return QueuedJob(",".join(jobs), summarise(alive))


def submit(job: BatchJob) -> QueuedJob:
    """Write the script and submit it, unless a job of it waits or runs: then that one.

    Of calls at the same time one submits: the one that creates the file for the numbers.

    Raises:
        InvalidSweep: a header line that sbatch cannot take.
        MachineError: the job is refused, or Slurm does not answer.
        UserError: another call is in the midst of submitting.
    """
    text = batch_script(job)
    # Before the look at the queue: where another call submits meanwhile, this file is there.
    numbers = _numbers_file(job.script, _last_submission(job.script) + 1)
    if there := find_job(job.script):
        return there
    numbers.parent.mkdir(parents=True, exist_ok=True)
    try:
        numbers.touch(exist_ok=False)
    except FileExistsError as error:
        raise _being_submitted(numbers) from error
    try:
        job.script.write_text(text, encoding="utf-8")
        number = _QUEUE.submit(job.script)
    except NoAnswer:
        raise  # it may be in the queue
    except (OSError, MachineError):
        numbers.unlink()
        raise
    numbers.write_text(f"{number}\n", encoding="utf-8")
    return QueuedJob(number, "submitted")


def queue_again(script: Path, environ: Mapping[str, str]) -> None:
    """Have Slurm run the job that we are in again; where that is refused, another one after it.

    In an array only this element is queued again. Slurm ends this process soon after.

    Args:
        script: the batch script.
        environ: the job's environment.

    Raises:
        MachineError: Slurm refuses both, or does not answer.
    """
    number, options = environ["SLURM_JOB_ID"], []
    if "SLURM_ARRAY_JOB_ID" in environ:
        # The number of the last element is that of the whole array.
        task = environ["SLURM_ARRAY_TASK_ID"]
        number, options = f"{environ['SLURM_ARRAY_JOB_ID']}_{task}", [f"--array={task}"]
    _log.warning("work is left: queueing job %s again", number)
    refusal = _QUEUE.requeue(number)
    if refusal is None:
        return
    follower = _QUEUE.submit(script, f"--dependency=afterany:{number}", *options)
    with _numbers_file(script, _last_submission(script)).open("a", encoding="utf-8") as file:
        file.write(f"{follower}\n")
    _log.warning("job %s follows, since Slurm says: %s", follower, refusal)


def _numbers_file(script: Path, submission: int) -> Path:
    return script.with_suffix(".jobs") / str(submission)


def _last_submission(script: Path) -> int:
    return max((int(path.name) for path in script.with_suffix(".jobs").glob("[0-9]*")), default=0)


def _being_submitted(path: Path) -> UserError:
    return UserError(
        f"another call is submitting this sweep: {path} waits for its job's number; look again, or "
        "where no call is, write the number that `squeue --me` shows into it, or remove it"
    )
