"""Simulated jobs: call by call for players (`JobCalls`), and in rounds (`DecisionEnv`).

A decision takes effect when the ranks have agreed, some 116 calls where 16 ranks share a machine.
So a round is `period_calls` calls of each job, as often as a brain decides. The job does not wait;
pending decisions are observed (mvfst-rl, Sivakumar et al. 2019, section 3).

N jobs, K task keys (or calls in a window), W and F features, A actions, H decisions that are seen.
"""

import copy
import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Self

import gymnasium
import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
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
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.datasets.steps import reward, with_noise
from dynamiccl.errors import UserError
from dynamiccl.nccl import NUM_PROTOCOLS
from dynamiccl.simulator.record_jobs import all_configs, check_workload
from dynamiccl.simulator.scenario import MarkovLink, Scenario, find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import System, find_system
from dynamiccl.simulator.workloads import Workload, make_workload
from dynamiccl.simulator.world import CallResults, Jobs, World

if TYPE_CHECKING:  # it imports torch
    from dynamiccl.train.trigger import Detector

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
#: From a decision to the stop at which all ranks have it: a vote is 1 to 3 ms (`bench_plugin.py`),
#: and a rank waits 20 ms for the others' stop at first (`serve/plugin/agree/stops.h`).
AGREEMENT_US: Final = 28_000.0
#: No decision in time: the last one stays in force.
LATE: Final = -1


@dataclass(frozen=True, slots=True)
class Place:
    """As `h100-ib:decode+lora:congested:4x8`; without nodes x ranks, on the largest group."""

    text: str
    system: System
    workload: Workload
    scenario: Scenario

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises UserError for another form, and as the look-ups of its parts."""
        parts = text.split(":")
        shape = re.fullmatch(r"(\d+)x(\d+)", parts[3]) if len(parts) == 4 else None
        if len(parts) not in {3, 4} or (len(parts) == 4 and shape is None):
            raise UserError(
                f"'{text}' is no place to train in; give SYSTEM:WORKLOAD+WORKLOAD:SCENARIO, and "
                "the group's shape behind it where it is not the largest, as h100-ib:ddp:quiet:4x8"
            )
        system = find_system(parts[0])
        group = Group(int(shape[1]), int(shape[2])) if shape else system.groups()[-1]
        workload = make_workload(parts[1].split("+"), group)
        check_workload(system, workload)
        return cls(text, system, workload, find_scenario(parts[2]))

    @property
    def for_training(self) -> Workload:
        """The workload with sizes of training octaves only."""
        calls = self.workload.calls
        moved = (replace(call, size_bytes=training_size(call.size_bytes)) for call in calls)
        return Workload(self.workload.name, tuple(moved))


@cache
def training_size(size_bytes: int) -> int:
    """The size, or the next one by octaves above it that is in a training octave.

    >>> training_size(1 << 20), training_size(1 << 19)
    (1048576, 1048576)
    """
    sizes = pl.DataFrame({"size_bytes": [size_bytes << up for up in range(5)]})
    for row in with_split(sizes).iter_rows(named=True):
        if row["split"] == Split.TRAIN:
            return int(row["size_bytes"])
    raise UserError(
        f"{size_bytes} bytes lie in no octave that is split; give sizes of 64 B or more"
    )


@dataclass(frozen=True, slots=True)
class Tables:
    """The cold observations and masks of a world's task keys."""

    context: Float32Array  # (keys, F), cold
    mask: npt.NDArray[np.bool_]  # (keys, A)
    #: (keys,) NCCL's default in quiet, the unit of rewards.
    reference_us: Float64Array

    @classmethod
    def of(
        cls,
        world: World,
        profiles: Sequence[str],
        noise: pl.DataFrame | None = None,
        costs: pl.DataFrame | None = None,
    ) -> Self:
        """Of a world, with a policy's launch profiles, noise bands (None: unknown) and costs."""
        tasks = world_tasks(world)
        unknown = tasks.with_columns(noise_band=pl.lit(None, pl.Float64))
        asked = unknown if noise is None else with_noise(tasks, noise)
        context = cold_observations(asked, profiles, costs).context
        return cls(context, world.mask, world.quiet_us[:, ABSTAIN_ACTION].copy())


def world_tasks(world: World) -> pl.DataFrame:
    """Rows of workload and environment columns, one a task key."""
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


