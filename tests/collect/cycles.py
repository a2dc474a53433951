"""A strategy for tests of the run loop: every trial once a cycle, the default twice."""

from collections.abc import Sequence
from dataclasses import replace

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.strategies import Outcome
from dynamiccl.nccl import ABSTAIN


class Cycles:
    """All trials in every one of `cycles` rounds; infeasible ones in the first."""

    def __init__(self, trials: Sequence[Trial], cycles: int) -> None:
        self._trials = trials
        self._cycles = cycles
        self.asked: list[tuple[int, int]] = []

    def next_picks(self, number: int, history: Sequence[Outcome]) -> tuple[Trial, ...] | None:
        self.asked.append((number, len(history)))
        if number >= self._cycles:
            return None
        return tuple(
            replace(trial, repeat=repeat)
            for trial in self._trials
            for repeat in range(2 if trial.config == ABSTAIN else 1)
            if trial.infeasible is None or number == 0
        )

    def expected_picks(self) -> int:
        return sum(len(self.next_picks(number, ()) or ()) for number in range(self._cycles))
