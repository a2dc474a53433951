"""Who plays simulated jobs: fixed choices, searches, learned policies, the oracle.

Every policy plays in a world with its own catalogue of configs; all worlds of one seed have the
same interference. N jobs, A actions of the player's own world.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.drawn_worlds import Floats
from dynamiccl.nccl import ABSTAIN, Config
from dynamiccl.serve.search.autoccl import AutoCcl, Choice, Key, SearchSpace, Tuner, is_disturbed
from dynamiccl.serve.search.policy_search import PolicySearch, Prior, predicted
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.scenario import Scenario
from dynamiccl.simulator.systems import System
from dynamiccl.simulator.workloads import Workload
from dynamiccl.simulator.world import CallResults, World
from dynamiccl.train.environment import Course, JobCalls, Tables, Watch, delay_calls
from dynamiccl.train.policy import TorchPolicy

NCCL: Final = "nccl-default"
ORACLE: Final = "oracle"
#: The oracle with the delay of agreement: an upper bound for all deciding players.
DELAYED: Final = "oracle, delayed"
SEARCH: Final = "AutoCCL search"
#: Jobs used to find the best fixed choices, with seeds not used in the comparison.
_PILOT_SEEDS: Final = (1_000_001, 1_000_002)
_PILOT_STEPS: Final = 4_000

Actions = npt.NDArray[np.int64]
MakeWatch = Callable[[], Watch]


class Player(Protocol):
    """Chooses the action of every job's next call."""

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:
        """(N,) actions."""

    def learn(self, ran: CallResults, env: JobCalls) -> None:  # noqa: ARG002
        """Receive the results of the calls; most players do nothing with them."""
        return


@dataclass(frozen=True, slots=True)
class Fixed(Player):
    """A fixed action (keys,) for each task key; 0 is NCCL's own choice."""

    actions: Actions

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:  # noqa: ARG002
        """The keys' actions."""
        return self.actions[env.jobs.key]


class Oracle(Player):
    """Knows the network state, and takes the truly fastest config."""

    def act(self, observation: Mapping[str, Any], env: JobCalls) -> Actions:  # noqa: ARG002
        """The config with the smallest true time of the next call, without switching costs."""
        found: Actions = np.nanargmin(env.jobs.oracle_us(), axis=1).astype(np.int64)
        return found


class Learned(Player):
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


class Searching(Player):
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


@dataclass(frozen=True, slots=True)
class Setting:
    """The simulated system, workload and scenario."""

    system: System
    workload: Workload
    scenario: Scenario
    calls: int
    jobs: int

    def world(self, configs: Sequence[Config]) -> World:
        """The world with a catalogue's configs."""
        return World(self.system, self.workload, configs, self.scenario)


@dataclass(frozen=True, slots=True)
class Contender:
    """One row: a player, made anew for each seed, and its environment."""

    name: str
    world: World
    tables: Tables
    make: Callable[[JobCalls, int], Player]
    make_watch: MakeWatch | None = None
    #: Whether the player needs observations, which cost time.
    observes: bool = False
    #: Whether decisions take effect at once: a table from the start, and the oracle's.
    at_once: bool = False
    #: Whether it plays, or starts a search from, a trained policy.
    trained: bool = False

    def prepare(self, setting: Setting, seed: int) -> tuple[JobCalls, Player]:
        """The environment and the player for one seed."""
        course = Course(
            episode_calls=setting.calls,
            delay_calls=0 if self.at_once else delay_calls(self.world),
            observed=self.observes,
        )
        env = JobCalls(self.world, self.tables, setting.jobs, course, self.make_watch)
        return env, self.make(env, seed)


