"""Exhaustive: every feasible trial once a cycle, NCCL's default twice."""

import random
from collections.abc import Sequence

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.strategies.strategy import (
    Outcome,
    group_by_task,
    infeasible_picks,
    seed_of,
)


class Exhaustive:
    """Measures the whole grid `cycles` times, each time in another order."""

    def __init__(self, name: str, trials: Sequence[Trial], *, cycles: int, seed: int = 0) -> None:
        """The order is seeded by name, seed and round."""
        self._name = name
        self._seed = seed
        self._cycles = cycles
        self._infeasible = infeasible_picks(trials)
        self._picks = tuple(
            pick
            for task in group_by_task(trials)
            for pick in (*task.default_pair(), *task.candidates)
        )

    def next_picks(
        self,
        number: int,
        history: Sequence[Outcome],  # noqa: ARG002 - what is measured does not depend on it
    ) -> tuple[Trial, ...] | None:
        """The whole grid in this round's order; None after the last cycle."""
        if number >= self._cycles:
            return None
        picks = list(self._picks)
        random.Random(seed_of(self._name, self._seed, number)).shuffle(picks)
        return (*self._infeasible, *picks) if number == 0 else tuple(picks)

    def expected_picks(self) -> int:
        """The exact number."""
        return len(self._infeasible) + self._cycles * len(self._picks)
