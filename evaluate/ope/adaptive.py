"""Doubly robust estimates from logs whose behaviour changed with what it saw.

Rows of such a log are not independent, and where the behaviour all but stopped taking an action the
few rows that it still took weigh so much that the plain estimate is not normal, and its interval
holds less than it says. Here every row's score is weighted by the inverse of the spread that it can
have (Hadad et al. 2021, "Confidence intervals for policy evaluation in adaptive experiments",
stabilised variance): h = (sum over a of policy(a)^2 / propensity(a))^-1/2. That needs, of every
row, the probabilities of all actions at its time. Tasks are estimated one by one and then averaged,
since weights that differ between tasks would favour some; reward models see earlier rows alone.
"""

from itertools import pairwise
from typing import Final

import numpy as np

from dynamiccl.evaluate.ope.logs import Float64Array, Log
from dynamiccl.evaluate.ope.models import tabular_model

#: Parts of the log, in its order; the reward model of each is fitted to those before.
_BLOCKS: Final = 10
#: What the first part goes by: NCCL's default, by which rewards are measured.
_FIRST_REWARD: Final = -1.0
#: Rows of a task from which on its weighted mean is normal enough: early luck moves later weights,
#: and of 125 rows a task 90 % intervals held the truth half of the time, of 1,000 as they say.
MIN_ROWS: Final = 800


def adaptive_value(log: Log, policy: Float64Array) -> tuple[float, float] | None:
    """Value and standard error of a policy (T, A); None where a task has too few rows.

    Raises ValueError for a log without the probabilities of all actions.
    """
    if log.probabilities is None:
        raise ValueError("the log does not hold the probabilities of all actions")
    scores = _scores(log, policy)
    target = policy[log.task]
    spread = np.divide(
        target**2, log.probabilities, out=np.zeros_like(target), where=log.probabilities > 0
    )
    weight = 1.0 / np.sqrt(spread.sum(axis=1))
    tasks, counts = np.unique(log.task, return_counts=True)
    if counts.min() < MIN_ROWS:
        return None
    share = counts / len(log)
    values, errors = np.empty(len(tasks)), np.empty(len(tasks))
    for index, task in enumerate(tasks):
        rows = log.task == task
        own, total = weight[rows], weight[rows].sum()
        values[index] = (own * scores[rows]).sum() / total
        errors[index] = np.sqrt((own**2 * (scores[rows] - values[index]) ** 2).sum()) / total
    value = float((share * values).sum())
    # Which tasks were asked is chance as well.
    drawn = (share * (values - value) ** 2).sum() / len(log)
    return value, float(np.sqrt((share**2 * errors**2).sum() + drawn))


def _scores(log: Log, policy: Float64Array) -> Float64Array:
    """(n,) a model's value of the policy on each row's task, and its weighted residual."""
    scores = np.empty(len(log))
    edges = np.linspace(0, len(log), _BLOCKS + 1).astype(np.int64)
    for start, end in pairwise(edges):
        rows = slice(start, end)
        model = np.full(policy.shape, _FIRST_REWARD)
        if start:
            model = tabular_model(log.rows(np.arange(len(log)) < start), policy.shape)
        task, action = log.task[rows], log.action[rows]
        ratio = policy[task, action] / log.propensity[rows]
        expected = (policy * model).sum(axis=1)[task]
        scores[rows] = expected + ratio * (log.reward[rows] - model[task, action])
    return scores
