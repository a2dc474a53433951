"""Our online search: starts from a policy's prediction, probes little, and stops by itself.

For each task key, in this order:

* **Watch.** The incumbent, at first NCCL's own choice (or a table's, `SearchSpace.begin`), runs
  until its level and scatter are known.
* **Probe.** Candidates are the peak that is believed in of each subspace, and what lies one step
  around those peaks that were probed; nothing else. Of them the one is probed for which one more
  call is *worth* most: by how much it is expected to raise the best that is known (the knowledge
  gradient of Frazier, Powell and Dayanik 2008), against what the call itself is expected to cost. A
  noisy system makes a call worth less, so that little is repeated where the noise would hide the
  answer anyway. The stop is sequential: a probe must be worth its price over as many calls as there
  were already, so a task that is called more is searched further.
* **Take over.** A candidate that was probed and is better with `confidence` is the incumbent. Its
  calls are no probes and still tell: compared with the level before, they confirm it or throw it
  out.
* **Spread.** What probes have cost beyond the incumbent is kept below `budget` of all time since
  the beginning, in every prefix of the calls; a dear probe waits until it is affordable.
* **Converge.** Where nothing is worth a call, NCCL's own choice or the incumbent stays for good,
  until an alarm: then what was measured gets as uncertain as a change of surroundings makes it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.serve.search.belief import Belief, Prior
from dynamiccl.serve.search.space import SearchSpace
from dynamiccl.serve.search.tuner import Key, SpaceOf, State, check_time
from dynamiccl.serve.search.watch import Watch


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a search; shares of a call's time, or log time."""

    #: Calls of the incumbent before anything is compared with it, and between two probes.
    watch_calls: int = 8
    rest_calls: int = 2
    #: A probe is made when it is expected to save so much of a call's time over as many calls as
    #: there were already; and never for less than `least_worth` of each.
    price: float = 0.02
    least_worth: float = 0.0001
    #: Certainty with which a probed candidate must be better to take over.
    confidence: float = 0.6
    #: What probes may cost, as a share of time, and calls' worth of it that are lent at the start.
    budget: float = 0.007
    lent_calls: int = 200
    #: Nothing is probed that is expected to take so many times as long as the incumbent.
    worst_ratio: float = 3.0
    #: How much an alarm means that every ratio may have changed (log time).
    change_sigma: float = 0.2


#: After so many calls with a new incumbent its level is compared with that of the one before.
_TRIALS: Final = (2, 4, 8, 16)
_SQRT2: Final = math.sqrt(2.0)
#: Probes that cost less than this are chosen by their worth alone.
_CHEAP: Final = 0.001


@dataclass(slots=True)
class _Trial:
    """The first calls of a new incumbent, against the level of the old one."""

    before: int
    level: float
    variance: float
    total: float = 0.0
    #: Calls since the last comparison, and all of them.
    fresh: int = 0
    calls: int = 0


