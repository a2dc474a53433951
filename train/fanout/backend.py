"""What every place that runs trials has in common: which trials in, outcomes out as they come."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


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
