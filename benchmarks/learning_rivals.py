"""Ways to probe a table, and to choose from what was probed: a belief's, and its rivals'.

To probe: where a measurement is worth most to the belief; where an adaptive sweep would draw; at
random; a rule that an expert tries by hand; AutoCCL's coordinate descent; Optuna's TPE. To
choose: the belief; times interpolated between sizes, which act by the same rule; the fastest that
was measured at the nearest size, which knows no caution.

A place is size x A + config of a table of S sizes and A configs, NCCL's own choice the first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import optuna
from judge_worlds import Floats, Ints, Table
from numpy.polynomial.hermite_e import hermegauss

from dynamiccl.belief import (
    AROUND,
    LEAST_CAUTION,
    MIN_GAIN,
    Belief,
    Bools,
    neighbours,
    prior_of,
    sides,
)
from dynamiccl.collect.strategies import Believed
from dynamiccl.drawn_worlds import Grid
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.serve.search.autoccl import AutoCcl, Choice, Key, SearchSpace

#: Standard deviation of a measurement, ln of time.
NOISE: Final = 0.02
#: Of the places whose worth is looked at: the most promising, and random ones.
_PROMISING: Final = 25
_RANDOM: Final = 25
#: Gauss-Hermite steps of a standard normal, with weights; and what an expected gain is worth
#: beside a sure one.
_STEPS: Final = hermegauss(7)
_OF_EXPECTED: Final = 0.2
#: Left-out measurements of a config that tell its spread.
_ENOUGH: Final = 4


def grid_of(table: Table) -> Grid:
    """What a belief is told of a table: sizes, configs, NCCL's own cells and its costs."""
    own = tuple((Algorithm(a), Protocol(p)) for a, p in table.cells[:, 0])
    grid = Grid(tuple(np.log2(table.sizes_bytes).tolist()), table.configs, own)
    columns = []
    for cell in grid.cells:
        is_it = (table.cells == cell).all(axis=-1)
        found = np.where(is_it, table.log_cost_us, -np.inf).max(axis=1)
        columns.append(np.where(np.isfinite(found), found, np.nan))
    return replace(grid, log_costs=tuple(map(tuple, np.stack(columns, axis=1).tolist())))


class Probes:
    """What was measured of a table so far."""

    def __init__(self, table: Table, random: np.random.Generator) -> None:
        """Nothing yet; `random` draws the noise, and whatever a way to probe draws."""
        self.table, self.random = table, random
        self.prior = prior_of(grid_of(table))
        #: (S, A) configs that there are, without NCCL's own choice.
        self.can: Bools = np.isfinite(table.log_time_us)
        self.can[:, 0] = False
        self._times: dict[int, list[float]] = {}
        self._belief: Belief | None = None

    @property
    def count(self) -> int:
        """Measurements, those of NCCL's own choice among them."""
        return sum(map(len, self._times.values()))

    def probe(self, place: int) -> float:
        """Measure a place, and NCCL's own choice beside it as often; returns ln of their ratio."""
        default = place // self.can.shape[1] * self.can.shape[1]
        asked = [place]
        # A gain is no surer than the time that it is compared with.
        if len(self._times.get(default, [])) <= len(self._times.get(place, [])):
            asked.append(default)
        for each in asked:
            noise = NOISE * self.random.standard_normal()
            self._times.setdefault(each, []).append(self.table.log_time_us.flat[each] + noise)
        self._belief = None
        return self._times[place][-1] - float(np.mean(self._times[default]))

    def rows(self) -> tuple[Ints, Floats, Floats]:
        """Places, mean ln us and variances, (n,) each."""
        places = sorted(self._times)
        counts = np.array([len(self._times[place]) for place in places])
        means = np.array([np.mean(self._times[place]) for place in places])
        return np.array(places, dtype=np.int64), means, NOISE**2 / counts

    def belief(self) -> Belief:
        """The belief after these."""
        if self._belief is None:
            self._belief = Belief(self.prior, *self.rows(), allowed=self.can)
        return self._belief


# --- to probe ---


