"""What each node and each rank adds to the time of its communicators, and what exceeds noise.

    log(time / its like's) of a communicator = what its slowest part adds + noise

Nearly all parts add nought. A node is slow when three in four of its communicators are, so what it
adds is their lower quartile; two nodes are slow together when half of the communicators between
them are, and so is a rank: their lower median. The largest is taken first, nodes before pairs of
nodes before ranks, then what its partners have left, until nothing is beyond noise. What one
communicator has left then is its own (a cable, a switch port); so is that of a rank or a node with
one partner, which cannot be told from it.

The noise of a communicator is the largest of three: the distance from the median down to the 16th
percentile of what all have left (one sigma of a normal distribution; what is slow lies above), that
of a launch's rows over the root of their number, and `LEAST_SIGMA`. A finding is beyond it by so
many sigmas that one in a hundred checks of a cluster of this size has a false alarm, were noise
normal, and is slower than `least`, so that a tiny spread makes none.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.health.readings import Place, Reading, lower_median

#: Checks of a healthy cluster that find something, at most, were noise normal.
FALSE_ALARMS: Final = 0.01
#: Below this no launch repeats itself: nccl-tests prints and clocks have four digits or so.
LEAST_SIGMA: Final = 0.003
#: Standard error of a median over that of a mean, of a normal distribution: sqrt(pi / 2).
_MEDIAN: Final = 1.2533
_BELOW_MEDIAN: Final = 0.158655
_Float64Array = npt.NDArray[np.float64]
#: A node, two nodes, or a rank.
_Part = TypeVar("_Part", str, tuple[str, str], Place)


@dataclass(frozen=True, slots=True)
class Slow:
    """A slow node or pair of nodes (members with number -1), a rank, or one communicator."""

    members: tuple[Place, ...]
    #: log of how many times as long it makes a call.
    excess: float
    z: float
    comms: int
    rows: int


@dataclass(frozen=True, slots=True)
class Judged:
    """What is slow among communicators of one kind; `sigma` values are of log time."""

    nodes: tuple[Slow, ...]
    pairs: tuple[Slow, ...]
    ranks: tuple[Slow, ...]
    comms: tuple[Slow, ...]
    sigma: float


def judge(found: Sequence[Reading], *, least: float) -> Judged:
    """Find what is slow among communicators of one kind.

    Args:
        found: readings, of communicators inside nodes or between nodes, not both.
        least: the fraction of time above which slower counts, such as 0.05.
    """
    left = np.array([reading.excess for reading in found])
    nodes, pairs, ranks = _of_nodes(found), _of_pairs(found), _of_ranks(found)
    tests = max(len(found) + len(ranks) + len(pairs) + len(nodes), 2)
    rule = _Rule(
        found, sigma_of(found, left), NormalDist().inv_cdf(1.0 - FALSE_ALARMS / tests), least
    )
    slow_nodes = rule.pursue(left, nodes, lower_quartile)
    slow_pairs = rule.pursue(left, pairs, lower_median)
    slow_ranks = rule.pursue(left, ranks, lower_median)
    comms = [
        Slow(reading.members, float(excess), float(excess / rule.sigma), 1, reading.rows)
        for reading, excess in zip(found, left, strict=True)
        if rule.is_slow(float(excess), rule.sigma)
    ]
    return Judged(
        tuple(slow_nodes.values()),
        tuple(slow_pairs.values()),
        tuple(slow_ranks.values()),
        tuple(comms),
        rule.sigma,
    )


def lower_quartile(values: _Float64Array) -> float:
    """The value that three in four values reach or exceed.

    >>> lower_quartile(np.array([4.0, 1.0, 3.0, 2.0]))
    1.0
    """
    return float(np.sort(values)[(len(values) - 1) // 4])


def sigma_below(values: _Float64Array) -> float:
    """Sigma of the noise, from the lower half alone: outliers lie above."""
    return lower_median(values) - float(np.quantile(values, _BELOW_MEDIAN))


def sigma_of(found: Sequence[Reading], left: _Float64Array) -> float:
    """The noise of one communicator's log time, as the module says."""
    rows = [_MEDIAN * one.spread / (one.rows / one.launches) ** 0.5 for one in found]
    return max(sigma_below(left), float(np.median(rows)), LEAST_SIGMA)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The test by which a kind of part counts as slow."""

    found: Sequence[Reading]
    sigma: float
    limit: float
    least: float

    def is_slow(self, excess: float, sigma: float) -> bool:
        return excess > np.log1p(self.least) and excess / sigma >= self.limit

    def pursue(
        self,
        left: _Float64Array,
        parts: Mapping[_Part, list[int]],
        added_by: Callable[[_Float64Array], float],
    ) -> dict[_Part, Slow]:
        """The slow parts, slowest first; their share is subtracted from `left`."""
        slow: dict[_Part, Slow] = {}
        if not parts:
            return slow
        # What healthy ones differ by is no fault of any.
        spread = sigma_below(np.array([added_by(left[at]) for at in parts.values()]))
        while True:
            added = {p: added_by(left[at]) for p, at in parts.items() if p not in slow}
            part = max(added, key=lambda one: added[one], default=None)
            if part is None:
                return slow
            at, excess = parts[part], added[part]
            sigma = max(_MEDIAN * self.sigma / len(at) ** 0.5, spread)
            if not self.is_slow(excess, sigma):
                return slow
            rows = sum(self.found[index].rows for index in at)
            slow[part] = Slow(_members(part), excess, excess / sigma, len(at), rows)
            # A call takes as long as its slowest part: what this one explains is explained.
            left[at] = np.where(left[at] > 0, np.maximum(left[at] - excess, 0.0), left[at])


def _members(part: str | tuple[str, str] | Place) -> tuple[Place, ...]:
    """A node as a place without a rank number."""
    if isinstance(part, str):
        return ((part, -1),)
    first, second = part
    return ((first, -1), (second, -1)) if isinstance(second, str) else ((first, second),)


def _of_pairs(found: Sequence[Reading]) -> dict[tuple[str, str], list[int]]:
    """The communicators of each two nodes, where these have several."""
    parts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, reading in enumerate(found):
        hosts = [*dict.fromkeys(host for host, _ in reading.members)]
        if len(hosts) == 2:
            parts[hosts[0], hosts[1]].append(index)
    return {pair: at for pair, at in parts.items() if len(at) > 1}


def _of_ranks(found: Sequence[Reading]) -> dict[Place, list[int]]:
    """The communicators of each rank that has more than one."""
    parts: dict[Place, list[int]] = defaultdict(list)
    for index, reading in enumerate(found):
        for place in reading.members:
            parts[place].append(index)
    return {place: at for place, at in parts.items() if len(at) > 1}


def _of_nodes(found: Sequence[Reading]) -> dict[str, list[int]]:
    """The communicators of each node of several GPUs; between nodes, where it has two partners."""
    parts: dict[str, list[int]] = defaultdict(list)
    partners: dict[str, set[str]] = defaultdict(set)
    ranks: dict[str, set[int]] = defaultdict(set)
    for index, reading in enumerate(found):
        hosts = {host for host, _ in reading.members}
        for host in hosts:
            parts[host].append(index)
            partners[host] |= hosts
        for host, number in reading.members:
            ranks[host].add(number)
    return {
        host: at
        for host, at in parts.items()
        if len(ranks[host]) > 1 and len(partners[host]) != 2 and len(at) > 1
    }
