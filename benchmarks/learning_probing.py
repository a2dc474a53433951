"""Methods that probe a table and choose from it: a Gaussian process and its rivals.

* `GaussianProcess`: probes what promises most (expected improvement), or at random; acts where the
  gain is beyond two spreads and 0.5 %. Its prior is NCCL's costs, nothing, or the other systems.
* `Forest`: as ACCLAiM (Wilkins et al., IEEE Cluster 2022): probes where the jackknife over a random
  forest's trees spreads most, and takes the least predicted time.
* `Descent`: AutoCCL's search (serve/search/autoccl.py), one size after the other, the largest and
  the smallest first and then the one in the middle of the widest gap; takes what it measured best,
  NCCL's own choice included. A size that was not searched is NCCL's, or takes the config of the
  nearest one that was.

B sizes, A configs; config 0 is NCCL's own choice.
"""

import math
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from learning_new_system import SYSTEMS, Floats, Table, expected, kernel_without, rows_at
from scipy.special import ndtr
from sklearn.ensemble import RandomForestRegressor

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.nccl import Collective
from dynamiccl.serve.search.autoccl import AutoCcl
from dynamiccl.serve.search.space import Choice, SearchSpace
from dynamiccl.serve.search.tuner import Key, State
from dynamiccl.train.cautious.caution import MIN_GAIN
from dynamiccl.train.cautious.gaussian import Posterior
from dynamiccl.train.cautious.tasks import Rows

Actions = npt.NDArray[np.int64]
CAUTION: Final = 2.0
#: A forest's trees: scikit-learn's number.
TREES: Final = 100
#: The first one is ours.
WAYS: Final = (
    "expected improvement",
    "random",
    "flat prior",
    "policy prior",
    "forest",
    "coordinate descent",
    "coordinate descent, nearest size",
)


class Way(Protocol):
    """A probing method."""

    def chosen(self) -> Actions:
        """(B,) its current choices."""

    def pick(self) -> tuple[int, int]:
        """The size and config to probe next; NCCL's own choice is probed beside it."""

    def tell(self, places: npt.NDArray[np.int64], log_us: Floats) -> None:
        """Add measurements at (size, config) places (N, 2), ln us."""


def make_way(
    name: str, table: Table, kind: str, collective: Collective, random: np.random.Generator
) -> Way:
    """The method called `name`, on a table of a system with known NCCL costs only."""
    if name == "forest":
        return Forest(table, random)
    if name.startswith("coordinate descent"):
        return Descent(table, carries=name.endswith("nearest size"))
    prior = {"flat prior": "flat", "policy prior": "policy"}.get(name, "costs")
    return GaussianProcess(table, kind, collective, prior, random, is_random=name == "random")


class GaussianProcess:
    """The model of recipe `gaussian-process`, with a kernel from the other systems."""

    def __init__(
        self,
        table: Table,
        kind: str,
        collective: Collective,
        prior: str,
        random: np.random.Generator,
        *,
        is_random: bool,
    ) -> None:
        others = tuple(other for other in SYSTEMS if other != kind)
        self._table, self._random, self._is_random = table, random, is_random
        self._before = expected(kind, collective, prior, others)
        self._kernel = kernel_without(kind, prior)
        self._told: list[Rows] = []
        # Nothing is known of the system itself: NCCL's own choice stands.
        self._gain = np.zeros(self._before.shape)
        self._spread = np.full(self._before.shape, np.inf)

    def chosen(self) -> Actions:
        """The config with the most certain gain for each size, or NCCL's own choice."""
        best = np.where(self._table.is_open, self._gain, -np.inf).argmax(axis=1)
        place = np.arange(len(best)), best
        acts = self._gain[place] > np.maximum(CAUTION * self._spread[place], MIN_GAIN)
        return np.where(acts, best, ABSTAIN_ACTION)

    def pick(self) -> tuple[int, int]:
        """The place with the largest expected improvement; the first is random."""
        can = forced(self._table)
        if self._is_random or not self._told:
            places = np.argwhere(can)
            size, config = places[self._random.integers(len(places))]
            return int(size), int(config)
        chosen = self.chosen()
        more = self._gain - self._gain[np.arange(len(chosen)), chosen][:, None]
        sure = np.maximum(self._spread, 1e-6)
        t = more / sure
        improvement = more * ndtr(t) + sure * np.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi)
        return place_of(np.where(can, improvement, -np.inf).argmax(), can)

    def tell(self, places: npt.NDArray[np.int64], log_us: Floats) -> None:
        """Add measurements, and update predictions."""
        self._told.append(rows_at(self._table, places, log_us - self._before[tuple(places.T)]))
        rows = Rows(*(torch.cat([getattr(p, n) for p in self._told]) for n in Rows.__slots__))
        mean, spread = Posterior(self._kernel, rows)(self._table.numbers, self._table.cells)
        z = mean.numpy() + self._before
        self._gain, self._spread = z[:, :1] - z, spread.numpy()


