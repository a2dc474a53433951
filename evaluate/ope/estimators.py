"""Estimates of a policy's value from a log, with intervals where these mean something.

    DM      direct method: the mean of a reward model under the policy
    SNIPS   importance sampling: sum of w r over sum of w, w = policy / behaviour (Swaminathan and
            Joachims 2015); without the second sum draws without a time count as taking none
    DR      doubly robust (Dudik, Langford and Li 2011): DM corrected by the weighted residuals

Every estimate comes with the effective sample size (sum w)^2 / sum w^2. Where a policy wants what
the behaviour never did, or so few rows that the weights of a handful decide, there is no number.
Where earlier rows changed the behaviour, rows are not independent, and there is no interval.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats

from dynamiccl.evaluate.ope.logs import Float64Array, Log

#: Rows that have to count for an interval, in effect.
MIN_EFFECTIVE: Final = 50.0
#: Share of a policy's probability that may lie on what the behaviour never did.
MAX_UNCOVERED: Final = 0.001
NO_OVERLAP: Final = "no overlap"
NO_INTERVAL: Final = "no interval"
#: Weight, in rows, of a neighbour's mean where a cell has few of its own.
_PRIOR_ROWS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval, or why there is none."""

    estimator: str
    value: float | None
    low: float | None
    high: float | None
    effective: float
    note: str


def weights_of(log: Log, policy: Float64Array) -> Float64Array:
    """(n,) importance weights of a policy (T, A)."""
    return policy[log.task, log.action] / log.propensity


def direct(log: Log, policy: Float64Array, model: Float64Array) -> Estimate:
    """The mean of a reward model (T, A) under the policy; the model's error is not included."""
    value = float((policy * model).sum(axis=1)[log.task].mean())
    return Estimate("DM", value, None, None, float(len(log)), NO_INTERVAL)


def snips(log: Log, policy: Float64Array, behaviour: Float64Array, confidence: float) -> Estimate:
    """Self-normalised importance sampling, with an interval by the delta method.

    `behaviour` (T, A) are the logging probabilities.
    """
    weights = weights_of(log, policy)

    def terms() -> tuple[float, Float64Array]:
        value = float((weights * log.reward).sum() / weights.sum())
        return value, weights * (log.reward - value) / weights.mean()

    return _weighted("SNIPS", log, policy, behaviour, confidence, terms)


def doubly_robust(
    log: Log, policy: Float64Array, behaviour: Float64Array, confidence: float
) -> Estimate:
    """Doubly robust: direct method plus weighted residuals, with cross-fitted models."""
    expected, predicted = _cross_fitted(log, policy)
    each = expected + weights_of(log, policy) * (log.reward - predicted)

    def terms() -> tuple[float, Float64Array]:
        return float(each.mean()), each - each.mean()

    return _weighted("DR", log, policy, behaviour, confidence, terms)


def every_estimate(
    log: Log, policies: Sequence[Float64Array], behaviour: Float64Array, confidence: float
) -> list[dict[str, Estimate]]:
    """Estimates of each policy, by estimator name, with a shared reward model."""
    model = tabular_model(log, behaviour.shape)
    return [
        {
            each.estimator: each
            for each in (
                direct(log, policy, model),
                snips(log, policy, behaviour, confidence),
                doubly_robust(log, policy, behaviour, confidence),
            )
        }
        for policy in policies
    ]


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


def _cross_fitted(log: Log, policy: Float64Array) -> tuple[Float64Array, Float64Array]:
    """(n,) predicted rewards of the policy, and of the logged action, for unseen rows."""
    expected, predicted = np.empty(len(log)), np.empty(len(log))
    is_even = np.arange(len(log)) % 2 == 0
    for part in (is_even, ~is_even):
        model = tabular_model(log.rows(~part), policy.shape)
        inside = log.rows(part)
        expected[part] = (policy * model).sum(axis=1)[inside.task]
        predicted[part] = model[inside.task, inside.action]
    return expected, predicted


def _weighted(
    name: str,
    log: Log,
    policy: Float64Array,
    behaviour: Float64Array,
    confidence: float,
    terms: Callable[[], tuple[float, Float64Array]],
) -> Estimate:
    weights = weights_of(log, policy)
    total = float(weights.sum())
    effective = total**2 / float((weights**2).sum()) if total > 0 else 0.0
    uncovered = float(np.where(behaviour > 0, 0.0, policy).sum(axis=1)[log.task].mean())
    if uncovered > MAX_UNCOVERED or effective < MIN_EFFECTIVE:
        return Estimate(name, None, None, None, effective, NO_OVERLAP)
    value, spread = terms()
    if log.adaptive:
        return Estimate(name, value, None, None, effective, NO_INTERVAL)
    error = float(spread.std(ddof=1) / np.sqrt(len(log)))
    reach = float(stats.norm.ppf(0.5 + confidence / 2)) * error
    return Estimate(name, value, value - reach, value + reach, effective, "")
