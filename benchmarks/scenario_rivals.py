"""Rival players under changing interference: rules, a Bayes filter, a restarting search.

Each decides about a task key again when its last decision is in force, as a learned policy does.

N jobs, K task keys, A actions, L levels of the surroundings.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.evaluate.simulate import Actions
from dynamiccl.serve.search.autoccl import AutoCcl, Key
from dynamiccl.simulator.scenario import MarkovLink, Scenario
from dynamiccl.simulator.world import CallResults, World
from dynamiccl.train.environment import JobCalls

Float64Array = npt.NDArray[np.float64]
#: Calls whose slowdowns a rule takes the median of.
RECENT: Final = 7
#: A rule goes over to what is best when calls take so much longer.
EXPECTED: Final = 1.5
#: A filter takes noise for this much wider than the jitter's sigma: there is drift, too.
_WIDER: Final = 1.3


class Deciding(ABC):
    """Decides about each task key again when its last decision is in force."""

    def __init__(self, env: JobCalls) -> None:
        self._period = max(env.delay, 1)
        shape = (env.num_envs, len(env.world.keys))
        self._job = np.arange(env.num_envs)
        self._decided = np.full(shape, ABSTAIN_ACTION, dtype=np.int64)
        self._asked_at = np.full(shape, -self._period, dtype=np.int64)
        self._calls = 0

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:  # noqa: ARG002
        """Actions, updated for the keys that are due."""
        key = env.jobs.key
        due = self._calls - self._asked_at[self._job, key] >= self._period
        self._decided[self._job[due], key[due]] = self.choose(key, env)[due]
        self._asked_at[self._job[due], key[due]] = self._calls
        self._calls += 1
        return self._decided[self._job, key]

    @abstractmethod
    def choose(self, key: Actions, env: JobCalls) -> Actions:
        """(N,) actions for the keys of the next calls."""

    def learn(self, ran: CallResults, env: JobCalls) -> None:  # noqa: B027
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class RuleTables:
    """Tables of a rule."""

    quiet_us: Float64Array  # (K, A)
    quiet: Actions  # (K,) best in quiet
    disturbed: Actions  # (K,) best when calls take EXPECTED times as long


@dataclass(frozen=True, slots=True)
class RuleSettings:
    """Threshold of a rule, and its minimum dwell time in calls of the job."""

    threshold: float = 0.15
    hold_calls: int = 0


class Rule(Deciding):
    """A threshold: where the last seven calls were slow, the config for that, else the quiet one.

    A config that does not feel what slows the other says nothing about it, so that the rule stays
    for a while before it looks again.
    """

    def __init__(self, env: JobCalls, tables: RuleTables, settings: RuleSettings) -> None:
        super().__init__(env)
        self._tables, self._settings = tables, settings
        shape = self._decided.shape
        self._slowdowns = np.zeros((*shape, RECENT))
        self._slow_at = np.full(shape, -(10**9), dtype=np.int64)

    def choose(self, key: Actions, env: JobCalls) -> Actions:  # noqa: ARG002
        """Actions by the latest calls."""
        place = self._job, key
        is_slow = np.median(self._slowdowns[place], axis=1) > self._settings.threshold
        self._slow_at[self._job[is_slow], key[is_slow]] = self._calls
        stays = self._calls - self._slow_at[place] <= self._settings.hold_calls
        return np.where(is_slow | stays, self._tables.disturbed[key], self._tables.quiet[key])

    def learn(self, ran: CallResults, env: JobCalls) -> None:  # noqa: ARG002
        """Store the slowdowns."""
        slowdown = ran.measured_us / self._tables.quiet_us[ran.key, ran.action] - 1.0
        known = self._slowdowns[self._job, ran.key]
        self._slowdowns[self._job, ran.key] = np.column_stack([known[:, 1:], slowdown])


@dataclass(frozen=True, slots=True)
class Levels:
    """The states of a Markov link, as a filter models them."""

    #: (L, L) probability of each level after each, one call later.
    next_call: Float64Array
    #: (K, A, L) what calls take, inf where there is no config.
    times_us: Float64Array
    noise: float
    switch_us: float

    @classmethod
    def of(cls, world: World, scenario: Scenario) -> "Levels":
        """The scenario's first Markov link; the others are left out. Raises StopIteration."""
        link = next(each for each in scenario.link if isinstance(each, MarkovLink))
        leaves = -np.expm1(-world.nominal_us.mean() / np.array(link.dwell_us))
        next_call = leaves[:, None] * np.array(link.following) + np.diag(1.0 - leaves)
        times = [times_at(world, link.on, level) for level in link.slowdowns]
        noise = _WIDER * scenario.jitter.sigma
        stacked = np.stack(times, axis=2)
        return cls(
            next_call, np.where(np.isnan(stacked), np.inf, stacked), noise, scenario.switch_us
        )

    def sentinel(self, world: World) -> tuple[int, int] | None:
        """The task key and config to keep for sensing: sensitive to the levels, at least cost.

        None where no config feels them.
        """
        usual = np.linalg.matrix_power(self.next_call, 1_000_000)[0]
        calls = np.bincount(world.order, minlength=len(world.keys))
        best = self.times_us.min(axis=1, keepdims=True)
        exists = np.isfinite(self.times_us[:, :, 0])
        base = np.where(exists, self.times_us[:, :, 0], 1.0)
        rises = (self.times_us[:, :, 1:] / base[:, :, None]).min(axis=2)
        extra = np.where(exists[:, :, None], self.times_us - best, 0.0) @ usual * calls[:, None]
        extra = np.where(exists & (rises > 1.0 + RuleSettings().threshold), extra, np.inf)
        key, action = np.unravel_index(int(extra.argmin()), extra.shape)
        return (int(key), int(action)) if np.isfinite(extra[key, action]) else None


