"""The seam between a sweep and what measures it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dynamiccl.collect.sweep import Trial

#: A measurement as column -> value; columns that are missing take the schema's neutral value.
Row = Mapping[str, Any]


class Runner(Protocol):
    """Measures trials. An attempt that fails is a row with a status and a reason, never a gap."""

    def check(self, trials: Sequence[Trial]) -> None:
        """Refuse, before anything runs, a sweep that this runner cannot measure at all.

        Raises UserError or MachineError with the fix.
        """

    def measure(self, trial: Trial, *, run: str, repeat: int) -> list[Row]:
        """Measure one trial once; one row for each buffer placement measured."""