class Forest:
    """A random forest of ln time by size, channels, algorithm and protocol."""

    def __init__(self, table: Table, random: np.random.Generator) -> None:
        self._can, self._random = forced(table), random
        self._is_open = table.is_open
        cells = table.cells.numpy()
        one_hot = cells[:, :, None] == np.unique(cells)
        self._features = np.concatenate([table.numbers.numpy(), one_hot], axis=2)
        self._x: list[Floats] = []
        self._y: list[float] = []
        self._mean, self._spread = np.zeros((2, *cells.shape))

    def chosen(self) -> Actions:
        """The smallest predicted time of each size."""
        found: Actions = np.where(self._is_open, self._mean, np.inf).argmin(axis=1)
        return found

    def pick(self) -> tuple[int, int]:
        """The place with the largest spread between trees."""
        spread = np.where(self._can, self._spread, -np.inf)
        # Trees are flat over regions: of many places with the same spread any will do.
        places = np.flatnonzero(spread == spread.max())
        return place_of(self._random.choice(places), self._can)

    def tell(self, places: npt.NDArray[np.int64], log_us: Floats) -> None:
        """Refit the forest."""
        self._x += list(self._features[tuple(places.T)])
        self._y += log_us.tolist()
        forest = RandomForestRegressor(TREES, random_state=len(self._y), n_jobs=1)
        forest.fit(np.array(self._x), np.array(self._y))
        flat = self._features.reshape(-1, self._features.shape[2]).astype(np.float32)
        trees = np.array([tree.predict(flat, check_input=False) for tree in forest.estimators_])
        # The jackknife: means without one tree each differ from the mean by 1 / (n - 1) of what
        # that tree does.
        without = (trees.sum(axis=0) - trees) / (TREES - 1)
        spread = np.sqrt((TREES - 1) / TREES * np.square(without - trees.mean(axis=0)).sum(axis=0))
        self._mean = trees.mean(axis=0).reshape(self._mean.shape)
        self._spread = spread.reshape(self._mean.shape)


class Descent:
    """Coordinate descent in every subspace of a size, then the next size."""

    def __init__(self, table: Table, *, carries: bool) -> None:
        self._order = coarse_to_fine(len(table.own))
        self._carries = carries
        self._times: dict[tuple[int, int], list[float]] = {}
        spaces: dict[Key, SearchSpace] = {
            size: SearchSpace(
                [Choice(config) for config in table.configs],
                np.flatnonzero(table.is_open[size]).tolist(),
                default_runs=Choice(table.own[size]),
            )
            for size in range(len(table.own))
        }
        self._search = AutoCcl(spaces.__getitem__)
        self._num_sizes = len(spaces)

    def chosen(self) -> Actions:
        """The best measured config of searched sizes."""
        found = np.full(self._num_sizes, ABSTAIN_ACTION)
        searched = sorted({size for size, _ in self._times})
        for size in range(self._num_sizes) if self._carries and searched else searched:
            near = min(searched, key=lambda other: abs(other - size))
            means = {a: np.mean(t) for (s, a), t in self._times.items() if s == near}
            found[size] = min(means, key=lambda action: float(means[action]))
        return found

    def pick(self) -> tuple[int, int]:
        """The next probe of the search of the first unfinished size."""
        while self._search.state(self._order[0]) is State.CONVERGED:
            del self._order[0]
        return self._order[0], self._search.ask(self._order[0])

    def tell(self, places: npt.NDArray[np.int64], log_us: Floats) -> None:
        """Add times, and continue the search."""
        for (size, action), value in zip(places.tolist(), log_us.tolist(), strict=True):
            self._times.setdefault((size, action), []).append(value)
        # It takes no notice of what it did not ask for, NCCL's own choice beside it.
        self._search.tell(int(places[0, 0]), math.exp(log_us[0]), int(places[0, 1]))


def coarse_to_fine(count: int) -> list[int]:
    """All of range(count): the last, the first, then the middle of the widest gap.

    >>> coarse_to_fine(5)
    [4, 0, 2, 1, 3]
    """
    order = [count - 1, 0][:count]
    while len(order) < count:
        taken = sorted(order)
        low, high = max(pairwise(taken), key=lambda pair: pair[1] - pair[0])
        order.append((low + high) // 2)
    return order


def forced(table: Table) -> npt.NDArray[np.bool_]:
    """(B, A) configs to probe: all but NCCL's own choice."""
    found: npt.NDArray[np.bool_] = table.is_open.copy()
    found[:, ABSTAIN_ACTION] = False
    return found


def place_of(index: np.integer, grid: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Row and column of a flat index."""
    size, config = divmod(int(index), grid.shape[1])
    return size, config