class Filter(Deciding):
    """A Bayes filter over the levels, with known dynamics and slowdowns.

    One task key stays on a config that feels the levels, whatever is best for it.
    """

    def __init__(self, env: JobCalls, levels: Levels) -> None:
        super().__init__(env)
        self._levels = levels
        self._sentinel = levels.sentinel(env.world)
        count = len(levels.next_call)
        self._belief = np.full((env.num_envs, count), 1.0 / count)
        self._later = np.linalg.matrix_power(levels.next_call, self._period)

    def choose(self, key: Actions, env: JobCalls) -> Actions:  # noqa: ARG002
        """The smallest expected time when the decision is in force."""
        belief = self._belief @ self._later
        chosen: Actions = (
            (self._levels.times_us[key] * belief[:, None, :]).sum(axis=2).argmin(axis=1)
        )
        if self._sentinel is None:
            return chosen
        return np.where(key == self._sentinel[0], self._sentinel[1], chosen)

    def learn(self, ran: CallResults, env: JobCalls) -> None:  # noqa: ARG002
        """Update the level probabilities."""
        levels = self._levels
        took_us = np.maximum(ran.measured_us - levels.switch_us * ran.changed, 1.0)
        z = np.log(took_us[:, None] / levels.times_us[ran.key, ran.action]) / levels.noise
        # Student's t with three degrees of freedom, but for constants: the jitter's own shape.
        told = np.log(self._belief @ levels.next_call) - 2.0 * np.log1p(z * z / 3.0)
        told -= told.max(axis=1, keepdims=True)
        belief = np.exp(told)
        self._belief = belief / belief.sum(axis=1, keepdims=True)


class Reopening(AutoCcl):
    """AutoCCL's search, restarted for a task key when a Trigger alarms."""

    def alarm(self, key: Key | None = None) -> None:
        """Restart the search of the key, or of all."""
        if key is None:
            self._tasks.clear()
        else:
            self._tasks.pop(key, None)


def times_at(world: World, on: str, slowdown: float) -> Float64Array:
    """(K, A) us, when a link is so many times slower; with the compute beside calls."""
    keys = np.arange(len(world.keys))
    ones = np.ones(len(keys))
    slow = {name: slowdown * ones if name == on else ones for name in ("intra", "inter", "host")}
    beside = np.zeros(len(keys), dtype=np.bool_)
    beside[world.order[world.beside_us > 0.0]] = True
    felt = np.where(beside, world.compute_slowdown, 1.0)
    found: Float64Array = world.times_us(keys, slow["intra"], slow["inter"], slow["host"])
    return found * felt[:, None]


def best_settings(play: Callable[[RuleSettings], float]) -> RuleSettings:
    """The settings with the smallest time of pilot jobs; `play` returns that time."""
    candidates = [
        RuleSettings(threshold, hold)
        for threshold in (0.15, 0.3, 0.5)
        for hold in (0, 500, 2_000, 8_000)
    ]
    return min(candidates, key=play)
