"""Logs drawn from a grid with known times, to test estimators on.

n rows of a log, T tasks, A actions. Rewards are minus time over NCCL's default.
"""

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.evaluate.ope import Float64Array, Log


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


def mixture(policy: Float64Array, mask: npt.NDArray[np.bool_], epsilon: float) -> Float64Array:
    """(T, A) a policy that is random, among what `mask` allows, with probability `epsilon`."""
    uniform = mask / mask.sum(axis=1, keepdims=True)
    mixed: Float64Array = (1.0 - epsilon) * policy + epsilon * uniform
    return mixed


def true_value(grid: TaskGrid, policy: Float64Array) -> float:
    """Mean reward of a policy (T, A) over the tasks, by the grid's own times."""
    rewards = np.where(grid.mask, -grid.times_us / grid.default_us[:, None], 0.0)
    return float((policy * rewards).sum(axis=1).mean())
