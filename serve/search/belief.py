"""The posterior over a task's configs after some probes: a Gaussian process around the prior.

r(a) = log(time of a / time of NCCL's own choice); r(default) = 0. The prior's predictions are its
mean; its errors covary:

    cov(a, b) = level^2 + [same subspace] (shared^2 + own^2 (1 + s) exp(-s))

for a and b other than NCCL's own choice, which all r are relative to; s = sqrt(3) x steps between a
and b / REACH (Matern 3/2: a trend along a knob goes on a little beyond what was probed).

What is observed is a *difference*, a probe against the incumbent's latest calls, so that a level
that drifts (congestion, clocks) is in both and cancels. Times have long tails, and one probe may be
a straggler: an observation far from what was believed is taken as so noisy that it moves the belief
by a few of its spreads only. What is really so shows again.

The prior's predictions are a policy's ranking. How wrong they are on a system that was not in the
training has three parts: what all configs share (NCCL's own choice is slower here than elsewhere),
what those of a subspace share (an algorithm is), so that a probe of one of them tells about the
others, and what each has for itself. Who trains the policy measures them on systems left out of the
training; the constants are for who has not.

O observations, A actions.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.serve.search.space import SearchSpace

#: What is assumed where nobody measured how wrong a policy is on a new system (log time).
LEVEL_SIGMA: Final = 0.20
SHARED_SIGMA: Final = 0.20
OWN_SIGMA: Final = 0.10
#: Q values are -time / reference; what is masked is far below (train/heads.py).
_LEAST_Q: Final = -1e3
#: Steps along the knobs over which a config's own error is shared.
REACH: Final = 4.0
#: One observation moves a belief by so many of its spreads at most.
_MOST_MOVES: Final = 3.0
#: The oldest observations go when there are so many.
_MAX_OBSERVATIONS: Final = 48
#: How far the config that NCCL's own choice comes to may be from it, and the nearest to that one.
_TWIN: Final = 0.02
_NEAR_TWIN: Final = 0.1
_FAINT: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Prior:
    """The prior over a task's A actions.

    Raises ValueError for spreads that are not above zero.
    """

    #: (A,) expected log(time / NCCL's own choice); 0 = as good as the default.
    log_ratio: npt.NDArray[np.float64]
    #: Spread of the error that all of a task's configs share: that of the default's time.
    level_sigma: float = LEVEL_SIGMA
    #: Spread of the error that a subspace shares.
    shared_sigma: float = SHARED_SIGMA
    #: Spread of each config's own error; neighbours along a knob share most of it.
    own_sigma: float = OWN_SIGMA

    def __post_init__(self) -> None:
        if not min(self.level_sigma, self.shared_sigma, self.own_sigma) > 0.0:
            raise ValueError("a prediction without error cannot be learned about: give spreads > 0")

    @classmethod
    def from_q(cls, q: npt.NDArray[np.floating], default: int = 0) -> "Prior":
        """A prior from an exported policy's Q values (A,).

        Masked actions get a prediction that is never worth a probe.
        """
        time = -np.clip(q.astype(np.float64), _LEAST_Q, -1e-6)
        return cls(np.log(time / time[default]))


class Belief:
    """The posterior of one task key."""

    def __init__(self, space: SearchSpace, prior: Prior) -> None:
        """Start from a prior. Raises ValueError for one with another number of actions."""
        if len(prior.log_ratio) != len(space.choices):
            raise ValueError(
                f"a prediction of {len(prior.log_ratio)} actions for {len(space.choices)} choices"
            )
        self._prior_mean = np.where(space.subspace_of < 0, 0.0, prior.log_ratio)
        self._subspace, self._places = space.subspace_of, space.places.astype(np.float64)
        self._level = prior.level_sigma**2
        self._shared, self._own = prior.shared_sigma**2, prior.own_sigma**2
        #: Observations: (action, incumbent), difference, variance.
        self._pairs: list[tuple[int, int]] = []
        self._seen: list[float] = []
        self._variance: list[float] = []
        #: (O, A) covariance of observations and actions, a row for each observation.
        self._cross: list[npt.NDArray[np.float64]] = []
        self._solve()
        twin = space.twin()
        if twin is not None:
            # NCCL's own choice is one of the configs: r of that one is known to be 0.
            action, is_same = twin
            self._add((action, space.default), 0.0, (_TWIN if is_same else _NEAR_TWIN) ** 2)

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """(A,) expected r."""
        return self._mean

    def gain_over(self, action: int, others: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """(2, N): mean and spread of r(action) - r(other), what the others would save."""
        mean = self._mean[action] - self._mean[others]
        prior = (
            self._covariance(others, others)
            + self._covariance(np.array([action]), np.array([action]))
            - 2.0 * self._covariance(np.full(len(others), action), others)
        )
        if self._cross:
            cross = np.array(self._cross)
            between = cross[:, [action]] - cross[:, others]
            prior = prior - np.einsum("on,on->n", between, self._inverse @ between)
        found: npt.NDArray[np.float64] = np.stack([mean, np.sqrt(np.maximum(prior, _FAINT))])
        return found

    def observe(self, action: int, incumbent: int, difference: float, variance: float) -> None:
        """Add an observation: `action` took exp(difference) times as long as `incumbent`."""
        mean, spread = self.gain_over(incumbent, np.array([action]))[:, 0]
        # The gain is r(incumbent) - r(action), the difference its opposite.
        surprise = abs(difference + mean) / (_MOST_MOVES * spread)
        variance = max(variance, spread**2 * (surprise - 1.0))
        pair = action, incumbent
        if pair in self._pairs:
            index = self._pairs.index(pair)
            weights = 1.0 / self._variance[index], 1.0 / variance
            total = weights[0] + weights[1]
            self._seen[index] = (weights[0] * self._seen[index] + weights[1] * difference) / total
            self._variance[index] = 1.0 / total
            self._solve()
        else:
            self._add(pair, difference, variance)

    def _add(self, pair: tuple[int, int], difference: float, variance: float) -> None:
        if len(self._pairs) >= _MAX_OBSERVATIONS:
            for held in (self._pairs, self._seen, self._variance, self._cross):
                del held[0]
        everything = np.arange(len(self._prior_mean))
        self._pairs.append(pair)
        self._seen.append(difference)
        self._variance.append(variance)
        self._cross.append(
            self._covariance(np.full(len(everything), pair[0]), everything)
            - self._covariance(np.full(len(everything), pair[1]), everything)
        )
        self._solve()

    def age(self, sigma: float) -> None:
        """Add variance `sigma`^2 to what was observed: the surroundings changed."""
        self._variance = [variance + sigma**2 for variance in self._variance]
        self._solve()

    def _solve(self) -> None:
        self._mean = self._prior_mean
        if not self._pairs:
            return
        cross = np.array(self._cross)
        actions, incumbents = np.array(self._pairs).T
        among = cross[:, actions] - cross[:, incumbents] + np.diag(self._variance)
        self._inverse = np.linalg.inv(among)
        prior = self._prior_mean[actions] - self._prior_mean[incumbents]
        self._mean = self._prior_mean + cross.T @ (self._inverse @ (np.array(self._seen) - prior))

    def _covariance(
        self, a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """(N,) prior covariance of r(a) and r(b), pair by pair."""
        forced = (self._subspace[a] >= 0) & (self._subspace[b] >= 0)
        same = self._subspace[a] == self._subspace[b]
        steps = np.sqrt(np.square(self._places[a] - self._places[b]).sum(axis=1))
        reach = math.sqrt(3.0) * steps / REACH
        near = same * (self._shared + self._own * (1.0 + reach) * np.exp(-reach))
        found: npt.NDArray[np.float64] = forced * (self._level + near)
        return found