def delay_calls(world: World, latency_us: float = AGREEMENT_US) -> int:
    """Calls that a job of the world makes on average while its ranks agree."""
    return math.ceil(latency_us / float(world.nominal_us.mean()))


class _Windows:
    """The latest K calls of R streams, one for each (job, task key); right-aligned."""

    def __init__(self, num_streams: int) -> None:
        self._calls = CallColumns.empty((num_streams, WINDOW_LENGTH))
        self._valid = np.zeros((num_streams, WINDOW_LENGTH), dtype=np.bool_)

    def add(self, stream: Int64Array, calls: CallColumns) -> None:
        """Add one call to each of N different streams (N,)."""
        pairs = [(getattr(self._calls, n), getattr(calls, n)) for n in CallColumns.__slots__]
        for kept, latest in [*pairs, (self._valid, True)]:
            kept[stream, :-1] = kept[stream, 1:]
            kept[stream, -1] = latest

    def observe(self, stream: Int64Array) -> tuple[Float32Array, Float32Array]:
        """Windows (N, K, W) and history features (N, H) of streams (N,)."""
        return history_features(self._calls.take(stream), self._valid[stream])


class JobCalls:
    """N jobs, a call of each a step; decisions are in force `delay` calls later.

    Observations are of the next calls: `window` (N, K, W), `context` (N, F), `mask` (N, A); none
    unless `observed`.
    """

    def __init__(
        self,
        world: World,
        tables: Tables,
        num_jobs: int,
        make_watch: Callable[[], "Detector"] | None = None,
        *,
        delay: int = 0,
        observed: bool = True,
    ) -> None:
        self.world, self.tables, self.num_envs, self.delay = world, tables, num_jobs, delay
        self._make_watch, self._observed = make_watch, observed
        self._num_keys = len(tables.mask)
        self._job = np.arange(num_jobs)
        self._sizes = np.array([call.size_bytes for call in world.keys])
        self._random = np.random.default_rng()
        self.jobs: Jobs

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        """Start an episode with NCCL's own choices; the first observations."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.jobs = self.world.jobs(self.num_envs, int(self._random.integers(1 << 62)))
        self._windows = _Windows(self.num_envs * self._num_keys)
        shape = (self.num_envs, self._num_keys)
        self._in_force = np.full(shape, ABSTAIN_ACTION, dtype=np.int64)
        #: Pending keys (N,) and actions (N,), oldest first.
        self._waiting = deque[tuple[Int64Array, Int64Array]]()
        self._watch = None if self._make_watch is None else self._make_watch()
        #: (N,) alarms of the last calls' task keys, and whether they are new.
        self.alarm = self.alarm_began = np.zeros(self.num_envs, dtype=np.bool_)
        self.level = np.full(self.num_envs, float(UNKNOWN))
        self._alarms = np.zeros(shape, dtype=np.bool_)
        return self._observe()

    def step(self, actions: Int64Array) -> tuple[dict[str, Any], CallResults]:
        """Decide about the next calls, and run them; raises ValueError for a masked action."""
        key = self.jobs.key
        _check(self.world, self.tables.mask, actions, self._job, key)
        self._waiting.append((key.copy(), actions.copy()))
        if len(self._waiting) > self.delay:
            due, decided = self._waiting.popleft()
            self._in_force[self._job, due] = decided
        ran = self.run(self._in_force[self._job, key])
        return self._observe(), ran

    def run(self, actions: Int64Array) -> CallResults:
        """Run the next calls under `actions` (N,), and add them to the history."""
        ran = self.jobs.step(actions)
        ring = self._job * self._num_keys + ran.key
        where = ran.key * len(self.world.configs) + ran.action
        if self._watch is not None:
            stream = ring * len(self.world.configs) + self.world.stream[ran.key, ran.action]
            alarm, level = self._watch.observe(stream, np.log(ran.measured_us), key=ring)
            self.alarm, self.level = alarm > 0, level.astype(np.float64)
            self.alarm_began = self.alarm & ~self._alarms[self._job, ran.key]
            self._alarms[self._job, ran.key] = self.alarm
        if self._observed:
            calls = CallColumns(
                size_bytes=self._sizes[ran.key],
                time_us=ran.measured_us,
                algorithm=self.world.algorithm.take(where),
                protocol=self.world.protocol.take(where),
                num_channels=self.world.num_channels.take(where),
                interference=self.level,
                skew_us=ran.skew_us,
            )
            self._windows.add(ring, calls)
        return ran

    def look(self, job: Int64Array, key: Int64Array) -> dict[str, Any]:
        """Observations of task keys (M,) of jobs (M,): `window`, `context` and `mask`."""
        window, history = self._windows.observe(job * self._num_keys + key)
        context = self.tables.context[key]
        context[:, HISTORY_SLICE] = history
        return {"window": window, "context": context, "mask": self.tables.mask[key]}

    def _observe(self) -> dict[str, Any]:
        return self.look(self._job, self.jobs.key) if self._observed else {}


def _check(
    world: World,
    mask: npt.NDArray[np.bool_],
    actions: Int64Array,
    job: Int64Array,
    key: Int64Array,
) -> None:
    bad = np.flatnonzero((actions != LATE) & ~mask[key, np.maximum(actions, 0)])
    if len(bad):
        call = world.keys[key[bad[0]]]
        raise ValueError(
            f"job {job[bad[0]]}: action {actions[bad[0]]} is masked for {call.collective.wire} of "
            f"{call.size_bytes} bytes"
        )


@dataclass(frozen=True, slots=True)
class Variation:
    """Domain randomisation of episodes (Tobin et al. 2017); configs and costs do not vary."""

    #: Slowdowns beyond 1, and dwell times, differ by this factor at most.
    most: float
    #: Standard deviation of ln time of an algorithm under a protocol.
    times: float

    def draw(
        self, world: World, tables: Tables, random: np.random.Generator
    ) -> tuple[World, Tables]:
        """A randomised copy of a world, and its tables."""
        found = copy.copy(world)
        links = tuple(self._link(link, random) for link in world.scenario.link)
        found.scenario = world.scenario.model_copy(update={"link": links})
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

    def _link(self, link: Any, random: np.random.Generator) -> Any:
        strength, dwell = np.exp(random.uniform(-1.0, 1.0, 2) * math.log(self.most))
        if not isinstance(link, MarkovLink):
            return link
        changed = {
            "slowdowns": tuple(1.0 + strength * (each - 1.0) for each in link.slowdowns),
            "dwell_us": tuple(dwell * each for each in link.dwell_us),
        }
        return link.model_copy(update=changed)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Lengths of a round and an episode; raises ValueError."""

    #: Calls of a job between decisions.
    period_calls: int
    delay_rounds: int
    episode_rounds: int = 200
    seen_decisions: int = 4

    def __post_init__(self) -> None:
        if min(self.period_calls, self.episode_rounds) < 1 or self.seen_decisions < 0:
            raise ValueError(f"{self}: a round needs a call, an episode a round")

    @classmethod
    def of(cls, world: World, period_calls: int = 0, **others: Any) -> Self:
        """With the delay of agreement; a period of 0 decides when the last is in force."""
        delay = delay_calls(world)
        period_calls = period_calls or max(delay, 1)
        return cls(period_calls, math.ceil(delay / period_calls), **others)


