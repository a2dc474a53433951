"""The budget of a sweep: measurements and seconds, added up over all of its jobs."""

import math
from collections.abc import Callable, Sequence

from dynamiccl.collect.runner import Launch, LaunchMode, Pick
from dynamiccl.collect.sweep import BudgetSettings


class Budget:
    """The budget of one shard of a sweep: measurements, and seconds inside launches."""

    def __init__(self, settings: BudgetSettings, share: tuple[int, int]) -> None:
        """The budget of shard `share[0]` of `share[1]`: an equal part of the measurements."""
        index, count = share
        most = settings.max_measurements
        self._most_measured = math.inf if most is None else most // count + (index < most % count)
        self._most_seconds = settings.max_seconds
        self._measured = 0
        self._seconds = 0.0

    def add(self, measured: int, seconds: float) -> None:
        """Count what a launch took."""
        self._measured += measured
        self._seconds += seconds

    @property
    def is_spent(self) -> bool:
        """Whether no further launch may begin."""
        return self._measured >= self._most_measured or self._seconds >= self._most_seconds

    def cut(
        self,
        launch: Launch,
        picks: Sequence[Pick],
        num_lost: int,
        count: Callable[[Sequence[Pick]], int] = len,
    ) -> tuple[Sequence[Pick], Sequence[Pick]]:
        """The picks of a launch that the budget still pays for, and the rest.

        Args:
            launch: the next launch. Read-back and reference launches cost nothing.
            picks: its picks.
            num_lost: picks of this launch that count, and got a row without being run.
            count: number of measurements of a launch with these picks, gap fillers included.
        """
        if launch.mode in {LaunchMode.REFERENCE, LaunchMode.READ_BACK}:
            return picks, ()
        left = max(0.0, self._most_measured - self._measured - num_lost)
        # A single pick needs no gap fillers.
        allowed = int(min(left, len(picks)))
        while allowed > 1 and count(picks[:allowed]) > left:
            allowed -= 1
        return picks[:allowed], picks[allowed:]
