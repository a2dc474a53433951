"""The simulator as a Gymnasium environment: one step is one collective of each of N jobs.

What is seen, what may be chosen and what it earns are made by `datasets`, the same code that makes
them of recorded calls. A decision is about a task key, as an entry of a decision table is, and is
in force `delay_calls` calls of the job later: ranks have to agree on it first. What was decided and
is not in force yet is part of the observation (as in mvfst-rl, Sivakumar et al. 2019, section 3).

N jobs, K calls in the window, W and F features, A actions, H = ACTION_HISTORY.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import gymnasium
import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.cells import ENVIRONMENT_COLUMNS, NOISE_KEY
from dynamiccl.datasets.features import HISTORY_SLICE, cold_observations
from dynamiccl.datasets.history import (
    UNKNOWN,
    WINDOW_FEATURES,
    WINDOW_LENGTH,
    CallColumns,
    Float32Array,
    history_features,
)
from dynamiccl.datasets.questions import column_types
from dynamiccl.datasets.reward import reward
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.datasets.steps import with_noise
from dynamiccl.simulator.world import CallResults, Jobs, World

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
#: Decisions of a task key that an observation holds, the latest last; -1 = none yet.
ACTION_HISTORY: Final = 4
#: What 16 ranks on one machine took to agree, 22 to 33 ms (`bench_plugin.py`).
AGREEMENT_US: Final = 28_000.0


_SLOTS = np.arange(WINDOW_LENGTH)


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
        asked = with_noise(world_tasks(world), _no_noise() if noise is None else noise)
        context = cold_observations(asked, profiles, costs).context
        return cls(context, world.mask, world.quiet_us[:, ABSTAIN_ACTION].copy())


def _no_noise() -> pl.DataFrame:
    return pl.DataFrame(schema={**dict.fromkeys(NOISE_KEY, pl.String), "noise_band": pl.Float64})


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

    def __post_init__(self) -> None:
        if self.episode_calls < 1 or self.delay_calls < 0:
            raise ValueError("an episode needs a call, and a delay cannot be negative")


def delay_calls(world: World, latency_us: float = AGREEMENT_US) -> int:
    """Calls that a job of the world makes on average while its ranks agree."""
    return math.ceil(latency_us / float(world.nominal_us.mean()))


class CallRings:
    """The latest K calls of each of R rings, one for each (job, task key); N calls at a time."""

    def __init__(self, num_rings: int) -> None:
        """Start empty."""
        size = num_rings * WINDOW_LENGTH
        self._calls = CallColumns(
            # Any valid value for the padding, which is ignored.
            size_bytes=np.ones(size, dtype=np.int64),
            time_us=np.ones(size, dtype=np.float64),
            algorithm=np.zeros(size, dtype=np.int8),
            protocol=np.zeros(size, dtype=np.int8),
            num_channels=np.zeros(size, dtype=np.int16),
            interference=np.zeros(size, dtype=np.float64),
            skew_us=np.zeros(size, dtype=np.float64),
        )
        self._count = np.zeros(num_rings, dtype=np.int64)

    def clear(self) -> None:
        """Remove all calls."""
        self._count[:] = 0

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


class CollectiveEnv(gymnasium.vector.VectorEnv[dict[str, Any], Int64Array, Any]):
    """N jobs that call, at once; autoreset is Gymnasium's next-step mode.

    Observations are of the call that comes next: `window` (N, K, W), `context` (N, F), `mask`
    (N, A) and `actions` (N, H). `info` has what the calls of the step came to (`ran`) and what
    they would have come to by NCCL's choice in quiet (`reference_us`).
    """

    metadata: dict[str, Any] = {"autoreset_mode": "NextStep"}  # noqa: RUF012 - Gymnasium's own

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
        self._num_keys, num_actions = tables.mask.shape
        self._job = np.arange(num_jobs)
        self._sizes = np.array([call.size_bytes for call in world.keys])
        self._rings = CallRings(num_jobs * self._num_keys)
        unbounded = {"low": -np.inf, "high": np.inf, "dtype": np.float32}
        self.single_observation_space = gymnasium.spaces.Dict(
            {
                "window": gymnasium.spaces.Box(
                    shape=(WINDOW_LENGTH, len(WINDOW_FEATURES)), **unbounded
                ),
                "context": gymnasium.spaces.Box(shape=tables.context.shape[1:], **unbounded),
                "mask": gymnasium.spaces.MultiBinary(num_actions),
                "actions": gymnasium.spaces.Box(
                    -1, num_actions - 1, (ACTION_HISTORY,), dtype=np.int64
                ),
            }
        )
        self.single_action_space = gymnasium.spaces.Discrete(num_actions)
        self.observation_space = gymnasium.vector.utils.batch_space(
            self.single_observation_space, num_jobs
        )
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_jobs)
        self._random = np.random.default_rng()
        self._over = True
        self.jobs: Jobs

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002 - Gymnasium's signature
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; all keys use NCCL's own choice."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.jobs = self.world.jobs(self.num_envs, int(self._random.integers(1 << 62)))
        self._rings.clear()
        shape = (self.num_envs, self._num_keys)
        self._in_force = np.full(shape, ABSTAIN_ACTION, dtype=np.int64)
        self._decided: Int64Array = np.full((*shape, ACTION_HISTORY), -1, dtype=np.int64)
        waiting = (self.course.delay_calls + 1, self.num_envs)
        self._waiting_key, self._waiting = np.zeros((2, *waiting), dtype=np.int64)
        self._calls = 0
        self._over = False
        self._watch = None if self._make_watch is None else self._make_watch()
        #: (N,) what the watch says of the task keys of the last calls, and whether it is new.
        self.alarm = self.alarm_began = np.zeros(self.num_envs, dtype=np.bool_)
        self.level = np.full(self.num_envs, float(UNKNOWN))
        self._alarms = np.zeros(shape, dtype=np.bool_)
        return self._observe(), {}

    def step(
        self, actions: Int64Array
    ) -> tuple[dict[str, Any], npt.NDArray[np.floating[Any]], Any, Any, dict[str, Any]]:
        """Decide about the task keys of the next calls, and run those with the configs in force.

        Rewards are of the calls that ran. Raises ValueError for a masked action.
        """
        none = np.zeros(self.num_envs, dtype=np.bool_)
        if self._over:
            found, info = self.reset()
            return found, np.zeros(self.num_envs), none, none, info
        key = self.jobs.key
        if not self.tables.mask[key, actions].all():
            bad = int(np.flatnonzero(~self.tables.mask[key, actions])[0])
            raise ValueError(f"job {bad}: action {actions[bad]} is masked for {self._name(bad)}")
        self._decide(key, actions)
        ran = self.run(self._in_force[self._job, key])
        reference_us = self.tables.reference_us[key]
        earned = reward(ran.measured_us, reference_us)
        self._calls += 1
        self._over = self._calls >= self.course.episode_calls
        info = {"ran": ran, "reference_us": reference_us}
        return self._observe(), earned, none, none | self._over, info

    def run(self, actions: Int64Array) -> CallResults:
        """Run the next calls under `actions` (N,), ignoring pending decisions, and record them."""
        ran = self.jobs.step(actions)
        self._record(ran)
        return ran

    def look(self, job: Int64Array, key: Int64Array) -> dict[str, Any]:
        """Observations of task keys (M,) of jobs (M,): `window`, `context` and `mask`."""
        window, history = self._rings.observe(job * self._num_keys + key)
        context = self.tables.context[key]
        context[:, HISTORY_SLICE] = history
        return {"window": window, "context": context, "mask": self.tables.mask[key]}

    def _name(self, job: int) -> str:
        call = self.world.keys[self.jobs.key[job]]
        return f"{call.collective.wire} of {call.size_bytes} bytes"

    def _decide(self, key: Int64Array, actions: Int64Array) -> None:
        now = self._calls % len(self._waiting)
        self._waiting_key[now], self._waiting[now] = key, actions
        if self.course.observed:
            past = self._decided[self._job, key]
            past[:, :-1] = past[:, 1:]
            past[:, -1] = actions
            self._decided[self._job, key] = past
        if self._calls >= self.course.delay_calls:
            due = (self._calls - self.course.delay_calls) % len(self._waiting)
            self._in_force[self._job, self._waiting_key[due]] = self._waiting[due]

    def _record(self, ran: CallResults) -> None:
        """Add the calls to the history, with the detector's levels."""
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

    def _observe(self) -> dict[str, Any]:
        if not self.course.observed:
            return {}
        key = self.jobs.key
        return self.look(self._job, key) | {"actions": self._decided[self._job, key]}
