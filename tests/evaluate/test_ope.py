"""Off-policy estimates where the truth is known: logs drawn from a known stochastic policy."""

from dataclasses import replace

import numpy as np
import pytest
from learning_logs import draw_log, mixture, true_value
from scipy import stats

from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.evaluate.ope.estimators import (
    NO_INTERVAL,
    NO_OVERLAP,
    Estimate,
    direct,
    doubly_robust,
    every_estimate,
    snips,
    tabular_model,
    weights_of,
)
from dynamiccl.evaluate.ope.logs import Float64Array, Log, deterministic
from tests.evaluate.grids import grid, noisy

TASKS, ACTIONS, ROWS = 24, 8, 3000


def make_world(seed: int = 0, spread: float = 0.05) -> TaskGrid:
    """Times whose means are what the grid says: the truth of rewards is a mean, not a median."""
    random = np.random.default_rng(seed)
    times = 100.0 * np.exp(random.uniform(-0.4, 0.6, (TASKS, ACTIONS)))
    times[:, 0] = 100.0
    times[random.random((TASKS, ACTIONS)) < 0.15] = np.nan
    times[:, 0] = 100.0
    exact = grid([1 << (10 + t) for t in range(TASKS)], times.tolist())
    return noisy(exact, spread, random)


WORLD = make_world()
UNIFORM = mixture(np.zeros((TASKS, ACTIONS)), WORLD.mask, 1.0)
ORACLE = deterministic(np.nanargmin(WORLD.times_us, axis=1), ACTIONS)
DEFAULT = deterministic(np.zeros(TASKS, dtype=np.int64), ACTIONS)
BEHAVIOUR = mixture(DEFAULT, WORLD.mask, 0.7)
POLICIES = {
    "oracle": ORACLE,
    "default": DEFAULT,
    "half-random oracle": mixture(ORACLE, WORLD.mask, 0.5),
}


def estimates(seed: int, policy: Float64Array, rows: int = ROWS) -> dict[str, Estimate]:
    log = draw_log(WORLD, BEHAVIOUR, rows, np.random.default_rng(seed))
    (found,) = every_estimate(log, [policy], BEHAVIOUR, 0.9)
    return found


@pytest.fixture(scope="module")
def told() -> list[tuple[Log, list[dict[str, Estimate]]]]:
    """200 logs, each with the estimates of all policies."""
    logs = [draw_log(WORLD, BEHAVIOUR, ROWS, np.random.default_rng(seed)) for seed in range(200)]
    return [(log, every_estimate(log, [*POLICIES.values()], BEHAVIOUR, 0.9)) for log in logs]


@pytest.mark.parametrize("name", POLICIES)
def test_intervals_hold_the_truth_nine_times_in_ten(
    name: str, told: list[tuple[Log, list[dict[str, Estimate]]]]
) -> None:
    policy, index = POLICIES[name], list(POLICIES).index(name)
    truth = true_value(WORLD, policy)
    held = {"SNIPS": 0, "DR": 0}
    errors: dict[str, list[float]] = {"DM": [], "IPS": [], "SNIPS": [], "DR": []}
    for log, found in told:
        errors["IPS"].append(float((weights_of(log, policy) * log.reward).mean()) - truth)
        for estimator, each in found[index].items():
            assert each.value is not None
            errors[estimator].append(each.value - truth)
        for estimator in held:
            low, high = found[index][estimator].low, found[index][estimator].high
            assert low is not None
            assert high is not None
            held[estimator] += low <= truth <= high
    assert 0.85 <= held["SNIPS"] / 200 <= 0.95
    assert 0.85 <= held["DR"] / 200 <= 0.95
    for estimator in ("IPS", "DR"):  # without bias
        values = np.array(errors[estimator])
        assert abs(values.mean()) < 4 * values.std() / np.sqrt(200)
    assert np.std(errors["DR"]) < np.std(errors["IPS"])


def test_estimates_order_policies_as_the_truth_does() -> None:
    random = np.random.default_rng(1)
    policies = []
    for index in range(45):
        rough = deterministic(
            np.array([random.choice(np.flatnonzero(row)) for row in WORLD.mask]), ACTIONS
        )
        policies.append(mixture(0.5 * ORACLE + 0.5 * rough, WORLD.mask, index / 45))
    truths = [true_value(WORLD, policy) for policy in policies]
    found = [estimates(0, policy) for policy in policies]
    for estimator in ("DM", "SNIPS", "DR"):
        values = [each[estimator].value for each in found]
        assert stats.spearmanr(truths, values).statistic >= 0.9


def test_what_the_behaviour_never_did_has_no_estimate() -> None:
    random = np.random.default_rng(0)
    narrow = mixture(DEFAULT, WORLD.mask & (np.arange(ACTIONS) < 3), 0.5)
    log = draw_log(WORLD, narrow, ROWS, random)
    for found in (
        snips(log, ORACLE, narrow, 0.9),
        doubly_robust(log, ORACLE, narrow, 0.9),
    ):
        assert (found.value, found.low, found.note) == (None, None, NO_OVERLAP)


def test_few_rows_that_count_are_no_overlap() -> None:
    rare = mixture(DEFAULT, WORLD.mask, 0.02)
    log = draw_log(WORLD, rare, 500, np.random.default_rng(0))
    found = snips(log, ORACLE, rare, 0.9)
    assert found.effective < 50
    assert found.note == NO_OVERLAP


def test_adaptive_logs_get_no_interval() -> None:
    log = replace(draw_log(WORLD, BEHAVIOUR, ROWS, np.random.default_rng(0)), adaptive=True)
    for found in (snips(log, ORACLE, BEHAVIOUR, 0.9), doubly_robust(log, ORACLE, BEHAVIOUR, 0.9)):
        assert found.value is not None
        assert (found.low, found.note) == (None, NO_INTERVAL)


def test_the_direct_method_has_no_interval() -> None:
    log = draw_log(WORLD, BEHAVIOUR, ROWS, np.random.default_rng(0))
    found = direct(log, ORACLE, tabular_model(log, ORACLE.shape))
    assert found.value == pytest.approx(true_value(WORLD, ORACLE), abs=0.05)
    assert found.note == NO_INTERVAL


def test_a_behaviour_that_takes_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="not measured"):
        draw_log(WORLD, np.full((TASKS, ACTIONS), 1 / ACTIONS), 10, np.random.default_rng(0))
