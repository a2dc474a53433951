"""Runs one player's jobs from start to end, and adds up true times.

Interference does not depend on actions (dynamiccl/simulator/world.py), so players with one seed
meet the same congestion at the same calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.evaluate.simulate.players import Player
from dynamiccl.simulator.world import CallResults
from dynamiccl.train.environment import JobCalls

Float64Array = npt.NDArray[np.float64]
#: A call counts as slower than NCCL's choice in the same state beyond this factor.
SLOWER: Final = 0.01


@dataclass(frozen=True, slots=True)
class Timeline:
    """The first job, call by call (C calls)."""

    key: npt.NDArray[np.int64]
    action: npt.NDArray[np.int64]
    measured_us: Float64Array
    default_us: Float64Array
    changed: npt.NDArray[np.bool_]
    #: Calls at which an alarm begins; all False without a detector.
    alarm_began: npt.NDArray[np.bool_]
    level: Float64Array
    #: The worst slowdown of a link or the host.
    slowdown: Float64Array


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of N jobs, each (N,)."""

    #: True time of all calls, changes included.
    total_us: Float64Array
    #: Total job time, with the compute between and beside calls.
    job_us: Float64Array
    #: The best config of each call, changes left out.
    oracle_us: Float64Array
    changes: npt.NDArray[np.int64]
    #: Calls that took over 1 % more than NCCL's choice would have.
    slower: npt.NDArray[np.int64]
    #: Calls at which an alarm began.
    alarms: npt.NDArray[np.int64]
    calls: int


def roll_out(
    env: JobCalls,
    player: Player,
    *,
    seed: int,
    progress: Callable[[int], None] | None = None,
    recorded: Callable[[CallResults], None] | None = None,
) -> tuple[Totals, Timeline]:
    """Run one episode of the environment."""
    observation = env.reset(seed)
    calls, jobs = env.course.episode_calls, env.num_envs
    total, job, oracle = np.zeros((3, jobs))
    changes, slower, alarms = np.zeros((3, jobs), dtype=np.int64)
    first: dict[str, Any] = {
        "key": np.zeros(calls, dtype=np.int64),
        "action": np.zeros(calls, dtype=np.int64),
        "changed": np.zeros(calls, dtype=np.bool_),
        "alarm_began": np.zeros(calls, dtype=np.bool_),
        **{name: np.zeros(calls) for name in ("measured_us", "default_us", "level", "slowdown")},
    }
    for call in range(calls):
        times = env.jobs.oracle_us()
        worst = max(env.jobs.intra[0], env.jobs.inter[0], env.jobs.host[0])
        usual = times[:, ABSTAIN_ACTION]
        observation, ran = env.step(player.act(observation, env))
        player.learn(ran, env)
        if recorded is not None:
            recorded(ran)
        total += ran.true_us
        job += ran.lasted_us
        oracle += np.nanmin(times, axis=1)
        changes += ran.changed
        slower += ran.true_us > (1.0 + SLOWER) * usual
        alarms += env.alarm_began
        seen = (
            ran.key,
            ran.action,
            ran.changed,
            env.alarm_began,
            ran.measured_us,
            usual,
            env.level,
        )
        for name, values in zip(first, seen, strict=False):
            first[name][call] = values[0]
        first["slowdown"][call] = worst
        if progress is not None and (call + 1) % 1000 == 0:
            progress(1000)
    totals = Totals(total, job, oracle, changes, slower, alarms, calls)
    return totals, Timeline(**first)
