"""The interface of a backend that runs trials."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial."""

    number: int
    #: Its mean regret on the validation bins; None when it failed.
    validation_regret: float | None
    #: What it said last, when it failed.
    error: str


class Backend(Protocol):
    """Runs trials."""

    def run(self, run_id: str, numbers: Sequence[int], tracking_uri: str) -> Iterator[TrialResult]:
        """Run these trials of the study `run_id`, and yield outcomes as they come.

        A failed trial stops no other. `tracking_uri` must mean the same wherever a trial may run.
        Raises MachineError when the backend itself fails.
        """


def trial_arguments(run_id: str, number: str, tracking_uri: str) -> list[str]:
    """Arguments of Python for one trial; `number` is spelled as the backend needs it."""
    command = ["-P", "-m", "dynamiccl.train.cli", "trial", run_id, number]
    return [*command, "--tracking-uri", tracking_uri, "--json"]
