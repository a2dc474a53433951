"""The posterior over a task's choices after some probes: what the drawn worlds say, and a policy.

r(a) = log(time of a / time of NCCL's own choice); r of that one is 0. Mean and covariance of r come
from the belief that all parts of this package share (`dynamiccl/belief.py`), at the task's size.
A policy's predictions are one observation of all r, whose errors covary as r does in drawn worlds
and are as large as policies are wrong on systems that were not in their training.

What is observed is a *difference*, a probe against the incumbent's latest calls, so that a level
that drifts (congestion, clocks) is in both and cancels. Times have long tails, and one probe may be
a straggler: an observation far from what was believed is taken as so noisy that it moves the belief
by a few of its spreads only. What is really so shows again.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.belief import OWN, prior_of
from dynamiccl.drawn_worlds import Floats, Grid, Ints
from dynamiccl.nccl import ABSTAIN
from dynamiccl.serve.search.space import SearchSpace

#: How wrong a policy is on a new system (log time): what bench_search.py's trees said of five
#: systems that they had not seen was 0.9 to 1.0 off (1.48 times the median absolute error).
POLICY_SIGMA: Final = 1.0
#: Spread of what one transport, or number of threads, adds to all times (log time): drawn worlds
#: have neither.
_LAUNCH_SIGMA: Final = 0.2
#: Q values are -time / reference; what is masked is far below (train/heads.py).
_LEAST_Q: Final = -1e3
#: One observation moves a belief by so many of its spreads at most.
_MOST_MOVES: Final = 3.0
#: How far the config that NCCL's own choice comes to may be from it, and the nearest to that one.
_TWIN: Final = 0.02
_NEAR_TWIN: Final = 0.1
_FAINT: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed of r before any probe: (A,) means and (A, A) covariances."""

    mean: Floats
    covariance: Floats

    @classmethod
    def drawn(cls, space: SearchSpace, size_bytes: float) -> "Prior":
        """By the drawn worlds alone, for a call of `size_bytes` as NCCL counts them."""
        configs = tuple(dict.fromkeys([ABSTAIN, *(choice.config for choice in space.choices)]))
        ran = None if space.default_runs is None else space.default_runs.config
        cell = None
        if ran is not None and ran.algorithm is not None and ran.protocol is not None:
            cell = ran.algorithm, ran.protocol
        drawn = prior_of(Grid((math.log2(size_bytes),), configs, (cell,)))
        at = [configs.index(choice.config) for choice in space.choices]
        moves = drawn.factors[at] - drawn.factors[0]
        own = drawn.own + OWN**2
        covariance = moves @ moves.T + np.diag(own[at]) + own[0]
        threads = [choice.num_threads for choice in space.choices]
        transports = [choice.transport for choice in space.choices]
        for values in map(np.array, (threads, transports)):
            is_set = values != np.array(None)
            covariance += _LAUNCH_SIGMA**2 * (is_set & (values[:, None] == values))
        covariance[space.default] = covariance[:, space.default] = 0.0
        return cls(drawn.mean[at] - drawn.mean[0], covariance)

    @classmethod
    def of_policy(
        cls,
        space: SearchSpace,
        size_bytes: float,
        log_ratio: Floats,
        sigma: float = POLICY_SIGMA,
    ) -> "Prior":
        """With a policy's predictions of r (A,), which are typically `sigma` off.

        Raises ValueError for a sigma that is not above zero, and for another number of choices.
        """
        if not sigma > 0.0:
            raise ValueError("a prediction without error cannot be learned about: give sigma > 0")
        if len(log_ratio) != len(space.choices):
            raise ValueError(
                f"a prediction of {len(log_ratio)} actions for {len(space.choices)} choices"
            )
        drawn = cls.drawn(space, size_bytes)
        # Two normals, one covariance and `sigma`^2 / typical times it, as one.
        left = sigma**2 / (sigma**2 + _typical(drawn.covariance))
        predicted = log_ratio - log_ratio[space.default]
        return cls(left * drawn.mean + (1.0 - left) * predicted, left * drawn.covariance)


def predicted(q: npt.NDArray[np.floating], default: int = 0) -> Floats:
    """(A,) r by an exported policy's Q values; masked actions are never worth a probe."""
    time = -np.clip(q.astype(np.float64), _LEAST_Q, -1e-6)
    found: Floats = np.log(time / time[default])
    return found


def _typical(covariance: Floats) -> float:
    """The mean variance of all but NCCL's own choice."""
    return float(np.trace(covariance)) / max(len(covariance) - 1, 1)


class Belief:
    """The posterior of one task key."""

    def __init__(self, space: SearchSpace, prior: Prior) -> None:
        """Start from a prior."""
        self._prior = prior
        #: (A,) expected r, and its covariance (A, A).
        self.mean, self._covariance = prior.mean.copy(), prior.covariance.copy()
        twin = space.twin()
        if twin is not None:
            # NCCL's own choice is one of the configs: r of that one is known to be 0.
            action, is_same = twin
            self._add(action, space.default, 0.0, (_TWIN if is_same else _NEAR_TWIN) ** 2)

    def gain_over(self, action: int, others: Ints) -> Floats:
        """(2, N): mean and spread of r(action) - r(other), what the others would save."""
        variances = np.diag(self._covariance)
        variance = variances[action] + variances[others] - 2.0 * self._covariance[action, others]
        spread = np.sqrt(np.maximum(variance, _FAINT))
        found: Floats = np.stack([self.mean[action] - self.mean[others], spread])
        return found

    def observe(self, action: int, incumbent: int, difference: float, variance: float) -> None:
        """Add an observation: `action` took exp(difference) times as long as `incumbent`."""
        gain, spread = self.gain_over(incumbent, np.array([action]))[:, 0]
        # The gain is r(incumbent) - r(action), the difference its opposite.
        surprise = abs(difference + gain) / (_MOST_MOVES * spread)
        self._add(action, incumbent, difference, max(variance, spread**2 * (surprise - 1.0)))

    def _add(self, action: int, incumbent: int, difference: float, variance: float) -> None:
        between = self._covariance[action] - self._covariance[incumbent]
        total = max(between[action] - between[incumbent], _FAINT) + variance
        expected = self.mean[action] - self.mean[incumbent]
        self.mean = self.mean + between * ((difference - expected) / total)
        self._covariance = self._covariance - np.outer(between, between) / total

    def age(self, sigma: float) -> None:
        """The surroundings changed: every r may have by about `sigma`, at most to the prior."""
        share = min(sigma**2 / _typical(self._prior.covariance), 1.0)
        self._covariance += share * (self._prior.covariance - self._covariance)