class _Task:
    """The search of one task key."""

    def __init__(self, space: SearchSpace, prior: Prior, rules: Rules) -> None:
        self.space, self.rules = space, rules
        #: Calls that were told.
        self.calls = 0
        self.belief = Belief(space, prior)
        self.watch = Watch()
        self.incumbent = self.proposal = space.begin
        self.state = State.IDLE
        self.spent = 0.0
        twin = space.twin()
        #: The config that NCCL's own choice comes to, or nearly.
        self._twin = space.default if twin is None else twin[0]
        self._same = {self._twin} if twin is not None and twin[1] else set()
        self._probed = {space.begin, self._twin}
        self._trial: _Trial | None = None
        self._rest = 0
        #: No plan before this call.
        self._plan_at = 0

    def tell(self, time_us: float, ran: int) -> None:
        """Record a call of action `ran`."""
        check_time(time_us)
        self.calls += 1
        log_time = math.log(time_us)
        if ran != self.incumbent:
            self._learn(log_time, ran)
            return
        self.watch.add(log_time)
        self._rest -= 1
        if self._trial is not None:
            self._follow(self._trial, log_time)
        if (
            self.state is not State.CONVERGED
            and self.proposal == self.incumbent
            and self._rest <= 0
            and self.calls >= self._plan_at
            and len(self.watch) >= self.rules.watch_calls
        ):
            self.plan()

    def alarm(self) -> None:
        """Interference changed: raise the uncertainty; keep the incumbent for now."""
        self.belief.age(self.rules.change_sigma)
        self.watch.restart()
        self._trial, self._plan_at, self._rest = None, 0, 0
        self.proposal, self.state = self.incumbent, State.IDLE

    def plan(self) -> None:
        """Choose the next step: take over, probe, wait or stop."""
        if self._take_over():
            return
        candidates = self._candidates()
        mean, spread = self.belief.gain_over(self.incumbent, candidates)
        cost = _expected_excess(-mean, spread)
        worth = _worth(mean, spread, self.watch.sigma())
        # Nobody has seen yet that what the policy likes better is: that is worth its whole gain.
        unseen = np.array([action not in self._probed for action in candidates.tolist()])
        worth += np.where(unseen, np.maximum(mean, 0.0), 0.0)
        worth[mean < -math.log(self.rules.worst_ratio)] = 0.0
        self.proposal = self.incumbent
        best = float(worth.max(initial=0.0))
        if best < self.rules.least_worth:
            self.state = State.CONVERGED
            return
        wanted = worth * self.calls >= self.rules.price
        if not wanted.any():
            self._wait_until(math.ceil(self.rules.price / best))
            return
        payable = wanted & (self.spent + cost <= self._allowed(self.calls))
        if not payable.any():
            missing = self.spent + float(cost[wanted].min()) - self._allowed(self.calls)
            self._wait_until(self.calls + math.ceil(missing / self.rules.budget))
            return
        score = np.where(payable, worth / (cost + _CHEAP), -1.0)
        self.proposal = int(candidates[int(np.argmax(score))])

    def _learn(self, log_time: float, ran: int) -> None:
        """Compare a probe with the incumbent, and plan again."""
        if not len(self.watch):
            return  # what ran before the first call of the incumbent cannot be compared
        difference = log_time - self.watch.level()
        self.spent += max(0.0, math.exp(min(difference, 50.0)) - 1.0)
        variance = self.watch.sigma() ** 2 + self.watch.level_variance()
        self.belief.observe(ran, self.incumbent, difference, variance)
        self._probed.add(ran)
        if ran != self.proposal:
            return  # not what was asked for, but not to be lost
        self.state = State.ADVANCE
        self._rest, self.proposal = self.rules.rest_calls, self.incumbent
        self._take_over()

    def _take_over(self) -> bool:
        """Make a better action the incumbent where confidence suffices; whether one was."""
        probed = np.array(sorted(self._probed - {self.incumbent} - self._same), dtype=np.int64)
        if not len(probed) or not len(self.watch):
            return False
        mean, spread = self.belief.gain_over(self.incumbent, probed)
        sure = _share_above(-mean / spread)
        mean = np.where(sure >= self.rules.confidence, mean, -np.inf)
        index = int(np.argmax(mean))
        if mean[index] <= 0.0:
            return False
        self._trial = _Trial(self.incumbent, self.watch.level(), self.watch.level_variance())
        self.incumbent = self.proposal = int(probed[index])
        self.watch.restart()
        self.state, self._plan_at, self._rest = State.IMPROVING, 0, 0
        return True

    def _follow(self, trial: _Trial, log_time: float) -> None:
        """Compare the calls of a new incumbent with the old level; roll back if slower."""
        trial.total += log_time
        trial.fresh += 1
        trial.calls += 1
        if trial.calls not in _TRIALS:
            return
        difference = trial.total / trial.fresh - trial.level
        variance = self.watch.sigma() ** 2 / trial.fresh + trial.variance
        self.belief.observe(self.incumbent, trial.before, difference, variance)
        trial.total, trial.fresh = 0.0, 0
        if trial.calls == _TRIALS[-1]:
            self._trial = None
        self._take_over()

    def _candidates(self) -> npt.NDArray[np.int64]:
        """The predicted peak of each subspace, and neighbours of those that were probed."""
        mean = self.belief.mean
        peaks = [min(actions, key=mean.__getitem__) for actions in self.space.subspaces]
        found = {self.space.default, *peaks}
        for peak in (self.incumbent, self._twin, *peaks):
            if peak in self._probed:
                found |= set(self.space.neighbours(peak))
        # What NCCL's own choice comes to is tried as NCCL's own choice.
        return np.array(sorted(found - {self.incumbent} - self._same), dtype=np.int64)

    def _allowed(self, calls: int) -> float:
        return self.rules.budget * (calls + self.rules.lent_calls)

    def _wait_until(self, calls: int) -> None:
        """Probe nothing before this number of calls."""
        self._plan_at = max(calls, self.calls + 1)
        self.state = State.IDLE