class DecisionEnv:
    """N jobs, a decision about each of their K keys a round.

    Observations are `window` (N, K, W, features), `context` (N, K, F), `mask` (N, K, A), `decided`
    (N, K, H), -1 = none, and `earned` (N, K). Actions are (N, K), or LATE. A round tells the mean
    reward of each key (`earned`), its `calls`, what was `in_force`, and times (N,) of the calls
    (`true_us`) and of NCCL's own choice, connected and never changed (`default_us`).
    """

    def __init__(
        self,
        world: World,
        tables: Tables,
        num_jobs: int,
        rounds: Rounds,
        make_watch: Callable[[], "Detector"] | None = None,
        variation: Variation | None = None,
    ) -> None:
        self.world, self.tables, self.num_envs, self.rounds = world, tables, num_jobs, rounds
        self._variation, self._like = variation, (world, tables)
        self._random = np.random.default_rng()
        self.calls = JobCalls(world, tables, num_jobs, make_watch=make_watch)
        self._shape = (num_jobs, len(tables.mask))
        self._pairs = tuple(part.reshape(-1) for part in np.indices(self._shape))
        self._job = np.arange(num_jobs)
        self.is_over = True

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        """Start an episode with NCCL's own choices; the first observations."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        if self._variation is not None:
            self.world, self.tables = self._variation.draw(*self._like, self._random)
            self.calls.world, self.calls.tables = self.world, self.tables
        self.calls.reset(seed)
        count = max(self.rounds.seen_decisions, self.rounds.delay_rounds + 1)
        #: (N, K, H), oldest first; LATE is replaced by its predecessor.
        self._decided: Int64Array = np.full((*self._shape, count), LATE, dtype=np.int64)
        self._earned = np.zeros(self._shape, dtype=np.float32)
        self._round, self.is_over = 0, False
        return self._observe()

    def step(self, actions: Int64Array) -> tuple[dict[str, Any], dict[str, Any]]:
        """Decide about every key, and run a round; raises ValueError for a masked action."""
        _check(self.world, self.tables.mask, actions.ravel(), *self._pairs)
        last = self._decided[:, :, -1]
        self._decided[:, :, :-1] = self._decided[:, :, 1:]
        self._decided[:, :, -1] = np.where(actions == LATE, last, actions)
        told = self._run_round()
        self._earned = told["earned"].astype(np.float32)
        self._round += 1
        self.is_over = self._round >= self.rounds.episode_rounds
        return self._observe(), told

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
        return {
            "earned": earned / np.maximum(calls, 1),
            "calls": calls,
            "in_force": in_force,
            "true_us": true_us,
            "default_us": default_us,
        }

    def _observe(self) -> dict[str, Any]:
        seen = self.calls.look(*self._pairs)
        found = {name: part.reshape(*self._shape, *part.shape[1:]) for name, part in seen.items()}
        first = self._decided.shape[2] - self.rounds.seen_decisions
        return found | {
            "mask": found["mask"].astype(np.int8),
            "decided": self._decided[:, :, first:].copy(),
            "earned": self._earned,
        }


class Collectives(gymnasium.Env[dict[str, Any], Int64Array]):
    """One job of `DecisionEnv`, without N; a config that NCCL lacks is left to NCCL."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own

    def __init__(
        self,
        *,
        system: str = "b300-nvlink",
        workload: str = "decode",
        scenario: str = "busy-host",
        **rounds: int,
    ) -> None:
        """As `Place.parse`, on the system's largest group; `rounds` as `Rounds.of`."""
        place = Place.parse(f"{system}:{workload}:{scenario}")
        configs = all_configs(place.system, place.workload)
        world = World(place.system, place.workload, configs, place.scenario)
        tables = Tables.of(world, [DEFAULT_PROFILE])
        self.jobs = DecisionEnv(world, tables, 1, Rounds.of(world, **rounds))
        self._mask = tables.mask
        keys, actions = self._mask.shape
        unbounded = {"low": -np.inf, "high": np.inf, "dtype": np.float32}
        box, decisions = gymnasium.spaces.Box, (keys, self.jobs.rounds.seen_decisions)
        window = (keys, WINDOW_LENGTH, len(WINDOW_FEATURES))
        self.observation_space = gymnasium.spaces.Dict(
            {
                "window": box(shape=window, **unbounded),
                "context": box(shape=(keys, tables.context.shape[1]), **unbounded),
                "mask": gymnasium.spaces.MultiBinary((keys, actions)),
                "decided": box(LATE, actions - 1, decisions, dtype=np.int64),
                "earned": box(shape=(keys,), **unbounded),
            }
        )
        choices = [actions + 1] * keys
        self.action_space = gymnasium.spaces.MultiDiscrete(choices, start=[LATE] * keys)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode with NCCL's own choices."""
        super().reset(seed=seed, options=options)
        return _only(self.jobs.reset(seed)), {}

    def step(
        self, action: npt.NDArray[np.int64]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Set every task key's config, and run a round."""
        asked = np.asarray(action, dtype=np.int64)
        has = self._mask[np.arange(len(asked)), np.maximum(asked, 0)] | (asked == LATE)
        found, told = self.jobs.step(np.where(has, asked, ABSTAIN_ACTION)[None])
        earned = float((told["earned"] * told["calls"]).sum() / self.jobs.rounds.period_calls)
        return _only(found), earned, False, self.jobs.is_over, _only(told)


def _only(found: dict[str, Any]) -> dict[str, Any]:
    return {name: part[0] for name, part in found.items()}
