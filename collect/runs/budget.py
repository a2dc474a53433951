"""The budget of a sweep: measurements and seconds, added up over all of its jobs."""

import math
from collections.abc import Callable, Sequence

from dynamiccl.collect.runner import Launch, LaunchMode, Pick
from dynamiccl.collect.sweep.settings import BudgetSettings


class Budget:
    """Measurements, and seconds inside launches, of one shard of a sweep."""

    def __init__(self, settings: BudgetSettings, share: tuple[int, int]) -> None:
        """Take shard `share[0]` of `share[1]`: they share the measurements and run side by side."""
        index, count = share
        most = settings.max_measurements
        self._most_measured = math.inf if most is None else most // count + (index < most % count)
        self._most_seconds = settings.max_seconds
        self._measured = 0
        self._seconds = 0.0

    def add(self, measured: int, seconds: float) -> None:
        """Subtract what a launch took."""
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
            launch: what is to run. Read-back and references, which nobody picked, are free.
            picks: what the launch would measure.
            num_lost: picks of this launch that count, and have a row without being run.
            count: how many measurements a launch of these picks makes, with what fills its gaps.
        """
        if launch.mode in {LaunchMode.REFERENCE, LaunchMode.READ_BACK}:
            return picks, ()
        left = max(0.0, self._most_measured - self._measured - num_lost)
        # The first pick alone leaves no gap.
        allowed = int(min(left, len(picks)))
        while allowed > 1 and count(picks[:allowed]) > left:
            allowed -= 1
        return picks[:allowed], picks[allowed:]