def worth(belief: Belief, probes: Probes, places: Ints, noise: float) -> Floats:
    """(C,) what a measurement of a place, NCCL's choice beside it, brings: gain over all sizes.

    The knowledge gradient (Frazier, Powell and Dayanik 2009) of two sums over the sizes: of the
    gains that are sure after it, and, for a share, of those that are expected, since it may take
    several measurements to be sure. `noise` is the variance of a log time.
    """
    log2_sizes, shape = np.array(probes.prior.grid.log2_sizes), (len(places), *probes.can.shape)
    size, action = np.divmod(places, shape[2])
    variance = np.square(belief.spread / belief.stretch).ravel()
    moves = _covariance(belief, places) / np.sqrt(variance[places] + 2.0 * noise)[:, None]
    left = np.sqrt(np.maximum(variance - np.square(moves), 0.0))
    moves, left = moves.reshape(shape), belief.stretch * left.reshape(shape)
    below, above = sides((log2_sizes[size] - log2_sizes[:, None]).T[..., None])
    is_config = (action[:, None] == np.arange(shape[2]))[:, None]
    near = (belief.default_sides[0] | below) & (belief.default_sides[1] | above)
    near = near[..., None] & (belief.config_near | (is_config & (below | above)[..., None]))
    bar = np.maximum(LEAST_CAUTION * left, MIN_GAIN)
    row, column = np.divmod(probes.rows()[0], shape[2])
    told = row[column == 0]
    around = np.stack([neighbours(np.append(told, each), shape[1]) for each in size], axis=1)
    number, found = np.arange(len(places))[:, None], np.zeros(len(places))
    for step, weight in zip(*_STEPS, strict=True):
        gain = np.where(probes.can, belief.gain + step * moves, 0.0)
        gains = gain > AROUND * left
        may = near & gains[number, around[0]] & gains[number, around[1]]
        sure = np.where(may & (gain > bar), gain, 0.0).max(axis=2).sum(axis=1)
        expected = np.maximum(gain, 0.0).max(axis=2).sum(axis=1)
        found += weight / math.sqrt(2.0 * math.pi) * (sure + _OF_EXPECTED * expected)
    return found


def _covariance(belief: Belief, places: Ints) -> Floats:
    """(C, N) covariances of some places' gains with all, before the stretch."""
    found = belief._moves[:, places].T @ belief._moves
    default, columns = belief._default, np.arange(len(belief._default))
    found += belief._left[default[places], None] * (default[places, None] == default)
    found += belief._left[places, None] * (places[:, None] == columns)
    return np.asarray(found)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to probe: the place to measure next, and what is told ln of time over NCCL's own."""

    pick: Callable[[], int]
    tell: Callable[[float], None] = lambda _: None


def by_worth(probes: Probes) -> Way:
    """Where a measurement brings most, as the belief expects."""

    def pick() -> int:
        belief = probes.belief()
        hoped = np.where(probes.can, belief.gain + belief.spread, -np.inf)
        of_each = hoped.argmax(axis=0) * hoped.shape[1] + np.arange(hoped.shape[1])
        more = hoped - np.maximum(belief.gain.max(axis=1), 0.0)[:, None]
        promising = np.argsort(more.ravel())[::-1][:_PROMISING]
        there = np.flatnonzero(probes.can)
        others = probes.random.choice(there, min(_RANDOM, len(there)), replace=False)
        places = np.unique(np.concatenate([of_each, promising, others]))
        places = places[probes.can.flat[places]]
        return int(places[worth(belief, probes, places, NOISE**2).argmax()])

    return Way(pick)


def by_draws(probes: Probes) -> Way:
    """By what `strategy = "adaptive"` draws by: how much the decision loses to each config."""

    def pick() -> int:
        belief = probes.belief()
        lost = Believed(belief, {}, probes.can, belief.decide()).lost(probes.random)
        is_best = lost.argmax(axis=2)[..., None] == np.arange(lost.shape[2])
        share = (is_best * lost).sum(axis=0).ravel()
        if not share.any():
            return int(probes.random.choice(np.flatnonzero(probes.can)))
        return int(probes.random.choice(len(share), p=share / share.sum()))

    return Way(pick)


def at_random(probes: Probes) -> Way:
    """Any place."""
    there = np.flatnonzero(probes.can)
    return Way(lambda: int(probes.random.choice(there)))


def by_rule(probes: Probes) -> Way:
    """What an expert tries: at some sizes each algorithm and protocol with the most channels."""
    most: dict[tuple[Algorithm | None, Protocol | None], int] = {}
    for action, config in enumerate(probes.table.configs[1:], start=1):
        cell = config.algorithm, config.protocol
        known = probes.table.configs[most.get(cell, action)].num_channels or 0
        if (config.num_channels or 0) >= known:
            most[cell] = action
    num_sizes, num_configs = probes.can.shape
    places = [
        size * num_configs + action
        for size in coarse_to_fine(num_sizes)
        for action in most.values()
    ]
    left = [place for place in places if probes.can.flat[place]]
    every = list(left)

    def pick() -> int:
        if not left:
            left.extend(every)
        return int(left.pop(0))

    return Way(pick)


