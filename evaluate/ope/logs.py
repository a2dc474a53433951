"""Logs: what a behaviour policy did, with which probability, and what came of it.

n rows of a log, T tasks, A actions. Rewards are minus time over NCCL's default.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.policies import Actions

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Log:
    """n calls."""

    task: npt.NDArray[np.int64]  # (n,), row of the task
    action: npt.NDArray[np.int64]  # (n,)
    reward: Float64Array  # (n,)
    #: (n,) with which probability the behaviour took the action it took; NaN where nobody knows.
    propensity: Float64Array
    #: Whether what came before changed the probabilities: such rows are not independent.
    adaptive: bool = False
    #: (n, A) the probabilities of all actions at each row's time, where they were kept.
    probabilities: Float64Array | None = None

    def __len__(self) -> int:
        return len(self.action)

    def rows(self, which: npt.NDArray[np.bool_]) -> Self:
        """Some of the calls."""
        return type(self)(
            self.task[which],
            self.action[which],
            self.reward[which],
            self.propensity[which],
            self.adaptive,
            None if self.probabilities is None else self.probabilities[which],
        )


def draw_log(
    grid: TaskGrid, behaviour: Float64Array, size: int, random: np.random.Generator
) -> Log:
    """Calls of tasks drawn alike, by a known stochastic policy (T, A), timed as in the samples.

    Raises ValueError when the behaviour takes what was not measured.
    """
    if (behaviour[~grid.mask] > 0).any():
        raise ValueError("the behaviour takes actions that were not measured")
    task = random.integers(0, len(behaviour), size)
    cumulative = behaviour.cumsum(axis=1)
    drawn = random.random(size)[:, None] * cumulative[task, -1:]
    action = (cumulative[task] <= drawn).sum(axis=1)
    which = random.random(size)
    cells = zip(task.tolist(), action.tolist(), which.tolist(), strict=True)
    times = np.array([_pick(grid.samples[t, a], share) for t, a, share in cells])
    reward = -times / grid.default_us[task]
    return Log(task, action, reward, behaviour[task, action])


def _pick(samples: Float64Array, share: float) -> float:
    return float(samples[int(share * len(samples))])


def deterministic(actions: Actions, num_actions: int) -> Float64Array:
    """(T, A) the policy that always takes `actions`."""
    chosen: Float64Array = np.eye(num_actions)[actions]
    return chosen


def mixture(policy: Float64Array, mask: npt.NDArray[np.bool_], epsilon: float) -> Float64Array:
    """(T, A) a policy that is random, among what `mask` allows, with probability `epsilon`."""
    uniform = mask / mask.sum(axis=1, keepdims=True)
    mixed: Float64Array = (1.0 - epsilon) * policy + epsilon * uniform
    return mixed


def true_value(grid: TaskGrid, policy: Float64Array) -> float:
    """Mean reward of a policy (T, A) over the tasks, by the grid's own times."""
    rewards = np.where(grid.mask, -grid.times_us / grid.default_us[:, None], 0.0)
    return float((policy * rewards).sum(axis=1).mean())
