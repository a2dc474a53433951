"""Reward models, for the direct method and for doubly robust estimates."""

from typing import Final

import numpy as np

from dynamiccl.evaluate.ope.logs import Float64Array, Log

#: Weight, in rows, of a neighbour's mean where a cell has few of its own.
_PRIOR_ROWS: Final = 0.5


def tabular_model(log: Log, shape: tuple[int, int]) -> Float64Array:
    """(T, A) mean reward of every cell, shrunk towards its action's mean where rows are few.

    For an action that was never taken, the mean over all rows.
    """
    sums, counts = np.zeros(shape), np.zeros(shape)
    np.add.at(sums, (log.task, log.action), log.reward)
    np.add.at(counts, (log.task, log.action), 1.0)
    overall = float(log.reward.mean())
    by_action = (sums.sum(axis=0) + _PRIOR_ROWS * overall) / (counts.sum(axis=0) + _PRIOR_ROWS)
    model: Float64Array = (sums + _PRIOR_ROWS * by_action) / (counts + _PRIOR_ROWS)
    return model
