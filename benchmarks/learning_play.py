"""Policies in a simulated network with changing congestion, call by call.

What a cold table cannot show: whether a policy sees from its last calls what the network does, and
how long it takes to. The world is arrays, whoever made them: the time of every config on every task
key in every state of the network, and how states follow one another. Every job has a network of its
own; each round, every job makes one call of each of its task keys.

R rounds, J jobs, K task keys, S states, A actions, N = J x K calls of a round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.features import (
    HISTORY_SLICE,
    WINDOW_LENGTH,
    Observations,
    cold_observations,
)
from dynamiccl.datasets.history import UNKNOWN, CallColumns, history_features
from dynamiccl.evaluate.policies import Actions
from dynamiccl.train.policy import TorchPolicy

Float64Array = npt.NDArray[np.float64]
#: Within so much of the best config a policy has adapted.
ADAPTED: Final = 0.05


@dataclass(frozen=True, slots=True)
class World:
    """A network with hidden states, and the time of each config in each state."""

    #: (K rows) task and environment columns, and `noise_band`.
    tasks: pl.DataFrame
    #: (S, K, A) in us, noise-free; NaN where NCCL does not have the config.
    times_us: Float64Array
    #: (K, A) what runs when an action is taken; for ABSTAIN, what NCCL takes.
    algorithm: npt.NDArray[np.int8]
    protocol: npt.NDArray[np.int8]
    num_channels: npt.NDArray[np.int16]
    #: (S, S) probability of each state after each state, a round later.
    transitions: Float64Array
    #: Standard deviation of the log of a measured time.
    noise_sigma: float
    #: What a call takes longer when it runs another config than the call of its key before.
    switch_us: float

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """(K, A) which configs there are."""
        known: npt.NDArray[np.bool_] = ~np.isnan(self.times_us[0])
        return known

    @property
    def oracle_us(self) -> Float64Array:
        """(S, K) best time, us."""
        best: Float64Array = np.nanmin(self.times_us, axis=2)
        return best


@dataclass(frozen=True, slots=True)
class Seen:
    """The observation of the N calls of a round; `state` is for the oracle only."""

    observations: Observations
    mask: npt.NDArray[np.bool_]  # (N, A)
    key: Actions  # (N,)
    state: Actions  # (N,)


class Player(Protocol):
    """Chooses actions, round after round."""

    def act(self, seen: Seen) -> Actions:
        """(N,) actions."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A trained policy, with its launch profiles."""

    policy: TorchPolicy

    def act(self, seen: Seen) -> Actions:
        """The TorchScript policy's actions."""
        return self.policy.act(seen.observations, seen.mask)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed action (K,) for each task key; 0 is NCCL's default."""

    actions: Actions

    def act(self, seen: Seen) -> Actions:
        """The keys' actions."""
        return self.actions[seen.key]


@dataclass(frozen=True, slots=True)
class Exploring:
    """Another player's choice, or with probability `epsilon` a random config."""

    player: Player
    epsilon: float
    random: np.random.Generator

    def act(self, seen: Seen) -> Actions:
        """The actions."""
        chosen = self.player.act(seen)
        explores = self.random.random(len(chosen)) < self.epsilon
        drawn = (self.random.random(seen.mask.shape) * seen.mask).argmax(axis=1)
        return np.where(explores, drawn, chosen)


@dataclass(frozen=True, slots=True)
class KnowsState:
    """The oracle: the fastest config in the current network state, ignoring switching costs."""

    world: World

    def act(self, seen: Seen) -> Actions:
        """The fastest configs."""
        best: Actions = np.nanargmin(self.world.times_us, axis=2).astype(np.int64)
        return best[seen.state, seen.key]


@dataclass(frozen=True, slots=True)
class Played:
    """The results of a game."""

    state: npt.NDArray[np.int8]  # (R, J)
    action: npt.NDArray[np.int16]  # (R, J, K)
    #: (R, J, K) whether the call ran another config than the one before of its key.
    changed: npt.NDArray[np.bool_]
    measured_us: npt.NDArray[np.float32]  # (R, J, K), noise and changes included


def play(
    world: World, player: Player, profiles: Sequence[str], *, jobs: int, rounds: int, seed: int
) -> Played:
    """Run a player. Worlds of one seed have the same states and noise for every player."""
    random = np.random.default_rng(seed)
    num_keys = world.tasks.height
    cold = cold_observations(world.tasks, profiles).context
    key = np.tile(np.arange(num_keys), jobs)
    past = _Past(world, key)
    state = np.zeros((rounds, jobs), dtype=np.int8)
    shape = (rounds, jobs, num_keys)
    action = np.zeros(shape, dtype=np.int16)
    changed = np.zeros(shape, dtype=np.bool_)
    measured = np.zeros(shape, dtype=np.float32)
    cumulative = world.transitions.cumsum(axis=1)
    now = np.zeros(jobs, dtype=np.int64)
    mask = world.mask[key]
    for index in range(rounds):
        if index:
            drawn = random.random((jobs, 1)) * cumulative[now, -1:]
            now = (cumulative[now] <= drawn).sum(axis=1)
        noise = random.lognormal(0.0, world.noise_sigma, len(key))
        states = np.repeat(now, num_keys)
        chosen = player.act(Seen(past.observe(cold), mask, key, states))
        differs = past.differs(chosen)
        times = world.times_us[states, key, chosen] * noise + world.switch_us * differs
        past.add(chosen, times)
        state[index] = now
        for kept, values in ((action, chosen), (changed, differs), (measured, times)):
            kept[index] = values.reshape(jobs, num_keys)
    return Played(state, action, changed, measured)