def simple_contenders(setting: Setting) -> list[Contender]:
    """NCCL, fixed choices, AutoCCL's search, and the oracle, with and without the delay."""
    world = setting.world(all_configs(setting.system, setting.workload))
    tables = Tables.of(world, [DEFAULT_PROFILE])
    mean_us = _mean_times_us(world)
    fixed = {
        NCCL: np.zeros(len(world.keys), dtype=np.int64),
        "best fixed config": best_fixed(world, mean_us),
        "best quiet table": np.nanargmin(world.quiet_us, axis=1),
        # A bound for tables: the best config of each key on average over states.
        "best table of all states": np.nanargmin(mean_us, axis=1),
    }

    def always(chosen: Actions, _env: JobCalls, _seed: int) -> Player:
        return Fixed(chosen)

    rows = [
        Contender(name, world, tables, partial(always, chosen), at_once=True)
        for name, chosen in fixed.items()
    ]
    rows.append(Contender(SEARCH, world, tables, _autoccl))
    return rows + [
        Contender(name, world, tables, lambda _env, _seed: Oracle(), at_once=name == ORACLE)
        for name in (DELAYED, ORACLE)
    ]


def policy_contenders(
    setting: Setting, name: str, policy: TorchPolicy, make_watch: MakeWatch | None
) -> list[Contender]:
    """A policy alone; with a Trigger; and as the start of a search with a Trigger."""
    known = policy.manifest
    world = setting.world(known.actions().configs)
    tables = Tables.of(world, known.launch_profiles, known.noise_table(), known.cost_table())
    made = partial(Contender, world=world, tables=tables, make_watch=make_watch, trained=True)

    def learned(env: JobCalls, _seed: int) -> Player:
        return Learned(policy, env)

    if make_watch is None:
        return [made(name, make=learned, observes=True)]
    spaces = search_spaces(world)
    said = cold_predictions(policy, tables)
    priors: dict[Key, Prior] = {
        key: Prior.of_policy(spaces[key], call.size_bytes, said[key])
        for key, call in enumerate(world.keys)
    }

    def search(env: JobCalls, _seed: int) -> Player:
        def tuner(_job: int) -> PolicySearch:
            return PolicySearch(lambda key: spaces[key], lambda key: priors[key])

        return Searching(tuner, env.num_envs, alarmed=True)

    return [
        made(f"{name} + Trigger", make=learned, observes=True),
        made(f"search from {name} + Trigger", make=search),
    ]


def cold_predictions(policy: TorchPolicy, tables: Tables) -> list[Floats]:
    """A policy's log(time / NCCL's own choice) for every task key without history, (A,) each."""
    q = policy.values(Observations.cold(tables.context.copy()), tables.mask)
    return [predicted(row) for row in q]


def _autoccl(env: JobCalls, seed: int) -> Player:
    spaces = search_spaces(env.world)

    def tuner(job: int) -> AutoCcl:
        return AutoCcl(lambda key: spaces[key], seed=seed * 1000 + job)

    return Searching(tuner, env.num_envs, alarmed=False)


def search_spaces(world: World) -> dict[Key, SearchSpace]:
    """The search space of each task key; it begins with NCCL's own knobs."""
    choices = [Choice(config) for config in world.configs]
    return {
        key: SearchSpace(
            choices,
            np.flatnonzero(world.mask[key]).tolist(),
            default_runs=Choice(world.system.resolve(call, ABSTAIN)),
        )
        for key, call in enumerate(world.keys)
    }


def best_fixed(world: World, times_us: npt.NDArray[np.float64]) -> Actions:
    """The config with the smallest total time for all keys; NCCL's choice where it is missing.

    `times_us` (keys, A) is the mean true time of each config on each key, NaN where there is none.
    """
    calls = np.bincount(world.order, minlength=len(world.keys))[:, None]
    filled = np.where(np.isnan(times_us), times_us[:, :1], times_us)
    action = int((filled * calls).sum(axis=0).argmin())
    return np.where(world.mask[:, action], action, ABSTAIN_ACTION)


def _mean_times_us(world: World) -> npt.NDArray[np.float64]:
    """(keys, A) true times of every config, averaged over states that the pilot's jobs meet."""
    total = np.zeros(world.mask.shape)
    count = np.zeros(len(world.keys))
    for seed in _PILOT_SEEDS:
        jobs = world.jobs(16, seed)
        none = np.zeros(len(jobs), dtype=np.int64)
        for _ in range(_PILOT_STEPS):
            key = jobs.key
            np.add.at(total, key, jobs.oracle_us())
            np.add.at(count, key, 1)
            jobs.step(none)
    # A key that came seldom has its quiet times.
    return np.where(count[:, None] > 0, total / np.maximum(count, 1)[:, None], world.quiet_us)
