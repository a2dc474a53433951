"""Epsilon-greedy as an online tuner: the fastest config so far, and sometimes a random one.

It needs no policy and no training. As the search of a job it is an example, not advice: what it
tries can be many times slower than NCCL's own choice.
"""

from typing import Final

import numpy as np

from dynamiccl.serve.search.space import SearchSpace
from dynamiccl.serve.search.tuner import Key, SpaceOf, State, check_time

#: Share of the decisions about a task key that try something at random.
EPSILON: Final = 0.1


class _Arms:
    """One task key: the mean reward (minus log time) of each arm."""

    def __init__(self, space: SearchSpace) -> None:
        self.actions = np.array(space.actions)
        self._sums, self._counts = np.zeros((2, len(self.actions)))
        #: Of arms that were not tried, below all others.
        self._means = np.full(len(self.actions), -np.inf)
        self.playing = space.actions.index(space.begin)
        self.is_told = False

    def best(self) -> int:
        """The arm with the smallest mean log time; the current one where none was played."""
        return int(self._means.argmax()) if self._counts.any() else self.playing

    def tell(self, time_us: float, ran: int) -> None:
        arm = int(self.actions.searchsorted(ran))
        self._sums[arm] -= np.log(time_us)
        self._counts[arm] += 1
        self._means[arm] = self._sums[arm] / self._counts[arm]
        self.is_told |= arm == self.playing

    def decide(self, epsilon: float, random: np.random.Generator) -> None:
        """Choose the next arm."""
        self.is_told = False
        if random.random() < epsilon:
            self.playing = int(random.integers(len(self.actions)))
        else:
            self.playing = self.best()


class EpsilonGreedy:
    """Epsilon-greedy over all task keys of one job."""

    def __init__(self, space_of: SpaceOf, *, epsilon: float = EPSILON, seed: int = 0) -> None:
        """`epsilon`: the share of decisions that try something at random."""
        self._space_of, self._epsilon = space_of, epsilon
        self._random = np.random.default_rng(seed)
        self._arms: dict[Key, _Arms] = {}

    def ask(self, key: Key) -> int:
        """The arm to play."""
        arms = self._open(key)
        if arms.is_told:
            arms.decide(self._epsilon, self._random)
        return int(arms.actions[arms.playing])

    def tell(self, key: Key, time_us: float, action: int | None = None) -> None:
        """Record a call."""
        check_time(time_us)
        arms = self._open(key)
        arms.tell(time_us, int(arms.actions[arms.playing]) if action is None else action)

    def best(self, key: Key) -> int:
        """The fastest arm so far."""
        arms = self._open(key)
        return int(arms.actions[arms.best()])

    def state(self, key: Key) -> State:
        """Always searching: it never ends."""
        return State.PROBING if key in self._arms else State.IDLE

    def alarm(self, key: Key | None = None) -> None:
        """Do nothing."""

    def _open(self, key: Key) -> _Arms:
        if key not in self._arms:
            self._arms[key] = _Arms(self._space_of(key))
        return self._arms[key]
