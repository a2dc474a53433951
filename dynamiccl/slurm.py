"""Slurm by its commands sbatch, squeue and scontrol; needs no accounting database."""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.errors import MachineError

#: States in which an element will not run any more (squeue(1), "JOB STATE CODES"). Every other
#: state, those of releases to come included, counts as alive.
ENDED_STATES: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
#: Long names of sbatch's one-letter options (sbatch(1), Slurm 22.05 to 25.05) that matter to us.
_SHORT: Final = {"J": "job-name", "N": "nodes", "o": "output", "a": "array"}
#: Options of which one replaces the other.
_SAME: Final = {"no-requeue": "requeue"}
_OPTION: Final = re.compile(r"--([a-z0-9-]+)(?:[= ]|$)|-([A-Za-z])")
#: Seconds that a busy controller may take to answer (its own MessageTimeout is 10 by default).
_ANSWER_S: Final = 60.0
#: Variables that tell clients where Slurm is (sbatch(1), "INPUT ENVIRONMENT VARIABLES").
_KEPT: Final = ("SLURM_CONF", "SLURM_CLUSTERS")


@dataclass(frozen=True, slots=True)
class Pace:
    """Polling intervals, in seconds."""

    #: Between two looks right after a change ...
    shortest_s: float = 1.0
    #: ... and at most; a controller is shared by everybody.
    longest_s: float = 15.0
    #: A shared file system may show a node's last files late.
    settle_s: float = 15.0
    #: How long a controller may be away, e.g. for a restart.
    patience_s: float = 600.0


class NoAnswer(MachineError):
    """Raised when a command of Slurm was ended since it did not answer: it may have been heard."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Exit status and output of a short command."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Element:
    """A job, or one element of a job array."""

    id: str
    state: str
    #: Why it waits or ended, in Slurm's word.
    reason: str
    #: Its nodes, in Slurm's notation; empty while it waits.
    nodes: str
    #: The batch script.
    script: str

    @property
    def ended(self) -> bool:
        """Whether it has ended for good."""
        return self.state in ENDED_STATES


@dataclass(frozen=True, slots=True)
class SlurmQueue:
    """Slurm by its commands on PATH."""

    #: What somebody can do about a script that is refused.
    fix: str

    def submit(self, script: Path, *options: str) -> str:
        """Run sbatch; options given here win over the script's.

        Raises:
            NoAnswer: it may be submitted or not.
            MachineError: sbatch is not there or refuses the script; its words are in the message.
        """
        # Inside a job, its variables would be the next job's too: its array, its memory a CPU.
        environ = {n: v for n, v in os.environ.items() if n in _KEPT or not n.startswith("SLURM_")}
        argv = ("sbatch", "--parsable", *options, str(script))
        done = capture(argv, timeout_s=_ANSWER_S, environ=environ)
        if done.returncode != 0:
            raise MachineError(f"sbatch refused {script}: {_words(done)}; {self.fix}")
        # "1234", or "1234;cluster".
        return done.stdout.strip().partition(";")[0]

    def requeue(self, job: str) -> str | None:
        """Have a job run again under its number; returns None, or why Slurm refuses.

        Raises:
            MachineError: scontrol is not there, or the controller does not answer.
        """
        done = capture(("scontrol", "requeue", job), timeout_s=_ANSWER_S)
        return None if done.returncode == 0 else _words(done)

    def elements(self, job: str) -> tuple[Element, ...]:
        """Run squeue; one element for each of an array, pending ones too.

        Raises:
            MachineError: the controller does not answer.
        """
        layout = ("--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N|%o")
        done = capture(("squeue", f"--jobs={job}", *layout), timeout_s=_ANSWER_S)
        if done.returncode != 0:
            # Jobs are forgotten after MinJobAge (slurm.conf(5): 300 s).
            if "Invalid job id" in done.stderr:
                return ()
            raise MachineError(f"squeue says nothing about job {job}: {_words(done)}")
        return parse_queue(done.stdout)


def parse_queue(text: str) -> tuple[Element, ...]:
    """Read squeue's lines in our format (pure)."""
    found = []
    for line in text.splitlines():
        number, state, reason, nodes, script = line.strip().split("|", 4)
        found.append(Element(number, state, reason, nodes, script))
    return tuple(found)


def _words(done: Captured) -> str:
    return " | ".join((done.stderr or done.stdout).strip().splitlines()) or "no message"


def summarise(elements: tuple[Element, ...]) -> str:
    """One line about a job: how many elements are in which state, where or why (pure)."""
    if not elements:
        return "gone from the queue"
    counts = Counter(_state_words(element) for element in elements)
    if len(elements) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {words}" for words, count in sorted(counts.items()))


def _state_words(element: Element) -> str:
    if element.state == "PENDING" or element.ended:
        return element.state + ("" if element.reason == "None" else f" ({element.reason})")
    return element.state + (f" on {element.nodes}" if element.nodes else "")


def option_name(line: str) -> str | None:
    """The long name of the sbatch option that a line sets; None when it sets none.

    >>> option_name("#SBATCH -N 2"), option_name("--no-requeue"), option_name("fast, please")
    ('nodes', 'requeue', None)
    """
    found = _OPTION.match(bare_option(line))
    if found is None or "\n" in line:
        return None
    name = found[1] or _SHORT.get(found[2], found[2])
    return _SAME.get(name, name)


def bare_option(line: str) -> str:
    """An option line without its `#SBATCH` mark."""
    return line.strip().removeprefix("#SBATCH").strip()


def quoted(value: str) -> str:
    """A value quoted for an option line."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def capture(
    argv: tuple[str, ...], *, timeout_s: float, environ: Mapping[str, str] | None = None
) -> Captured:
    """Run a short command, e.g. squeue, to its end, in our environment or another.

    Raises:
        NoAnswer: it does not end in time.
        MachineError: it is not there.
    """
    try:
        done = subprocess.run(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            start_new_session=True,
        )
    except OSError as error:
        raise MachineError(f"cannot start '{argv[0]}': {error.strerror}; install it") from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"no answer from '{' '.join(argv)}' in {timeout_s:g} s") from error
    return Captured(done.returncode, done.stdout, done.stderr)
