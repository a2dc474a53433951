"""Simulated jobs: call by call for players (`JobCalls`), and in rounds for Gymnasium.

What is seen, what may be chosen and what it earns are made by `datasets`, the same code that makes
them of recorded calls. A decision is about a task key, as an entry of a decision table is, and
takes effect only after the ranks have agreed on it (some 116 calls where 16 ranks share a machine):
with one call a step a rollout would end before its action takes effect. So in `DecisionEnv` a round
is `period_calls` calls of each job, as often as a brain decides; discount and rollout length count
rounds. The job does not wait for decisions: without one the last stays in force; and what was
decided and is not in force yet is part of the observation (as in mvfst-rl, Sivakumar et al. 2019,
section 3). How to make one with `gymnasium.make` is in docs/simulator.md.

N jobs, K task keys (or calls in a window), W and F features, A actions, H decisions that are seen.
"""

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, Self

import gymnasium
import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.cells import NOISE_KEY
from dynamiccl.datasets.features import ENVIRONMENT_COLUMNS, HISTORY_SLICE, cold_observations
from dynamiccl.datasets.history import (
    UNKNOWN,
    WINDOW_FEATURES,
    WINDOW_LENGTH,
    CallColumns,
    Float32Array,
    history_features,
)
from dynamiccl.datasets.questions import column_types
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.datasets.steps import reward, with_noise
from dynamiccl.nccl import NUM_PROTOCOLS
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.record_jobs import all_configs, check_workload
from dynamiccl.simulator.scenario import MarkovLink, Scenario, find_scenario
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.simulator.world import CallResults, Jobs, World

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
#: What 16 ranks on one machine took to agree, 22 to 33 ms (`bench_plugin.py`).
AGREEMENT_US: Final = 28_000.0


#: In place of an action: no decision in time, the last one stays in force.
LATE: Final = -1
_SLOTS: Final = np.arange(WINDOW_LENGTH)


