"""The batch script of a sweep: sbatch options that the user did not give, and a resuming body.

Slurm sends SIGUSR1 to the batch shell before the time limit (`--signal=B:USR1@120`) and SIGTERM on
preemption and scancel. The shell replaces itself by the sweep (`exec`), which so gets the signals
itself, finishes its trial and stops. A shell that forwards signals by `trap` may lose one that
comes just before its `wait`.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.errors import InvalidSweep
from dynamiccl.slurm import bare_option, option_name, quoted

_BODY: Final = """\
# Written by dynamiccl-collect. It resumes the sweep, so it may run any number of times.
exec COMMAND
"""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A sweep as a batch job."""

    #: The sweep's name.
    name: str
    #: Absolute data directory, on a file system that all nodes share.
    out: Path
    #: What an element of the job runs; see `run_command`.
    command: tuple[str, ...]
    #: Nodes, and ranks on each, of the largest group.
    num_nodes: int
    ranks_per_node: int
    #: The user's lines, e.g. "--time=02:00:00".
    header: tuple[str, ...] = ()
    #: Elements of the job array that share the sweep.
    array: int = 1

    @property
    def word(self) -> str:
        """The sweep's name as a valid file or job name."""
        return re.sub(r"[^A-Za-z0-9._-]", "-", self.name)

    @property
    def folder(self) -> Path:
        """Folder of the script, its log and the job id."""
        return self.out / ".slurm"

    @property
    def script(self) -> Path:
        """Path of the batch script."""
        return self.folder / f"{self.word}.sbatch"

    @property
    def number_file(self) -> Path:
        """Path of the file with the id of the last submitted job."""
        return self.folder / f"{self.word}.job"


def run_command(
    sweep: Path,
    out: Path,
    *options: str,
    program: tuple[str, ...] = (sys.executable, "-P", "-m", "dynamiccl.collect.cli"),
) -> tuple[str, ...]:
    """The command inside the job that resumes the sweep; `run` options can be appended."""
    paths = (str(sweep.absolute()), "--out", str(out.absolute()))
    return (*program, "run", *paths, "--launcher", "srun", "--resume", *options)


def batch_script(job: BatchJob) -> str:
    """The text of the batch script (pure).

    Raises:
        InvalidSweep: a header line that is no option, or that sets the array.
    """
    given = {_option(line) for line in job.header}
    if "array" in given:
        raise InvalidSweep(
            "sbatch_header sets --array, which the sweep's shards depend on; set launcher.array"
        )
    lines = ["#!/bin/bash"]
    for name, value in _options(job):
        if name not in given:
            lines.append(f"#SBATCH --{name}" + (f"={value}" if value else ""))
    lines += [f"#SBATCH {bare_option(line)}" for line in job.header]
    command = shlex.join(job.command)
    if job.array > 1:
        command += f' --shard "$SLURM_ARRAY_TASK_ID/{job.array}"'
    return "\n".join([*lines, "", _BODY.replace("COMMAND", command)])


def _options(job: BatchJob) -> Iterator[tuple[str, str]]:
    number = "%A_%a" if job.array > 1 else "%j"
    # sbatch reads a percent sign in a file name as a pattern.
    folder = str(job.folder).replace("%", "%%")
    yield "job-name", job.word
    yield "nodes", str(job.num_nodes)
    yield "ntasks-per-node", str(job.ranks_per_node)
    yield "output", quoted(f"{folder}/{job.word}-{number}.out")
    # A requeued job keeps its number, and its log goes on.
    yield "open-mode", "append"
    yield "signal", "B:USR1@120"
    yield "requeue", ""
    if job.array > 1:
        yield "array", f"0-{job.array - 1}"


def _option(line: str) -> str:
    """The long name of the option that a header line sets."""
    name = option_name(line)
    if name is None:
        raise InvalidSweep(
            f"sbatch_header line '{line}' is no option of sbatch; write one option a line, "
            'e.g. "--time=02:00:00"'
        )
    return name
