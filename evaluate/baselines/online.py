"""Online searches as baselines: without model or data, they probe configs of the test task.

A probe is one measured time of a cell, drawn from its independent repeats. Reports give the regret
of the config that a searcher ends with, and beside it the probes of a task that it took to get
there: calls that ran some other config in the meantime. It probes the very runs that it is scored
on, so that even its cross-fitted regret flatters it, as the oracle's does.
"""

from abc import ABC, abstractmethod
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.policies import Actions
from dynamiccl.serve.search import epsilon_greedy
from dynamiccl.serve.search.autoccl import AutoCcl
from dynamiccl.serve.search.space import Choice, SearchSpace
from dynamiccl.serve.search.tuner import State, Tuner

#: Calls of a task that a bandit may spend.
BANDIT_PROBES: Final = 400
#: A tuner has one task to search.
_KEY: Final = 0


class Prober:
    """Measures configs of one task; each draw counts as a probe."""

    def __init__(self, grid: TaskGrid, task: int, random: np.random.Generator) -> None:
        """Measure the task of row `task`."""
        self.actions = np.flatnonzero(grid.mask[task])
        self.count = 0
        self._samples = {int(a): grid.samples[task, int(a)] for a in self.actions}
        self._random = random

    def time_us(self, action: int) -> float:
        """One measured time in us."""
        self.count += 1
        samples = self._samples[action]
        return float(samples[int(self._random.random() * len(samples))])


class _Searcher(ABC):
    """Searches every task of a grid separately, with a random stream for each."""

    name: str
    #: (T,) of the grid that was last searched.
    probes: npt.NDArray[np.int64]

    def choose(self, grid: TaskGrid) -> Actions:
        """The final action of each task's search."""
        chosen: Actions = np.empty(grid.tasks.height, dtype=np.int64)
        self.probes = np.zeros(grid.tasks.height, dtype=np.int64)
        for task in range(grid.tasks.height):
            prober = Prober(grid, task, np.random.default_rng((task, 0)))
            chosen[task] = self._search(prober, np.random.default_rng((task, 1)))
            self.probes[task] = prober.count
        return chosen

    @abstractmethod
    def _search(self, prober: Prober, random: np.random.Generator) -> int:
        """The final action of one task's search."""


class Ucb1(_Searcher):
    """UCB1 (Auer, Cesa-Bianchi and Fischer 2002, figure 1), its bound scaled to times' spread.

    It keeps a mean for each config; a reward is minus the log of a time.
    """

    name = "ucb1"
    #: Scales of the confidence bound, in log time.
    SETTINGS: Final = (0.02, 0.1, 0.5)

    def __init__(self, setting: float = SETTINGS[1]) -> None:
        """`setting`: the scale of the bound."""
        self._scale = setting

    def _search(
        self,
        prober: Prober,
        random: np.random.Generator,  # noqa: ARG002 - it has none
    ) -> int:
        actions = prober.actions
        sums = np.array([-np.log(prober.time_us(int(action))) for action in actions])
        counts = np.ones(len(actions))
        while prober.count < BANDIT_PROBES:
            bound = self._scale * np.sqrt(2.0 * np.log(counts.sum()) / counts)
            arm = int(np.argmax(sums / counts + bound))
            sums[arm] -= np.log(prober.time_us(int(actions[arm])))
            counts[arm] += 1
        return int(actions[np.argmax(sums / counts)])


class EpsilonGreedy(_Searcher):
    """The fastest so far, and sometimes a random one; every config once before."""

    name = "epsilon-greedy"
    #: Shares of random calls.
    SETTINGS: Final = (0.05, 0.2, 0.5)

    def __init__(self, catalogue: Catalogue, setting: float = SETTINGS[1]) -> None:
        """`setting`: the share of random probes."""
        self._choices = [Choice(config) for config in catalogue.configs]
        self._epsilon = setting

    def _search(self, prober: Prober, random: np.random.Generator) -> int:
        space = SearchSpace(self._choices, prober.actions.tolist())
        tuner = epsilon_greedy.EpsilonGreedy(
            lambda _: space, epsilon=self._epsilon, seed=random, tries_all=True
        )
        return _drive(tuner, prober, BANDIT_PROBES)


class CoordinateDescent(_Searcher):
    """AutoCCL's search (serve/search/autoccl.py) on what was measured.

    Threads and transport are set at launch, not by call. NCCL's own choice is probed first, and
    stays unless something is faster.
    """

    name = "coordinate-descent"
    #: Probes of which the median is compared.
    SETTINGS: Final = (1, 3, 9)

    def __init__(self, catalogue: Catalogue, setting: int = SETTINGS[1]) -> None:
        """Take the catalogue's configs."""
        self._choices = [Choice(config) for config in catalogue.configs]
        self._repeats = setting

    def _search(
        self,
        prober: Prober,
        random: np.random.Generator,  # noqa: ARG002 - it has none
    ) -> int:
        space = SearchSpace(self._choices, prober.actions.tolist())
        return _drive(AutoCcl(lambda _: space, repeats=self._repeats), prober, None)


def _drive(tuner: Tuner, prober: Prober, most: int | None) -> int:
    """Run a tuner until it has converged, or for `most` probes; returns its final action."""
    while tuner.state(_KEY) is not State.CONVERGED and (most is None or prober.count < most):
        action = tuner.ask(_KEY)
        tuner.tell(_KEY, prober.time_us(action), action)
    return tuner.best(_KEY)
