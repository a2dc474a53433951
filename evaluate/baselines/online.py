"""Searchers: no model, no data set; they try configs on the very task, and what they try counts.

A probe is one measured time of a cell, drawn from its independent repeats. Reports give the regret
of the config that a searcher ends with, and beside it the probes of a task that it took to get
there: calls that ran some other config in the meantime. It probes the very runs that it is scored
on, so that even its cross-fitted regret flatters it, as the oracle's does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.policies import Actions

#: (channels, chunk bytes) of a config; None = left to NCCL.
Place = tuple[int | None, int | None]

#: Calls of a task that a bandit may spend.
BANDIT_PROBES: Final = 400


class Prober:
    """Measures configs of one task, again and again; each draw is a probe."""

    def __init__(self, grid: TaskGrid, task: int, random: np.random.Generator) -> None:
        """Measure the task of row `task`."""
        self.actions = np.flatnonzero(grid.mask[task])
        self.count = 0
        self._samples = {int(a): grid.samples[task, int(a)] for a in self.actions}
        self._random = random

    def time_us(self, action: int) -> float:
        """One measured time."""
        self.count += 1
        samples = self._samples[action]
        return float(samples[int(self._random.random() * len(samples))])

    def median_us(self, action: int, probes: int) -> float:
        """The median of some."""
        return float(np.median([self.time_us(action) for _ in range(probes)]))


class _Searcher(ABC):
    """Searches every task of a grid on its own, with one stream of random numbers a task."""

    name: str
    #: (T,) of the grid that was last searched.
    probes: npt.NDArray[np.int64]

    def choose(self, grid: TaskGrid) -> Actions:
        """What the search of each task ends with."""
        chosen: Actions = np.empty(grid.tasks.height, dtype=np.int64)
        self.probes = np.zeros(grid.tasks.height, dtype=np.int64)
        for task in range(grid.tasks.height):
            prober = Prober(grid, task, np.random.default_rng((task, 0)))
            chosen[task] = self._search(prober, np.random.default_rng((task, 1)))
            self.probes[task] = prober.count
        return chosen

    @abstractmethod
    def _search(self, prober: Prober, random: np.random.Generator) -> int:
        """The action that the search of one task ends with."""


class _Bandit(_Searcher):
    """Keeps a mean for each config; a reward is minus the log of a time."""

    def _search(self, prober: Prober, random: np.random.Generator) -> int:
        actions = prober.actions
        sums = np.array([-np.log(prober.time_us(int(action))) for action in actions])
        counts = np.ones(len(actions))
        while prober.count < BANDIT_PROBES:
            arm = self._next(sums / counts, counts, random)
            sums[arm] -= np.log(prober.time_us(int(actions[arm])))
            counts[arm] += 1
        return int(actions[np.argmax(sums / counts)])

    @abstractmethod
    def _next(
        self,
        means: npt.NDArray[np.float64],
        counts: npt.NDArray[np.float64],
        random: np.random.Generator,
    ) -> int:
        """Which arm to try, given the means and counts so far."""


class Ucb1(_Bandit):
    """UCB1 (Auer, Cesa-Bianchi and Fischer 2002, figure 1), its bound scaled to times' spread."""

    name = "ucb1"
    #: Scales of the confidence bound, in log time.
    SETTINGS: Final = (0.02, 0.1, 0.5)

    def __init__(self, setting: float = SETTINGS[1]) -> None:
        """Set the scale."""
        self._scale = setting

    def _next(
        self,
        means: npt.NDArray[np.float64],
        counts: npt.NDArray[np.float64],
        random: np.random.Generator,  # noqa: ARG002 - it has none
    ) -> int:
        bound = self._scale * np.sqrt(2.0 * np.log(counts.sum()) / counts)
        return int(np.argmax(means + bound))


class EpsilonGreedy(_Bandit):
    """The best so far, and now and then any."""

    name = "epsilon-greedy"
    #: Shares of random calls.
    SETTINGS: Final = (0.05, 0.2, 0.5)

    def __init__(self, setting: float = SETTINGS[1]) -> None:
        """Set the share."""
        self._epsilon = setting

    def _next(
        self,
        means: npt.NDArray[np.float64],
        counts: npt.NDArray[np.float64],  # noqa: ARG002 - it does not look at them
        random: np.random.Generator,
    ) -> int:
        if random.random() < self._epsilon:
            return int(random.integers(len(means)))
        return int(np.argmax(means))


class CoordinateDescent(_Searcher):
    """AutoCCL's search (Xu et al., NSDI 2025, algorithms 1 and 2) on what was measured.

    Every pair of algorithm and protocol is a subspace. In each, channels and chunk size are moved
    one measured step at a time, one knob after the other, as long as that is faster: time is taken
    to have one valley. Threads and transport are set at launch, not by call. NCCL's own choice is
    probed first, and stays unless something is faster.
    """

    name = "coordinate-descent"
    #: Probes of which the median is compared.
    SETTINGS: Final = (1, 3, 9)

    def __init__(self, catalogue: Catalogue, setting: int = SETTINGS[1]) -> None:
        """Order the catalogue's configs by subspace and knobs."""
        self._repeats = setting
        self._configs = catalogue.configs

    def _search(
        self,
        prober: Prober,
        random: np.random.Generator,  # noqa: ARG002 - it has none
    ) -> int:
        found = {ABSTAIN_ACTION: prober.median_us(ABSTAIN_ACTION, self._repeats)}
        for places in self._subspaces(prober.actions):
            self._descend(places, prober, found)
        return min(found, key=lambda action: found[action])

    def _subspaces(self, actions: Iterable[np.int64]) -> Iterable[dict[Place, int]]:
        """Measured actions by (channels, chunk), a mapping for each (algorithm, protocol)."""
        spaces: dict[tuple[object, object], dict[Place, int]] = {}
        for action in map(int, actions):
            config = self._configs[action]
            if action != ABSTAIN_ACTION:
                space = spaces.setdefault((config.algorithm, config.protocol), {})
                space[config.num_channels, config.chunk_bytes] = action
        return spaces.values()

    def _descend(
        self,
        places: dict[Place, int],
        prober: Prober,
        found: dict[int, float],
    ) -> None:
        axes = [_ordered(place[axis] for place in places) for axis in (0, 1)]

        def time_us(place: Place) -> float:
            action = places.get(place)
            if action is None:
                return float("inf")
            if action not in found:
                found[action] = prober.median_us(action, self._repeats)
            return found[action]

        # From what NCCL itself would set: no knob turned, or the least of each.
        here = min(places, key=lambda p: tuple(axes[i].index(p[i]) for i in (0, 1)))
        time_us(here)  # there may be nowhere to go
        moved = True
        while moved:
            moved = False
            for axis in (0, 1):
                better = _step(here, axis, axes[axis], time_us)
                while better is not None:
                    here, moved = better, True
                    better = _step(here, axis, axes[axis], time_us)


def _ordered(values: Iterable[int | None]) -> list[int | None]:
    return sorted(set(values), key=lambda value: -1 if value is None else value)


def _step(
    here: Place,
    axis: int,
    values: Sequence[int | None],
    time_us: Callable[[Place], float],
) -> Place | None:
    """The faster neighbour along an axis, if one is faster than `here`."""
    index = values.index(here[axis])
    neighbours = [
        (values[i], here[1]) if axis == 0 else (here[0], values[i])
        for i in (index - 1, index + 1)
        if 0 <= i < len(values)
    ]
    best = min(neighbours, key=time_us, default=None)
    return best if best is not None and time_us(best) < time_us(here) else None
