"""Players of a simulated world: fixed choices, searches, learned policies, the oracle.

N jobs, A actions of the player's own world.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import Observations
from dynamiccl.serve.search.tuner import Tuner, is_disturbed
from dynamiccl.simulator.world import CallResults, World
from dynamiccl.train.environment import JobCalls
from dynamiccl.train.policy import TorchPolicy

Actions = npt.NDArray[np.int64]


class Player(Protocol):
    """Chooses the action of every job's next call."""

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:
        """(N,) actions."""

    def learn(self, ran: CallResults, env: JobCalls) -> None:
        """Receive the results of the calls."""


class _Silent:
    """A player that ignores results."""

    def learn(self, ran: CallResults, env: JobCalls) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Fixed(_Silent):
    """A fixed action (keys,) for each task key; 0 is NCCL's own choice."""

    actions: Actions

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:  # noqa: ARG002
        """The keys' actions."""
        return self.actions[env.jobs.key]


class Oracle(_Silent):
    """Knows the network state, and takes the truly fastest config."""

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:  # noqa: ARG002
        """The config with the smallest true time of the next call, without switching costs."""
        found: Actions = np.nanargmin(env.jobs.oracle_us(), axis=1).astype(np.int64)
        return found


class Learned(_Silent):
    """A trained policy on live observations, as the leader's brain asks it.

    A brain decides again only when the last decision is in force: so a task key is asked about
    when that many calls of its job have passed since it was asked about, and not at every call.
    A state that the policy has lives as long as the job.
    """

    def __init__(self, policy: TorchPolicy, env: JobCalls) -> None:
        """Start without decisions for the environment's jobs."""
        self._policy = policy
        self._period = max(env.course.delay_calls, 1)
        shape = (env.num_envs, len(env.world.keys))
        self._decided = np.full(shape, ABSTAIN_ACTION, dtype=np.int64)
        self._asked_at = np.full(shape, -self._period, dtype=np.int64)
        self._state = np.zeros((2, env.num_envs, policy.state_units), dtype=np.float32)
        self._job = np.arange(env.num_envs)
        self._calls = 0

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:
        """Query the TorchScript policy for the keys that are due."""
        key = env.jobs.key
        due = np.flatnonzero(self._calls - self._asked_at[self._job, key] >= self._period)
        if len(due):
            seen = Observations(observation["window"][due], observation["context"][due])
            chosen = self._ask(seen, observation["mask"][due], due, key[due])
            self._decided[due, key[due]] = chosen
            self._asked_at[due, key[due]] = self._calls
        self._calls += 1
        return self._decided[self._job, key]

    def _ask(
        self, seen: Observations, mask: npt.NDArray[np.bool_], job: Actions, key: Actions
    ) -> Actions:
        if not self._policy.state_units:
            return self._policy.act(seen, mask)
        # A key without calls has no information about the job's state.
        told = self._asked_at[job, key] >= 0
        before = np.where(told, self._decided[job, key], -1)
        h, c = self._state[:, job]
        chosen, after = self._policy.step(seen, mask, before, (h, c))
        self._state[:, job[told]] = np.stack(after)[:, told]
        return chosen


class Searching:
    """An online search for each job."""

    def __init__(self, make: Callable[[int], Tuner], num_jobs: int, *, alarmed: bool) -> None:
        """Make a tuner for each job; with `alarmed`, Trigger alarms are passed on."""
        self._tuners = [make(job) for job in range(num_jobs)]
        self._alarmed = alarmed
        #: (job, key) pairs with interference.
        self._disturbed: set[tuple[int, int]] = set()

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:  # noqa: ARG002
        """Each tuner's requested action."""
        keys = env.jobs.key.tolist()
        asked = [tuner.ask(key) for tuner, key in zip(self._tuners, keys, strict=True)]
        return np.array(asked, dtype=np.int64)

    def learn(self, ran: CallResults, env: JobCalls) -> None:
        """Pass times, and alarms, to each tuner."""
        told = (ran.key.tolist(), ran.measured_us.tolist(), ran.action.tolist())
        for tuner, key, time_us, action in zip(self._tuners, *told, strict=True):
            tuner.tell(key, time_us, action)
        if self._alarmed:
            for job, (key, level) in enumerate(zip(told[0], env.level.tolist(), strict=True)):
                before = (job, key) in self._disturbed
                if is_disturbed(level, before=before) != before:
                    self._disturbed ^= {(job, key)}
                    self._tuners[job].alarm(key)


def best_fixed(world: World, times_us: npt.NDArray[np.float64]) -> Actions:
    """The config with the smallest total time for all keys; NCCL's choice where it is missing.

    `times_us` (keys, A) is the mean true time of each config on each key, NaN where there is none.
    """
    calls = np.bincount(world.order, minlength=len(world.keys))[:, None]
    filled = np.where(np.isnan(times_us), times_us[:, :1], times_us)
    action = int((filled * calls).sum(axis=0).argmin())
    return np.where(world.mask[:, action], action, ABSTAIN_ACTION)


def best_table(times_us: npt.NDArray[np.float64]) -> Actions:
    """The best config of each key on average over states: a bound for tables."""
    found: Actions = np.nanargmin(times_us, axis=1).astype(np.int64)
    return found


def mean_times_us(world: World, seeds: Sequence[int], *, steps: int) -> npt.NDArray[np.float64]:
    """(keys, A) true times of every config, averaged over states that jobs of `seeds` meet."""
    total = np.zeros(world.mask.shape)
    count = np.zeros(len(world.keys))
    for seed in seeds:
        jobs = world.jobs(16, seed)
        none = np.zeros(len(jobs), dtype=np.int64)
        for _ in range(steps):
            key = jobs.key
            np.add.at(total, key, jobs.oracle_us())
            np.add.at(count, key, 1)
            jobs.step(none)
    # A key that came seldom has its quiet times.
    return np.where(count[:, None] > 0, total / np.maximum(count, 1)[:, None], world.quiet_us)
