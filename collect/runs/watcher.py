"""The callback interface for the progress of a sweep."""

from collections.abc import Callable
from typing import Protocol

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.outcomes import Outcome


class Watcher(Protocol):
    """Receives the progress of a sweep, and may ask it to stop."""

    def expect(self, picks: int) -> None:
        """Called with the number of picks in all, as far as known."""

    def advance(self, picks: int) -> None:
        """Called when picks are done."""

    def outcome(self, trial: Trial, outcome: Outcome) -> None:
        """Called with one pick's outcome."""

    def stopping(self) -> bool:
        """Whether to stop after the launch that is running."""


class Silent:
    """A watcher that ignores everything."""

    def expect(self, picks: int) -> None:
        """Do nothing."""

    def advance(self, picks: int) -> None:
        """Do nothing."""

    def outcome(self, trial: Trial, outcome: Outcome) -> None:
        """Do nothing."""

    def stopping(self) -> bool:
        """Always False."""
        return False


class AtMost:
    """Forwards progress up to a limit: a launch may measure more than its picks to fill gaps."""

    def __init__(self, left: int, advance: Callable[[int], None]) -> None:
        """Forward at most `left` picks to `advance`."""
        self._left = left
        self._advance = advance

    def advance(self, picks: int) -> None:
        """Forward picks that are done, up to the limit."""
        told = min(picks, self._left)
        self._left -= told
        if told:
            self._advance(told)