def by_descent(probes: Probes) -> Way:
    """AutoCCL's search of one size after the other (serve/search/autoccl.py)."""
    table, (num_sizes, num_configs) = probes.table, probes.can.shape
    choices = [Choice(config) for config in table.configs]
    spaces: dict[Key, SearchSpace] = {}
    for size, (algorithm, protocol) in enumerate(table.cells[:, 0].tolist()):
        own = Choice(Config(Algorithm(algorithm), Protocol(protocol)))
        there = np.flatnonzero(probes.can[size]).tolist()
        spaces[size] = SearchSpace(choices, there, default_runs=own)
    search, order = AutoCcl(spaces.__getitem__), coarse_to_fine(num_sizes)

    def pick() -> int:
        # NCCL's own choice is measured beside each; it only begins the search.
        while order:
            asked = search.ask(order[0])
            if search.is_over(order[0]):
                del order[0]
            elif asked == 0:
                search.tell(order[0], 1.0)
            else:
                return int(order[0] * num_configs + asked)
        return int(probes.random.choice(np.flatnonzero(probes.can)))

    def tell(log_ratio: float) -> None:
        if order:
            search.tell(order[0], math.exp(log_ratio))

    return Way(pick, tell)


def by_tpe(probes: Probes) -> Way:
    """Optuna's tree-structured Parzen estimator, over sizes, cells and channels."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=int(probes.random.integers(2**31)))
    study = optuna.create_study(sampler=sampler)
    num_sizes, num_configs = probes.can.shape
    configs = probes.table.configs[1:]
    options = list(dict.fromkeys(config.num_channels for config in configs))
    asked: list[optuna.Trial] = []
    space = {
        "size": optuna.distributions.IntDistribution(0, num_sizes - 1),
        "cell": optuna.distributions.CategoricalDistribution(range(len(configs) // len(options))),
        "option": optuna.distributions.IntDistribution(0, len(options) - 1),
    }

    def pick() -> int:
        asked.append(study.ask(space))
        told = asked[-1].params
        return int(told["size"] * num_configs + 1 + told["cell"] * len(options) + told["option"])

    def tell(log_ratio: float) -> None:
        study.tell(asked[-1], log_ratio)

    return Way(pick, tell)


WAYS: Final[dict[str, Callable[[Probes], Way]]] = {
    "worth": by_worth,
    "draws": by_draws,
    "random": at_random,
    "rule": by_rule,
    "coordinate descent": by_descent,
    "TPE": by_tpe,
}


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


# --- to choose ---


def interpolated(
    is_near: Bools, caution: float, log_us: Floats, log2_sizes: Sequence[float]
) -> Ints:
    """(S,) each config's gain over NCCL's own choice, interpolated between sizes.

    It acts by the belief's rule: gain over `caution` spreads, at places near what was measured. The
    spread is the rms by which left-out octaves of a config are off, or those of all configs; of
    what was measured itself it is the noise. `log_us` (S, A) is NaN where nothing was measured.
    """
    sizes, gain = np.array(log2_sizes), log_us[:, :1] - log_us
    octave = np.floor(sizes + 1e-6)
    off = np.full(gain.shape, np.nan)
    for each in np.unique(octave):
        off[octave == each] = (gain - _between(sizes, gain, octave != each))[octave == each]
    counts, squares = np.isfinite(off[:, 1:]).sum(axis=0), np.nansum(np.square(off[:, 1:]), axis=0)
    pooled = squares.sum() / counts.sum() if counts.any() else math.inf
    # A config that was left out a few times speaks for itself.
    own = np.where(counts >= _ENOUGH, squares / np.maximum(counts, 1), pooled)
    spread = np.sqrt(np.concatenate([[math.inf], own]))
    found = np.where(np.isfinite(gain), gain, _between(sizes, gain, np.ones(len(sizes), bool)))
    spreads = np.where(np.isfinite(gain), math.sqrt(2.0) * NOISE, spread)
    bar = np.maximum(caution * spreads, MIN_GAIN)
    sure = np.where(is_near & (np.nan_to_num(found, nan=-np.inf) > bar), found, 0.0)
    sure[:, 0] = 0.0
    return np.asarray(sure.argmax(axis=1))


def _between(sizes: Floats, values: Floats, kept: Bools) -> Floats:
    """(S, A) values interpolated from those of kept sizes, column by column; NaN beyond them."""
    found = np.full(values.shape, np.nan)
    for column, told in enumerate(values.T):
        known = kept & np.isfinite(told)
        if known.any():
            found[:, column] = np.interp(
                sizes, sizes[known], told[known], left=np.nan, right=np.nan
            )
    return found


def nearest(log_us: Floats, log2_sizes: Sequence[float]) -> Ints:
    """(S,) the fastest measured config of the nearest size of which one was measured."""
    sizes = np.array(log2_sizes)
    has = np.flatnonzero(np.isfinite(log_us).any(axis=1))
    if not len(has):
        return np.zeros(len(sizes), dtype=np.int64)
    near = has[np.abs(sizes[:, None] - sizes[has]).argmin(axis=1)]
    found: npt.NDArray[np.int64] = np.where(np.isfinite(log_us), log_us, np.inf)[near].argmin(
        axis=1
    )
    return found


def spread_out(places: Ints, values: Floats, shape: tuple[int, ...]) -> Floats:
    """Values (n,) at their places of a table (S, A); NaN elsewhere."""
    found = np.full(shape, np.nan)
    found.flat[places] = values
    return found
