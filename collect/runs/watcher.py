"""What is told how a sweep gets on."""

from collections.abc import Callable
from typing import Protocol

from dynamiccl.collect.outcomes import Outcome
from dynamiccl.collect.sweep.trial import Trial


class Watcher(Protocol):
    """Is told what happens, for a progress bar; and may say when to stop."""

    def expect(self, picks: int) -> None:
        """How many picks the sweep will have measured in all, as far as is known."""

    def advance(self, picks: int) -> None:
        """So many more picks are done."""

    def outcome(self, trial: Trial, outcome: Outcome) -> None:
        """One pick's outcome."""

    def stopping(self) -> bool:
        """Whether to stop after the launch that is running."""


class Silent:
    """The watcher of a run that nobody watches."""

    def expect(self, picks: int) -> None:
        """Nothing."""

    def advance(self, picks: int) -> None:
        """Nothing."""

    def outcome(self, trial: Trial, outcome: Outcome) -> None:
        """Nothing."""

    def stopping(self) -> bool:
        """Never."""
        return False


class AtMost:
    """Passes progress on up to what was asked for: a launch may measure more, to fill its gaps."""

    def __init__(self, left: int, advance: Callable[[int], None]) -> None:
        """Take how much may be passed on, and to whom."""
        self._left = left
        self._advance = advance

    def advance(self, picks: int) -> None:
        """So many more picks are done."""
        told = min(picks, self._left)
        self._left -= told
        if told:
            self._advance(told)
