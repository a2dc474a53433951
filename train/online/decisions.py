"""The round-based environment: a step is one decision about every task key of N jobs.

A decision takes effect only after the ranks have agreed on it (some 116 calls where 16 ranks share
a machine), so with one call a step a rollout would end before its action takes effect. Here a round
is `period_calls` calls of each job, as often as a brain decides; a decision is in force
`delay_rounds` rounds later, and its reward is the mean over the calls of the rounds in which it was
in force. Discount and rollout length count rounds.

The simulated job does not wait for decisions: without one the last stays in force (as in mvfst-rl,
Sivakumar et al. 2019, section 3).

N jobs, K task keys, A actions, H decisions in an observation, W calls in a window.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import gymnasium
import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.reward import reward
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import (
    CollectiveEnv,
    Float64Array,
    Int64Array,
    Tables,
    Watch,
    delay_calls,
)
from dynamiccl.train.online.variation import Variation

#: In place of an action: no decision in time, the last one stays in force.
LATE: Final = -1


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
        if min(self.period_calls, self.episode_rounds) < 1 or self.delay_rounds < 0:
            raise ValueError("a round needs a call, an episode a round, and a delay is 0 or more")
        if self.seen_decisions < 0:
            raise ValueError(f"{self.seen_decisions} decisions cannot be seen")

    @classmethod
    def of(cls, world: World, period_calls: int = 0, **others: Any) -> "Rounds":
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
        self.calls = CollectiveEnv(world, tables, num_jobs, make_watch=make_watch)
        keys, actions = tables.mask.shape
        self._pairs = tuple(part.reshape(-1) for part in np.indices((num_jobs, keys)))
        self._job = np.arange(num_jobs)
        of_calls = gymnasium.vector.utils.batch_space(self.calls.single_observation_space, keys)
        decided = gymnasium.spaces.Box(
            LATE, actions - 1, (keys, rounds.seen_decisions), dtype=np.int64
        )
        self.single_observation_space = gymnasium.spaces.Dict(
            {name: of_calls[name] for name in ("window", "context", "mask")}
            | {
                "decided": decided,
                "earned": gymnasium.spaces.Box(-np.inf, np.inf, (keys,), dtype=np.float32),
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
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; every key uses NCCL's own choice."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        if self._variation is not None:
            self.world, self.tables = self._variation.draw(*self._like, self._random)
            self.calls.world, self.calls.tables = self.world, self.tables
        self.calls.reset(seed=seed, options=options)
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
        self._check(actions)
        last = self._decided[:, :, -1]
        self._decided[:, :, :-1] = self._decided[:, :, 1:]
        self._decided[:, :, -1] = np.where(actions == LATE, last, actions)
        info = self._run_round()
        self._round += 1
        self.is_over = self._round >= self.rounds.episode_rounds
        earned = (info["earned"] * info["calls"]).sum(axis=1) / self.rounds.period_calls
        return self._observe(), earned, none, none | self.is_over, info

    def _check(self, actions: Int64Array) -> None:
        allowed = np.take_along_axis(
            self.tables.mask[None].repeat(self.num_envs, 0), np.maximum(actions, 0)[..., None], 2
        )[..., 0]
        bad = np.argwhere((actions != LATE) & ~allowed)
        if len(bad):
            job, key = bad[0]
            call = self.world.keys[key]
            raise ValueError(
                f"job {job}: action {actions[job, key]} is masked for {call.collective.wire} of "
                f"{call.size_bytes} bytes"
            )

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