class Watch(Protocol):
    """Detects interference from completion times: the Trigger, or another detector."""

    def observe(
        self, stream: Int64Array, log_time: Float64Array, *, key: Int64Array
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Alarms (N,), above 0 while a stream is slow, and levels (N,), below 0 = unknown.

        A stream is a task key of a job under one config, and has one more time, of which `log_time`
        is the natural logarithm in us; levels are those of the task keys.
        """


@dataclass(frozen=True, slots=True)
class Tables:
    """The cold observations and masks of a world's task keys."""

    context: Float32Array  # (keys, F), cold
    mask: npt.NDArray[np.bool_]  # (keys, A)
    #: (keys,) NCCL's default, quiet: what rewards are in units of.
    reference_us: Float64Array

    @classmethod
    def of(
        cls,
        world: World,
        profiles: Sequence[str],
        noise: pl.DataFrame | None = None,
        costs: pl.DataFrame | None = None,
    ) -> Self:
        """The tables of a world.

        `profiles` are the launch profiles and `noise` the noise bands that a policy was trained
        with (`datasets.episodes.training_noise`, or its manifest's; None: of none is known), and
        `costs` NCCL's costs for one that looks at them.
        """
        if noise is None:
            schema = {**dict.fromkeys(NOISE_KEY, pl.String), "noise_band": pl.Float64}
            noise = pl.DataFrame(schema=schema)
        asked = with_noise(world_tasks(world), noise)
        context = cold_observations(asked, profiles, costs).context
        return cls(context, world.mask, world.quiet_us[:, ABSTAIN_ACTION].copy())


def world_tasks(world: World) -> pl.DataFrame:
    """The task keys of a world as rows with workload and environment columns."""
    facts: dict[str, Any] = dict.fromkeys(ENVIRONMENT_COLUMNS) | {
        "system": world.system.name,
        "launch_profile": DEFAULT_PROFILE,
        **world.system.environment,
    }
    rows = [
        facts
        | {
            "collective": call.collective.wire,
            "size_bytes": call.size_bytes,
            "num_nodes": call.group.num_nodes,
            "ranks_per_node": call.group.ranks_per_node,
            "num_ranks": call.group.num_ranks,
        }
        for call in world.keys
    ]
    return pl.DataFrame(rows, schema=column_types(rows[0]))


@dataclass(frozen=True, slots=True)
class Course:
    """Lengths and delays of an episode."""

    episode_calls: int = 1_000
    #: Calls of a job from a decision to its being in force (`delay_calls`).
    delay_calls: int = 0
    #: Without it the observations of a step are empty, for players that look at nothing.
    observed: bool = True


def delay_calls(world: World, latency_us: float = AGREEMENT_US) -> int:
    """Calls that a job of the world makes on average while its ranks agree."""
    return math.ceil(latency_us / float(world.nominal_us.mean()))


class CallRings:
    """The latest K calls of each of R rings, one for each (job, task key); N calls at a time."""

    def __init__(self, num_rings: int) -> None:
        """Start empty."""
        size = num_rings * WINDOW_LENGTH
        # Any valid value for the padding, which is ignored.
        self._calls = CallColumns(
            size_bytes=np.ones(size, dtype=np.int64),
            time_us=np.ones(size, dtype=np.float64),
            algorithm=np.zeros(size, dtype=np.int8),
            protocol=np.zeros(size, dtype=np.int8),
            num_channels=np.zeros(size, dtype=np.int16),
            interference=np.zeros(size, dtype=np.float64),
            skew_us=np.zeros(size, dtype=np.float64),
        )
        self._count = np.zeros(num_rings, dtype=np.int64)

    def add(self, ring: npt.NDArray[np.int64], calls: CallColumns) -> None:
        """Add one call to each of N different rings (N,)."""
        place = ring * WINDOW_LENGTH + self._count[ring] % WINDOW_LENGTH
        for name in CallColumns.__slots__:
            kept: npt.NDArray[Any] = getattr(self._calls, name)
            kept[place] = getattr(calls, name)
        self._count[ring] += 1

    def observe(self, ring: npt.NDArray[np.int64]) -> tuple[Float32Array, Float32Array]:
        """Windows (N, K, W) and history features (N, H) of rings (N,)."""
        count = self._count[ring][:, None]
        index = ring[:, None] * WINDOW_LENGTH + (count + _SLOTS) % WINDOW_LENGTH
        valid = WINDOW_LENGTH - count <= _SLOTS
        return history_features(self._calls.take(index), valid)


class JobCalls:
    """N jobs that call at once, a collective of each a step; their histories, and what is in force.

    Observations are of the calls that come next: `window` (N, K, W), `context` (N, F) and `mask`
    (N, A). A decision about a task key is in force `delay_calls` calls of the job later.
    """

    def __init__(
        self,
        world: World,
        tables: Tables,
        num_jobs: int,
        course: Course = Course(),
        make_watch: Callable[[], Watch] | None = None,
    ) -> None:
        """`make_watch` makes the detector of the interference levels of an episode."""
        self.world, self.tables, self.num_envs, self.course = world, tables, num_jobs, course
        self._make_watch = make_watch
        self._num_keys = len(tables.mask)
        self._job = np.arange(num_jobs)
        self._sizes = np.array([call.size_bytes for call in world.keys])
        self._random = np.random.default_rng()
        self.jobs: Jobs

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        """Start an episode, in which all keys use NCCL's own choice; the first observations."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.jobs = self.world.jobs(self.num_envs, int(self._random.integers(1 << 62)))
        self._rings = CallRings(self.num_envs * self._num_keys)
        shape = (self.num_envs, self._num_keys)
        self._in_force = np.full(shape, ABSTAIN_ACTION, dtype=np.int64)
        #: Keys (N,) and actions (N,) that were decided and are not in force, oldest first.
        self._waiting = deque[tuple[Int64Array, Int64Array]]()
        self._watch = None if self._make_watch is None else self._make_watch()
        #: (N,) what the watch says of the task keys of the last calls, and whether it is new.
        self.alarm = self.alarm_began = np.zeros(self.num_envs, dtype=np.bool_)
        self.level = np.full(self.num_envs, float(UNKNOWN))
        self._alarms = np.zeros(shape, dtype=np.bool_)
        return self._observe()

    def step(self, actions: Int64Array) -> tuple[dict[str, Any], CallResults]:
        """Decide about the task keys of the next calls, and run those with the configs in force.

        Raises ValueError for a masked action.
        """
        key = self.jobs.key
        _check(self.world, self.tables.mask, actions, self._job, key)
        self._waiting.append((key.copy(), actions.copy()))
        if len(self._waiting) > self.course.delay_calls:
            due, decided = self._waiting.popleft()
            self._in_force[self._job, due] = decided
        ran = self.run(self._in_force[self._job, key])
        return self._observe(), ran

    def run(self, actions: Int64Array) -> CallResults:
        """Run the next calls under `actions` (N,), ignoring pending decisions.

        They are added to the history, with the detector's levels.
        """
        ran = self.jobs.step(actions)
        ring = self._job * self._num_keys + ran.key
        where = ran.key * len(self.world.configs) + ran.action
        if self._watch is not None:
            stream = ring * len(self.world.configs) + self.world.stream[ran.key, ran.action]
            alarm, level = self._watch.observe(stream, np.log(ran.measured_us), key=ring)
            self.alarm, self.level = alarm > 0, level.astype(np.float64)
            self.alarm_began = self.alarm & ~self._alarms[self._job, ran.key]
            self._alarms[self._job, ran.key] = self.alarm
        if self.course.observed:
            calls = CallColumns(
                size_bytes=self._sizes[ran.key],
                time_us=ran.measured_us,
                algorithm=self.world.algorithm.take(where),
                protocol=self.world.protocol.take(where),
                num_channels=self.world.num_channels.take(where),
                interference=self.level,
                skew_us=ran.skew_us,
            )
            self._rings.add(ring, calls)
        return ran

    def look(self, job: Int64Array, key: Int64Array) -> dict[str, Any]:
        """Observations of task keys (M,) of jobs (M,): `window`, `context` and `mask`."""
        window, history = self._rings.observe(job * self._num_keys + key)
        context = self.tables.context[key]
        context[:, HISTORY_SLICE] = history
        return {"window": window, "context": context, "mask": self.tables.mask[key]}

    def _observe(self) -> dict[str, Any]:
        return self.look(self._job, self.jobs.key) if self.course.observed else {}


def _check(
    world: World,
    mask: npt.NDArray[np.bool_],
    actions: Int64Array,
    job: Int64Array,
    key: Int64Array,
) -> None:
    """Raise ValueError for the first action (M,), of keys (M,) of jobs (M,), that is masked."""
    bad = np.flatnonzero((actions != LATE) & ~mask[key, np.maximum(actions, 0)])
    if len(bad):
        call = world.keys[key[bad[0]]]
        raise ValueError(
            f"job {job[bad[0]]}: action {actions[bad[0]]} is masked for {call.collective.wire} of "
            f"{call.size_bytes} bytes"
        )


@dataclass(frozen=True, slots=True)
class Variation:
    """Domain randomisation: how much episodes differ from each other.

    A policy trained with a single strength overfits to it; in deployment strengths differ (Tobin et
    al. 2017). Configs and NCCL's costs, which come from the data, do not vary.
    """

    #: By which factor at most slowdowns beyond 1, and dwell times, are more or less; 1 = by none.
    most: float
    #: ln of the time of an algorithm under a protocol is off by so much (standard deviation).
    times: float

    def draw(
        self, world: World, tables: Tables, random: np.random.Generator
    ) -> tuple[World, Tables]:
        """A randomised copy of a world, and its tables."""
        found = copy.copy(world)
        found.scenario = self._scenario(world.scenario, random)
        if self.times > 0.0:
            algorithm, protocol = (
                np.maximum(each, 0) for each in (world.algorithm, world.protocol)
            )
            cell = algorithm.astype(np.int64) * NUM_PROTOCOLS + protocol
            drawn = np.exp(self.times * random.standard_normal(int(cell.max()) + 1))[cell]
            for name in ("fixed_us", "intra_us", "inter_us"):
                setattr(found, name, getattr(world, name) * drawn)
            for name in ("quiet_us", "nominal_us"):  # computed from these
                vars(found).pop(name, None)
        return found, replace(tables, reference_us=found.quiet_us[:, ABSTAIN_ACTION].copy())

    def _scenario(self, scenario: Scenario, random: np.random.Generator) -> Scenario:
        links: list[Any] = []
        for link in scenario.link:
            strength, dwell = np.exp(random.uniform(-1.0, 1.0, 2) * math.log(self.most))
            if not isinstance(link, MarkovLink):
                links.append(link)
                continue
            changed = {
                "slowdowns": tuple(1.0 + strength * (each - 1.0) for each in link.slowdowns),
                "dwell_us": tuple(dwell * each for each in link.dwell_us),
            }
            links.append(link.model_copy(update=changed))
        return scenario.model_copy(update={"link": tuple(links)})


@dataclass(frozen=True, slots=True)
class Rounds:
    """Lengths of a round and an episode, and the delay. Raises ValueError for invalid ones."""

    #: Calls of a job from one decision to the next.
    period_calls: int
    #: Rounds from a decision to its being in force.
    delay_rounds: int
    #: Rounds of an episode.
    episode_rounds: int = 200
    #: Number of latest decisions in an observation, pending ones included.
    seen_decisions: int = 4

    def __post_init__(self) -> None:
        if min(self.period_calls, self.episode_rounds) < 1 or self.seen_decisions < 0:
            raise ValueError(f"{self}: a round needs a call, an episode a round")

    @classmethod
    def of(cls, world: World, period_calls: int = 0, **others: Any) -> Self:
        """With the delay d = ceil(delay in calls / period) that agreement takes in a world.

        A period of 0 means the interval at which a brain decides: when its last decision is in
        force.
        """
        delay = delay_calls(world)
        period_calls = period_calls or max(delay, 1)
        return cls(period_calls, math.ceil(delay / period_calls), **others)


class DecisionEnv(gymnasium.vector.VectorEnv[dict[str, Any], Int64Array, Any]):
    """N jobs, a decision about each of their K keys a step; autoreset is in next-step mode.

    Observations are `window` (N, K, W, features), `context` (N, K, F), `mask` (N, K, A),
    `decided` (N, K, H), -1 where nothing was, and `earned` (N, K), the rewards of the last round.
    Actions are (N, K), LATE for none. The reward (N,) is the mean over the calls of a round;
    `info` has it by key (`earned`, and `calls` of each key), what was in force (`in_force`), and
    true times of the round's calls, and of NCCL's own choice, whose algorithms are connected and
    never changed (`true_us`, `default_us`, (N,)).
    """

    metadata: dict[str, Any] = {"autoreset_mode": "NextStep"}  # noqa: RUF012 - Gymnasium's own

    def __init__(
        self,
        world: World,
        tables: Tables,
        num_jobs: int,
        rounds: Rounds,
        make_watch: Callable[[], Watch] | None = None,
        variation: Variation | None = None,
    ) -> None:
        """With a `variation`, each episode is in another world drawn from it."""
        self.world, self.tables, self.num_envs, self.rounds = world, tables, num_jobs, rounds
        self._variation, self._like = variation, (world, tables)
        self._random = np.random.default_rng()
        self.calls = JobCalls(world, tables, num_jobs, make_watch=make_watch)
        keys, actions = tables.mask.shape
        self._pairs = tuple(part.reshape(-1) for part in np.indices((num_jobs, keys)))
        self._job = np.arange(num_jobs)
        unbounded = {"low": -np.inf, "high": np.inf, "dtype": np.float32}
        box = gymnasium.spaces.Box
        window, context = (WINDOW_LENGTH, len(WINDOW_FEATURES)), tables.context.shape[1:]
        self.single_observation_space = gymnasium.spaces.Dict(
            {
                "window": box(shape=(keys, *window), **unbounded),
                "context": box(shape=(keys, *context), **unbounded),
                "mask": gymnasium.spaces.MultiBinary((keys, actions)),
                "decided": box(LATE, actions - 1, (keys, rounds.seen_decisions), dtype=np.int64),
                "earned": box(shape=(keys,), **unbounded),
            }
        )
        self.single_action_space = gymnasium.spaces.MultiDiscrete(
            [actions + 1] * keys, start=[LATE] * keys
        )
        self.observation_space = gymnasium.vector.utils.batch_space(
            self.single_observation_space, num_jobs
        )
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_jobs)
        self.is_over = True

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002 - Gymnasium's signature
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; every key uses NCCL's own choice."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        if self._variation is not None:
            self.world, self.tables = self._variation.draw(*self._like, self._random)
            self.calls.world, self.calls.tables = self.world, self.tables
        self.calls.reset(seed)
        keys = self.tables.mask.shape[0]
        count = max(self.rounds.seen_decisions, self.rounds.delay_rounds + 1)
        #: (N, K, .) the latest decisions, oldest first; LATE is replaced by its predecessor.
        self._decided: Int64Array = np.full((self.num_envs, keys, count), LATE, dtype=np.int64)
        self._earned = np.zeros((self.num_envs, keys), dtype=np.float32)
        self._round = 0
        self.is_over = False
        return self._observe(), {}

    def step(
        self, actions: Int64Array
    ) -> tuple[dict[str, Any], npt.NDArray[np.floating[Any]], Any, Any, dict[str, Any]]:
        """Decide about every key, and run a round with the configs in force.

        Raises ValueError for a masked action.
        """
        none = np.zeros(self.num_envs, dtype=np.bool_)
        if self.is_over:
            found, info = self.reset()
            return found, np.zeros(self.num_envs), none, none, info
        actions = np.asarray(actions, dtype=np.int64)
        _check(self.world, self.tables.mask, actions.ravel(), *self._pairs)
        last = self._decided[:, :, -1]
        self._decided[:, :, :-1] = self._decided[:, :, 1:]
        self._decided[:, :, -1] = np.where(actions == LATE, last, actions)
        info = self._run_round()
        self._round += 1
        self.is_over = self._round >= self.rounds.episode_rounds
        earned = (info["earned"] * info["calls"]).sum(axis=1) / self.rounds.period_calls
        return self._observe(), earned, none, none | self.is_over, info

    def _run_round(self) -> dict[str, Any]:
        in_force = self._decided[:, :, -1 - self.rounds.delay_rounds]
        in_force = np.where(in_force == LATE, ABSTAIN_ACTION, in_force)
        earned: Float64Array = np.zeros(in_force.shape)
        calls: Int64Array = np.zeros(in_force.shape, dtype=np.int64)
        true_us, default_us = np.zeros((2, self.num_envs))
        for _ in range(self.rounds.period_calls):
            key = self.calls.jobs.key
            default_us += self.calls.jobs.oracle_us()[:, ABSTAIN_ACTION]
            ran = self.calls.run(in_force[self._job, key])
            earned[self._job, key] += reward(ran.measured_us, self.tables.reference_us[key])
            calls[self._job, key] += 1
            true_us += ran.true_us
        earned /= np.maximum(calls, 1)
        self._earned = earned.astype(np.float32)
        return {
            "earned": earned,
            "calls": calls,
            "in_force": in_force,
            "true_us": true_us,
            "default_us": default_us,
        }

    def _observe(self) -> dict[str, Any]:
        shape = self.tables.mask.shape[0]
        seen = self.calls.look(*self._pairs)
        found = {
            name: part.reshape(self.num_envs, shape, *part.shape[1:]) for name, part in seen.items()
        }
        count = self.rounds.seen_decisions
        return found | {
            "mask": found["mask"].astype(np.int8),
            "decided": self._decided[:, :, self._decided.shape[2] - count :].copy(),
            "earned": self._earned,
        }


def make_vector(  # noqa: PLR0913 - all of a world, by name
    num_envs: int = 1,
    *,
    system: str = "b300-nvlink",
    workload: str | Sequence[str] = "decode",
    scenario: str = "busy-host",
    num_nodes: int = 0,
    ranks_per_node: int = 0,
    period_calls: int = 0,
    episode_rounds: int = 200,
    seen_decisions: int = 4,
) -> DecisionEnv:
    """N jobs on a system by name or file; 0 nodes or ranks: the largest group.

    Raises UnknownName for an unknown name, and UserError for a workload that the system cannot run.
    """
    found = find_system(system)
    largest = found.groups()[-1]
    shape = Group(num_nodes or largest.num_nodes, ranks_per_node or largest.ranks_per_node)
    names = [workload] if isinstance(workload, str) else list(workload)
    made = make_workload(names, shape)
    check_workload(found, made)
    world = World(found, made, all_configs(found, made), find_scenario(scenario))
    rounds = Rounds.of(
        world, period_calls, episode_rounds=episode_rounds, seen_decisions=seen_decisions
    )
    return DecisionEnv(world, Tables.of(world, [DEFAULT_PROFILE]), num_envs, rounds)


class Collectives(gymnasium.Env[dict[str, Any], npt.NDArray[np.int64]]):
    """One job: `DecisionEnv` without the dimension N, and lenient towards invalid configs.

    A config that NCCL lacks for a call is no error: NCCL decides itself, as it does when a tuner
    asks for one. `info` has `earned` and `calls` by task key, `true_us` and `default_us`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own

    def __init__(self, render_mode: str | None = None, **world: Any) -> None:
        """The arguments are those of `make_vector`; there is nothing to render."""
        self.render_mode = render_mode
        self.jobs = make_vector(1, **world)
        self.observation_space = self.jobs.single_observation_space
        self.action_space = self.jobs.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; every key uses NCCL's own choice."""
        super().reset(seed=seed)
        found, _ = self.jobs.reset(seed=seed, options=options)
        return _only(found), {}

    def step(
        self, action: npt.NDArray[np.int64]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Set the config of every task key, and run a round."""
        asked = np.asarray(action, dtype=np.int64)
        mask = self.jobs.tables.mask
        has = mask[np.arange(len(mask)), np.maximum(asked, 0)] | (asked == LATE)
        found, earned, _, over, info = self.jobs.step(np.where(has, asked, ABSTAIN_ACTION)[None])
        return _only(found), float(earned[0]), False, bool(over[0]), _only(info)


def _only(found: dict[str, Any]) -> dict[str, Any]:
    return {name: part[0] for name, part in found.items()}