class _Past:
    """The last calls of every task key of every job."""

    def __init__(self, world: World, key: Actions) -> None:
        self._world = world
        self._key = key
        self._sizes = world.tasks["size_bytes"].to_numpy()[key]
        shape = (len(key), WINDOW_LENGTH)
        self._valid = np.zeros(shape, dtype=np.bool_)
        self._calls = CallColumns(
            size_bytes=np.repeat(self._sizes[:, None], WINDOW_LENGTH, axis=1),
            time_us=np.ones(shape),
            algorithm=np.full(shape, UNKNOWN, dtype=np.int8),
            protocol=np.full(shape, UNKNOWN, dtype=np.int8),
            num_channels=np.zeros(shape, dtype=np.int16),
            interference=np.full(shape, UNKNOWN, dtype=np.float32),
            skew_us=np.full(shape, UNKNOWN, dtype=np.float32),
        )

    def observe(self, cold: npt.NDArray[np.float32]) -> Observations:
        window, history = history_features(self._calls, self._valid)
        context = cold[self._key]
        context[:, HISTORY_SLICE] = history
        return Observations(window, context)

    def differs(self, action: Actions) -> npt.NDArray[np.bool_]:
        """Whether actions run another config than the call before; not at a key's first call."""
        same = np.ones(len(action), dtype=np.bool_)
        for kept, now in self._columns(action):
            same &= kept[:, -1] == now
        return ~same & self._valid[:, -1]

    def add(self, action: Actions, times_us: Float64Array) -> None:
        for kept, now in (*self._columns(action), (self._calls.time_us, times_us)):
            kept[:, :-1] = kept[:, 1:]
            kept[:, -1] = now
        self._valid[:, :-1] = self._valid[:, 1:]
        self._valid[:, -1] = True

    def _columns(self, action: Actions) -> list[tuple[npt.NDArray[np.generic], ...]]:
        ran, calls = self._world, self._calls
        return [
            (calls.algorithm, ran.algorithm[self._key, action]),
            (calls.protocol, ran.protocol[self._key, action]),
            (calls.num_channels, ran.num_channels[self._key, action]),
        ]


@dataclass(frozen=True, slots=True)
class Figures:
    """Regrets and shares are fractions; times are true ones, changes included, noise left out."""

    #: Against the best config in the state, per call.
    mean_regret: float
    p95_regret: float
    #: Total time over that of NCCL's default in the same states.
    ratio_to_default: float
    #: Share of calls slower than the default's by over 1 %.
    share_worse_than_default: float
    switches_per_1000_calls: float
    #: Calls of a key from a change of state to the first one within ADAPTED of the best, where the
    #: config before was not: the median, and the share that never got there.
    adaptation_calls: float | None
    never_adapted: float | None


def figures(world: World, played: Played) -> Figures:
    """Scores by true times."""
    keys = np.arange(world.tasks.height)
    states = played.state[:, :, None]
    spent = world.times_us[states, keys, played.action] + world.switch_us * played.changed
    default = world.times_us[states, keys, 0]
    regret = spent / world.oracle_us[states, keys] - 1.0
    adaptation = _adaptation(world, played)
    reached = adaptation[~np.isnan(adaptation)]
    return Figures(
        mean_regret=float(regret.mean()),
        p95_regret=float(np.quantile(regret, 0.95)),
        ratio_to_default=float(spent.sum() / default.sum()),
        share_worse_than_default=float((spent > 1.01 * default).mean()),
        switches_per_1000_calls=float(1000.0 * played.changed.mean()),
        adaptation_calls=float(np.median(reached)) if len(reached) else None,
        never_adapted=float(np.isnan(adaptation).mean()) if len(adaptation) else None,
    )


def _adaptation(world: World, played: Played) -> Float64Array:
    """Calls that each adaptation took, 1 = the very next; NaN where the state changed before."""
    slowdown = world.times_us / world.oracle_us[:, :, None] - 1.0
    found: list[float] = []
    rounds, jobs = played.state.shape
    keys = np.arange(world.tasks.height)
    for job in range(jobs):
        states = played.state[:, job]
        starts = np.flatnonzero(np.diff(states)) + 1
        for start, end in zip(starts, [*starts[1:], rounds], strict=True):
            by_key = slowdown[states[start]]  # (K, A)
            before = by_key[keys, played.action[start - 1, job]]
            good = by_key[keys, played.action[start:end, job]] <= ADAPTED  # (rounds, K)
            for key in np.flatnonzero(before > ADAPTED):
                hits = np.flatnonzero(good[:, key])
                found.append(float(hits[0] + 1) if len(hits) else np.nan)
    return np.array(found)
