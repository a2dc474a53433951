"""What every place that runs trials has in common: which trials in, outcomes out as they come."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

#: Two threads on a busy core spin against each other: trials side by side take one each.
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial came to."""

    number: int
    #: Its mean regret on the validation bins; None when it failed.
    validation_regret: float | None
    #: What it said last, when it failed.
    error: str


class Backend(Protocol):
    """A place where trials run."""

    def run(self, run_id: str, numbers: Sequence[int], tracking_uri: str) -> Iterator[Outcome]:
        """Run these trials of the study `run_id`; a trial that fails stops no other.

        `tracking_uri` means the same wherever a trial may run. Raises MachineError when the place
        itself fails us.
        """


def trial_arguments(run_id: str, number: str, tracking_uri: str) -> list[str]:
    """The arguments of Python for one trial; `number` is as the place spells it."""
    command = ["-P", "-m", "dynamiccl.train.cli", "trial", run_id, number]
    return [*command, "--tracking-uri", tracking_uri, "--json"]


def reason(said: str) -> str:
    r"""Why a trial failed, from all that it said.

    Our own error, or else the last line that begins at the margin.

    >>> reason("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n")
    "KeyError: 'a'"
    """
    lines = [line for line in said.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("error: ")]
    flush = [line for line in lines if not line[0].isspace()]
    return (ours or flush or [""])[-1].removeprefix("error: ")