class PolicySearch:
    """Our search over all task keys of one job."""

    def __init__(
        self, space_of: SpaceOf, prior_of: Callable[[Key], Prior], rules: Rules = Rules()
    ) -> None:
        """`prior_of` gives a policy's prediction for each key."""
        self._space_of, self._prior_of, self._rules = space_of, prior_of, rules
        self._tasks: dict[Key, _Task] = {}

    def ask(self, key: Key) -> int:
        """The action to probe; the incumbent when there is none."""
        task = self._task(key)
        if task.proposal != task.incumbent:
            task.state = State.PROBING
        return task.proposal

    def tell(self, key: Key, time_us: float, action: int | None = None) -> None:
        """Record a call."""
        task = self._task(key)
        task.tell(time_us, task.proposal if action is None else action)

    def best(self, key: Key) -> int:
        """The incumbent."""
        return self._task(key).incumbent

    def state(self, key: Key) -> State:
        """The state of the search of `key`."""
        return self._task(key).state

    def alarm(self, key: Key | None = None) -> None:
        """Search again from the incumbent, with earlier results as a hint."""
        for each in [key] if key is not None else list(self._tasks):
            self._task(each).alarm()

    def _task(self, key: Key) -> _Task:
        task = self._tasks.get(key)
        if task is None:
            task = _Task(self._space_of(key), self._prior_of(key), self._rules)
            self._tasks[key] = task
        return task


def _worth(
    mean: npt.NDArray[np.float64], spread: npt.NDArray[np.float64], sigma: float
) -> npt.NDArray[np.float64]:
    """Expected increase of the best known gain by one more call of each candidate.

    The mean gain over the incumbent would move by a normal of this spread; what it is above zero
    afterwards, beyond what it is above zero now (Frazier et al. 2008, equation 14).
    """
    moves = spread**2 / np.sqrt(spread**2 + sigma**2)
    worth: npt.NDArray[np.float64] = moves * _loss(np.abs(mean) / moves)
    return worth


def _expected_excess(
    mean: npt.NDArray[np.float64], spread: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """E[max(exp(x) - 1, 0)] of normals x: expected cost of a call beyond the incumbent."""
    above = _share_above(-mean / spread)
    grown = np.exp(mean + 0.5 * spread**2) * _share_above(-(mean + spread**2) / spread)
    found: npt.NDArray[np.float64] = grown - above
    return found


def _loss(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """E[max(x - z, 0)] of a standard normal x."""
    density = np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)
    found: npt.NDArray[np.float64] = density - z * _share_above(z)
    return found


def _share_above(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """P(x > z) of a standard normal x."""
    return 0.5 * np.array([math.erfc(each / _SQRT2) for each in z.tolist()])
