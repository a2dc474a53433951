"""Random: each cycle a fresh uniform share of every task's configs, and NCCL's default twice."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.strategies.strategy import (
    Outcome,
    TaskTrials,
    group_by_task,
    infeasible_picks,
    seed_of,
)


class RandomShare:
    """Measures `share` of each task's configs per cycle, drawn without replacement.

    The probability of a pick is that of any one draw taking it, 1 / number of configs, as it is of
    a slot's config in an adaptive sweep.
    """

    def __init__(
        self, name: str, trials: Sequence[Trial], *, cycles: int, share: float, seed: int = 0
    ) -> None:
        """`share` is in (0, 1]."""
        self._name = name
        self._seed = seed
        self._cycles = cycles
        self._share = share
        self._infeasible = infeasible_picks(trials)
        self._tasks = group_by_task(trials)

    def next_picks(
        self,
        number: int,
        history: Sequence[Outcome],  # noqa: ARG002 - what is measured does not depend on it
    ) -> tuple[Trial, ...] | None:
        """This round's share in random order; None after the last cycle."""
        if number >= self._cycles:
            return None
        picks = [pick for task in self._tasks for pick in self._share_of(task, number)]
        random.Random(seed_of(self._name, self._seed, number)).shuffle(picks)
        return (*self._infeasible, *picks) if number == 0 else tuple(picks)

    def expected_picks(self) -> int:
        """The exact number."""
        in_cycle = sum(len(t.default_pair()) + self._number_drawn(t) for t in self._tasks)
        return len(self._infeasible) + self._cycles * in_cycle

    def _number_drawn(self, task: TaskTrials) -> int:
        return math.ceil(self._share * len(task.candidates) - 1e-9)

    def _share_of(self, task: TaskTrials, number: int) -> tuple[Trial, ...]:
        count = self._number_drawn(task)
        generator = random.Random(seed_of(self._name, self._seed, number, task.key))
        drawn = generator.sample(task.candidates, count)
        return (
            *task.default_pair(),
            *(replace(trial, probability=1 / len(task.candidates)) for trial in drawn),
        )
