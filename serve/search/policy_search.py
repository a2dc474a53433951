"""Our online search: starts from what is believed, probes little, stops by itself (docs/search.md).

The incumbent runs until its level and scatter are known. Then that candidate is probed for which
one more call is *worth* most for its expected cost (the knowledge gradient of Frazier, Powell and
Dayanik 2008), over as many calls as there were already: a task that is called more is searched
further, and little is repeated where noise would hide the answer. What probes have cost stays below
_BUDGET of all time in every prefix of the calls; a dear one waits.

What is **believed**: r(a) = log(time of a / time of NCCL's own choice), by `dynamiccl/belief.py` at
the task's size. What a policy of the *same system* predicts may be added, as one observation of all
r; a model of other systems misleads. What is observed is a *difference*, a probe against the
incumbent's latest calls, so that a level that drifts (congestion, clocks) cancels. A probe may be a
straggler: what is far from the belief moves it by a few of its spreads only.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.belief import OWN, prior_of
from dynamiccl.drawn_worlds import Floats, Grid, Ints
from dynamiccl.nccl import ABSTAIN
from dynamiccl.serve.search.autoccl import Key, SearchSpace, SpaceOf, Task, Tuner

#: Spread by transport and by threads (log time): drawn worlds have neither.
_LAUNCH_SIGMA: Final = 0.2
#: Error of a policy (log time); with a tenth, searches stop too early.
_POLICY_SIGMA: Final = 1.0
#: Q values are -time / reference; masked ones are far below (train/networks.py).
_LEAST_Q: Final = -1e3
#: One observation moves a belief by so many spreads at most.
_MOST_MOVES: Final = 3.0
#: Spread between NCCL's own choice and the config that it comes to, or nearly so.
_TWIN: Final = 0.02
_NEAR_TWIN: Final = 0.1
_FAINT: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Prior:
    """Belief about r before any probe: (A,) means and (A, A) covariances."""

    mean: Floats
    covariance: Floats

    @classmethod
    def drawn(cls, space: SearchSpace, size_bytes: float) -> "Prior":
        """From the drawn worlds alone, for a call of `size_bytes` as NCCL counts them."""
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
    def of_policy(cls, space: SearchSpace, size_bytes: float, log_ratio: Floats) -> "Prior":
        """With a policy's r (A,), whose errors covary as r does between drawn machines."""
        drawn = cls.drawn(space, size_bytes)
        # The product of two normals whose covariances are multiples of one.
        left = _POLICY_SIGMA**2 / (_POLICY_SIGMA**2 + _typical(drawn.covariance))
        predicted = log_ratio - log_ratio[space.default]
        return cls(left * drawn.mean + (1.0 - left) * predicted, left * drawn.covariance)


def predicted(q: npt.NDArray[np.floating]) -> Floats:
    """(A,) r by a policy's Q values; masked actions are never worth a probe."""
    time = -np.clip(q.astype(np.float64), _LEAST_Q, -1e-6)
    found: Floats = np.log(time / time[0])
    return found


def _typical(covariance: Floats) -> float:
    """Mean variance without NCCL's own choice."""
    return float(np.trace(covariance)) / max(len(covariance) - 1, 1)


class Belief:
    """The posterior of one task key."""

    def __init__(self, space: SearchSpace, prior: Prior) -> None:
        self._prior = prior
        #: Means of r (A,), and covariances (A, A).
        self.mean, self._covariance = prior.mean.copy(), prior.covariance.copy()
        twin = space.twin()
        if twin is not None:
            # NCCL's own choice is one of the configs, whose r is 0.
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
        """`action` took exp(difference) times as long as `incumbent`."""
        gain, spread = self.gain_over(incumbent, np.array([action]))[:, 0]
        # The gain is r(incumbent) - r(action): the difference's opposite.
        surprise = abs(difference + gain) / (_MOST_MOVES * spread)
        self._add(action, incumbent, difference, max(variance, spread**2 * (surprise - 1.0)))

    def _add(self, action: int, incumbent: int, difference: float, variance: float) -> None:
        between = self._covariance[action] - self._covariance[incumbent]
        total = max(between[action] - between[incumbent], _FAINT) + variance
        expected = self.mean[action] - self.mean[incumbent]
        self.mean = self.mean + between * ((difference - expected) / total)
        self._covariance = self._covariance - np.outer(between, between) / total

    def age(self, sigma: float) -> None:
        """Every r may have changed by about `sigma`: up to the prior's covariance."""
        share = min(sigma**2 / _typical(self._prior.covariance), 1.0)
        self._covariance += share * (self._prior.covariance - self._covariance)


WINDOW: Final = 32
#: Robust sigma of log time before calls show it, and the calls that it counts as.
_NOISE_SIGMA: Final = 0.03
_NOISE_WEIGHT: Final = 4
_LEAST_SIGMA: Final = 0.002
#: Standard deviation over median absolute value, for differences of normals.
_MAD: Final = 1.4826 / math.sqrt(2.0)


