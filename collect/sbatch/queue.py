"""The batch system's own commands: sbatch, squeue, scancel. No accounting database is needed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from dynamiccl.collect.processes.process import Captured, capture
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
#: Seconds that a busy controller may take to answer (its own MessageTimeout is 10 by default).
_ANSWER_S: Final = 60.0


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
        """Whether it will not run any more."""
        return self.state in ENDED_STATES


class Queue(Protocol):
    """Where batch jobs go."""

    def submit(self, script: Path) -> str:
        """Hand in a script; the job's number. Raises MachineError when it is refused."""

    def elements(self, job: str) -> tuple[Element, ...]:
        """What is known of a job; nothing when the queue has forgotten it.

        Raises MachineError when there is no answer.
        """

    def cancel(self, job: str) -> None:
        """End a job with all its elements."""


class SlurmQueue:
    """Slurm by its commands on PATH."""

    def submit(self, script: Path) -> str:
        """Run sbatch.

        Raises:
            MachineError: sbatch is not there or refuses the script; its words are in the message.
        """
        done = capture(("sbatch", "--parsable", str(script)), timeout_s=_ANSWER_S)
        if done.returncode != 0:
            raise MachineError(
                f"sbatch refused {script}: {_words(done)}; correct launcher.sbatch_header or the "
                "sweep's groups"
            )
        # "1234", or "1234;cluster".
        return done.stdout.strip().partition(";")[0]

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

    def cancel(self, job: str) -> None:
        """Run scancel.

        Raises:
            MachineError: the controller does not answer or refuses.
        """
        done = capture(("scancel", job), timeout_s=_ANSWER_S)
        if done.returncode != 0:
            raise MachineError(f"scancel {job} failed: {_words(done)}; cancel it by hand")


def parse_queue(text: str) -> tuple[Element, ...]:
    """Read squeue's lines in our format (pure)."""
    found = []
    for line in text.splitlines():
        number, state, reason, nodes, script = line.strip().split("|", 4)
        found.append(Element(number, state, reason, nodes, script))
    return tuple(found)


def _words(done: Captured) -> str:
    return " | ".join((done.stderr or done.stdout).strip().splitlines()) or "no message"
