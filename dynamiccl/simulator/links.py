"""Time-varying slowdowns of links and hosts: Markov congestion, bursts, traces.

Every process is kept for N jobs at once and advanced by the time that each of them spent, so dwell
times are times and not numbers of calls: a job that calls seldom finds the network changed. A
slowdown is a factor of the time that bytes take to move, 1 = the link is free.

Forms and not measurements: which strengths a scenario has, it says itself, with their origin.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
#: A link that others fill to this share leaves a twentieth; more would be an outage.
MAX_SHARE: Final = 0.95


class Process(Protocol):
    """A slowdown factor that changes with time, for N jobs."""

    def reset(self, num_jobs: int, random: np.random.Generator) -> None:
        """Start anew; each job at a random point of the process."""

    def advance(self, elapsed_us: Float64Array, random: np.random.Generator) -> Float64Array:
        """(N,) slowdowns after `elapsed_us` (N,) more; the array may be overwritten later."""


class Markov:
    """Congestion as a Markov-modulated process: levels that last a while and follow one another.

    A level is left with the probability 1 - exp(-elapsed / dwell). Of `links` independent links
    the slowest counts, as for a ring that runs over all of them.
    """

    def __init__(
        self,
        slowdowns: Sequence[float],
        dwell_us: Sequence[float],
        following: Sequence[Sequence[float]],
        links: int = 1,
    ) -> None:
        """Take S states.

        Args:
            slowdowns: (S,) factor in each.
            dwell_us: (S,) mean time in each.
            following: (S, S) which state comes next; the diagonal is 0.
            links: how many there are.

        Raises ValueError for what is no such process.
        """
        matrix = np.array(following, dtype=np.float64)
        count = len(slowdowns)
        if matrix.shape != (count, count) or len(dwell_us) != count:
            raise ValueError(f"{count} slowdowns need {count} dwell times and {count} x {count}")
        if not np.allclose(matrix.sum(axis=1), 1.0) or np.diag(matrix).any():
            raise ValueError("each row of `following` must sum to 1 and leave its own state")
        if min(dwell_us) <= 0 or min(slowdowns) < 1.0 or links < 1:
            raise ValueError("dwell times and links must be positive, and slowdowns 1 or more")
        self._slowdowns = np.array(slowdowns, dtype=np.float64)
        self._rate = 1.0 / np.array(dwell_us, dtype=np.float64)
        self._following = matrix
        self._cumulative = matrix.cumsum(axis=1)
        self._cumulative[:, -1] = 1.0
        self._state = np.zeros((0, links), dtype=np.int64)

    def usual(self) -> Float64Array:
        """(S,) stationary probability of each state."""
        count = len(self._rate)
        flows = self._rate[:, None] * (self._following - np.eye(count))
        system = np.vstack([flows.T / self._rate.max(), np.ones(count)])
        target = np.append(np.zeros(count), 1.0)
        found = np.maximum(np.linalg.lstsq(system, target, rcond=None)[0], 0.0)
        shares: Float64Array = found / found.sum()
        return shares

    def reset(self, num_jobs: int, random: np.random.Generator) -> None:
        """Draw states from the stationary distribution."""
        shape = (num_jobs, self._state.shape[1])
        self._state = random.choice(len(self._rate), size=shape, p=self.usual())

    def advance(self, elapsed_us: Float64Array, random: np.random.Generator) -> Float64Array:
        """Change states at random."""
        stays = np.exp(-elapsed_us[:, None] * self._rate[self._state])
        job, link = np.nonzero(random.random(self._state.shape) > stays)
        if len(job):
            drawn = random.random((len(job), 1))
            cumulative = self._cumulative[self._state[job, link]]
            self._state[job, link] = (cumulative <= drawn).sum(axis=1)
        found: Float64Array = self._slowdowns[self._state].max(axis=1)
        return found


class Bursts:
    """Cross traffic: somebody else's transfers, exponential pauses and heavy-tailed lengths.

    While one runs it takes a share of the link that is drawn for it, so that ours lasts
    1 / (1 - share) times as long. Lengths are Pareto's with exponent `tail`.
    """

    def __init__(
        self, pause_us: float, shortest_us: float, tail: float, share: tuple[float, float]
    ) -> None:
        """Take the mean pause, the shortest length, and the least and largest share."""
        if not 0.0 <= share[0] <= share[1] <= MAX_SHARE:
            raise ValueError(f"shares must lie in 0..{MAX_SHARE} and be in order: {share}")
        if min(pause_us, shortest_us) <= 0 or tail <= 1.0:
            raise ValueError("pause and shortest must be positive, and the tail above 1")
        self._pause_us = pause_us
        self._shortest_us = shortest_us
        self._tail = tail
        self._share = share
        self._left_us = np.zeros(0)
        self._slowdown = np.zeros(0)

    def reset(self, num_jobs: int, random: np.random.Generator) -> None:
        """Start within a pause."""
        self._left_us = random.exponential(self._pause_us, num_jobs)
        self._slowdown = np.ones(num_jobs)

    def advance(self, elapsed_us: Float64Array, random: np.random.Generator) -> Float64Array:
        """Alternate pauses and bursts."""
        self._left_us -= elapsed_us
        while (over := np.flatnonzero(self._left_us <= 0.0)).size:
            begins = self._slowdown[over] <= 1.0
            lengths = self._shortest_us * (1.0 + random.pareto(self._tail, len(over)))
            pauses = random.exponential(self._pause_us, len(over))
            shares = random.uniform(*self._share, len(over))
            self._left_us[over] += np.where(begins, lengths, pauses)
            self._slowdown[over] = np.where(begins, 1.0 / (1.0 - shares), 1.0)
        return self._slowdown


class Trace:
    """A recorded sequence of available bandwidth, repeated.

    Each job begins at a place of its own, as Pensieve does with its network traces (Mao et al.,
    SIGCOMM 2017, section 5.1).
    """

    def __init__(self, shares: Sequence[float], interval_us: float) -> None:
        """Take the shares (M,) of the bandwidth that are ours, and how long each lasts."""
        values = np.array(shares, dtype=np.float64)
        if len(values) == 0 or values.min() < 1.0 - MAX_SHARE or values.max() > 1.0:
            raise ValueError(f"a trace's shares must lie in {1.0 - MAX_SHARE:.2f}..1")
        if interval_us <= 0:
            raise ValueError("a trace's interval must be positive")
        self._slowdowns = 1.0 / values
        self._interval_us = interval_us
        self._clock_us = np.zeros(0)

    def reset(self, num_jobs: int, random: np.random.Generator) -> None:
        """Start at a random place."""
        self._clock_us = random.random(num_jobs) * self._interval_us * len(self._slowdowns)

    def advance(self, elapsed_us: Float64Array, random: np.random.Generator) -> Float64Array:  # noqa: ARG002
        """The slowdowns recorded at the new times."""
        self._clock_us += elapsed_us
        place = (self._clock_us / self._interval_us).astype(np.int64) % len(self._slowdowns)
        found: Float64Array = self._slowdowns[place]
        return found