class Watch:
    """Level and scatter of the incumbent's latest calls, with which probes are compared.

    Scatter is the median difference of neighbours: wandering levels and stragglers do not count.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._steps: deque[float] = deque(maxlen=2 * WINDOW)

    def __len__(self) -> int:
        return len(self._times)

    def add(self, log_time: float) -> None:
        """Add a call of the incumbent."""
        if self._times:
            self._steps.append(abs(log_time - self._times[-1]))
        self._times.append(log_time)

    def level(self) -> float:
        """Median log time; raises statistics.StatisticsError when empty."""
        return median(self._times)

    def latest(self, count: int) -> float:
        """Mean log time of the latest calls."""
        return sum([*self._times][-count:]) / count

    def sigma(self) -> float:
        """Standard deviation of one call, log time."""
        if not self._steps:
            return _NOISE_SIGMA
        seen = max(_MAD * median(self._steps), _LEAST_SIGMA)
        count = len(self._steps)
        squared = (count * seen**2 + _NOISE_WEIGHT * _NOISE_SIGMA**2) / (count + _NOISE_WEIGHT)
        return math.sqrt(squared)

    def level_variance(self) -> float:
        """Variance of `level`: for normal noise pi / 2 times a mean's."""
        return 0.5 * math.pi * self.sigma() ** 2 / len(self._times)

    def restart(self) -> None:
        """Drop the calls of another incumbent or surroundings; keep the scatter."""
        self._times.clear()


#: A probe must save _PRICE of a call over all calls so far, and _LEAST_WORTH in each.
_PRICE, _LEAST_WORTH = 0.02, 0.0001
#: Certainty that a probed candidate is better before it takes over.
_CONFIDENCE: Final = 0.6
#: Share of time for probes, and the calls whose share is lent at the start.
_BUDGET, _LENT_CALLS = 0.007, 200
#: Nothing is probed that is expected to take so many times the incumbent's time.
_WORST_RATIO: Final = 3.0
#: By how much an alarm may have changed ratios (log time).
_CHANGE_SIGMA: Final = 0.2
#: Calls of a new incumbent at which it is compared with the level before.
_TRIALS: Final = (2, 4, 8, 16)
#: Below this cost, worth alone decides.
_CHEAP: Final = 0.001


class _Search(Task):
    def __init__(self, space: SearchSpace, prior: Prior, watch_calls: int, rest_calls: int) -> None:
        self.space, self.watch_calls, self.rest_calls = space, watch_calls, rest_calls
        self.calls = 0
        self.belief = Belief(space, prior)
        self.watch = Watch()
        self.incumbent = self.proposal = space.begin
        self.spent = 0.0
        twin = space.twin()
        #: The config that NCCL's own choice comes to, or nearly.
        self._twin = space.default if twin is None else twin[0]
        self._same = {self._twin} if twin is not None and twin[1] else set()
        self._probed = {space.begin, self._twin}
        #: Configs that lost, and the call from which on each may be probed again.
        self._cools: dict[int, int] = {}
        #: What a new incumbent is compared with: the one before, its level and that one's variance.
        self._trial: tuple[int, float, float] | None = None
        self._rest = 0
        self._plan_at = 0

    def tell(self, time_us: float, ran: int) -> None:
        self.calls += 1
        log_time = math.log(time_us)
        if ran != self.incumbent:
            self._learn(log_time, ran)
            return
        self.watch.add(log_time)
        self._rest -= 1
        if self._trial is not None:
            self._follow(*self._trial)
        if (
            not self.is_over
            and self.proposal == self.incumbent
            and self._rest <= 0
            and self.calls >= self._plan_at
            and len(self.watch) >= self.watch_calls
        ):
            self.plan()

    def alarm(self) -> None:
        self.belief.age(_CHANGE_SIGMA)
        self.watch.restart()
        self._cools.clear()
        self._trial, self._plan_at, self._rest = None, 0, 0
        self.proposal, self.is_over = self.incumbent, False

    def plan(self) -> None:
        if self._take_over():
            return
        candidates = self._candidates()
        mean, spread = self.belief.gain_over(self.incumbent, candidates)
        cost = _expected_excess(-mean, spread)
        worth = _worth(mean, spread, self.watch.sigma())
        # Seeing for the first time what is believed to be better is worth its whole gain.
        unseen = np.array([action not in self._probed for action in candidates.tolist()])
        worth += np.where(unseen, np.maximum(mean, 0.0), 0.0)
        worth[mean < -math.log(_WORST_RATIO)] = 0.0
        self.proposal = self.incumbent
        best = float(worth.max(initial=0.0))
        if best < _LEAST_WORTH:
            self.is_over = True
            return
        wanted = worth * self.calls >= _PRICE
        if not wanted.any():
            self._wait_until(math.ceil(_PRICE / best))
            return
        cools = np.array([self._cools.get(action, 0) for action in candidates.tolist()])
        due = wanted & (cools <= self.calls)
        if not due.any():
            self._wait_until(int(cools[wanted].min()))
            return
        allowed = _BUDGET * (self.calls + _LENT_CALLS)
        payable = due & (self.spent + cost <= allowed)
        if not payable.any():
            missing = self.spent + float(cost[due].min()) - allowed
            self._wait_until(self.calls + math.ceil(missing / _BUDGET))
            return
        score = np.where(payable, worth / (cost + _CHEAP), -1.0)
        self.proposal = int(candidates[int(np.argmax(score))])

    def _learn(self, log_time: float, ran: int) -> None:
        if not len(self.watch):
            return  # what ran before the first call of the incumbent cannot be compared
        difference = log_time - self.watch.level()
        self.spent += max(0.0, math.exp(min(difference, 50.0)) - 1.0)
        variance = self.watch.sigma() ** 2 + self.watch.level_variance()
        self.belief.observe(ran, self.incumbent, difference, variance)
        self._probed.add(ran)
        if difference > 0.0:
            self._cools[ran] = self.calls + self.watch_calls
        if ran != self.proposal:
            return  # not what was asked for, but not to be lost
        self._rest, self.proposal = self.rest_calls, self.incumbent
        self._take_over()

    def _take_over(self) -> bool:
        probed = np.array(sorted(self._probed - {self.incumbent} - self._same), dtype=np.int64)
        if not len(probed) or not len(self.watch):
            return False
        mean, spread = self.belief.gain_over(self.incumbent, probed)
        sure = _share_above(-mean / spread)
        mean = np.where(sure >= _CONFIDENCE, mean, -np.inf)
        index = int(np.argmax(mean))
        if mean[index] <= 0.0:
            return False
        self._trial = self.incumbent, self.watch.level(), self.watch.level_variance()
        self.incumbent = self.proposal = int(probed[index])
        self.watch.restart()
        self._cools.clear()
        self._plan_at, self._rest, self.is_over = 0, 0, False
        return True

    def _follow(self, before: int, level: float, variance: float) -> None:
        """Compare a new incumbent's calls with the level before; roll back if slower."""
        calls = len(self.watch)
        if calls not in _TRIALS:
            return
        fresh = max(calls // 2, _TRIALS[0])  # those since the last comparison
        variance += self.watch.sigma() ** 2 / fresh
        difference = self.watch.latest(fresh) - level
        self.belief.observe(self.incumbent, before, difference, variance)
        if calls == _TRIALS[-1]:
            self._trial = None
        self._take_over()

    def _candidates(self) -> npt.NDArray[np.int64]:
        mean = self.belief.mean
        peaks = [min(actions, key=mean.__getitem__) for actions in self.space.subspaces]
        found = {self.space.default, *peaks}
        for peak in (self.incumbent, self._twin, *peaks):
            if peak in self._probed:
                found |= set(self.space.neighbours(peak))
        # A config identical to NCCL's own choice is tried as that.
        return np.array(sorted(found - {self.incumbent} - self._same), dtype=np.int64)

    def _wait_until(self, calls: int) -> None:
        self._plan_at = max(calls, self.calls + 1)


class PolicySearch(Tuner):
    """Our search; `prior_of` gives what is believed of a key.

    `watch_calls`: before a comparison, or before what lost is probed again; `rest_calls`: between
    two probes.
    """

    def __init__(
        self,
        space_of: SpaceOf,
        prior_of: Callable[[Key], Prior],
        *,
        watch_calls: int = 8,
        rest_calls: int = 2,
    ) -> None:
        super().__init__(lambda key: _Search(space_of(key), prior_of(key), watch_calls, rest_calls))


def _worth(mean: Floats, spread: Floats, sigma: float) -> Floats:
    """Expected rise of the best known gain by a call (Frazier et al. 2008, equation 14)."""
    moves = spread**2 / np.sqrt(spread**2 + sigma**2)
    z = np.abs(mean) / moves
    density = np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)
    worth: Floats = moves * (density - z * _share_above(z))
    return worth


def _expected_excess(mean: Floats, spread: Floats) -> Floats:
    """E[max(exp(x) - 1, 0)] of normals x: a call's expected cost beyond the incumbent."""
    grown = np.exp(mean + 0.5 * spread**2) * _share_above(-(mean + spread**2) / spread)
    found: Floats = grown - _share_above(-mean / spread)
    return found


def _share_above(z: Floats) -> Floats:
    """P(x > z) of a standard normal x."""
    return 0.5 * np.array([math.erfc(each / math.sqrt(2.0)) for each in z.tolist()])
