"""Adaptive logs: the behaviour follows what it has seen, and estimates hold all the same."""

from dataclasses import replace

import numpy as np
import pytest

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.ope.adaptive import MIN_ROWS, adaptive_value
from dynamiccl.evaluate.ope.estimators import NO_INTERVAL, NO_OVERLAP, doubly_robust, snips
from dynamiccl.evaluate.ope.logs import Log, deterministic, mixture, true_value
from tests.evaluate.grids import grid, noisy

TASKS, ACTIONS, ROWS = 5, 5, 5200
EPSILON = 0.25


def make_world() -> TaskGrid:
    random = np.random.default_rng(3)
    times = 100.0 * np.exp(random.uniform(-0.4, 0.4, (TASKS, ACTIONS)))
    times[:, 0] = 100.0
    exact = grid([1 << (10 + t) for t in range(TASKS)], times.tolist())
    return noisy(exact, 0.1, random)


WORLD = make_world()
DEFAULT = deterministic(np.zeros(TASKS, dtype=np.int64), ACTIONS)
ORACLE = deterministic(np.nanargmin(WORLD.times_us, axis=1), ACTIONS)
WORST = deterministic(np.nanargmax(WORLD.times_us, axis=1), ACTIONS)
UNIFORM = mixture(DEFAULT, WORLD.mask, 1.0)


def greedy_log(seed: int, rows: int = ROWS) -> Log:
    """Of every task the action that was best so far, and now and then any."""
    random = np.random.default_rng(seed)
    sums, counts = np.zeros((2, TASKS, ACTIONS))
    best = np.zeros(TASKS, dtype=np.int64)
    task = random.integers(0, TASKS, rows)
    drawn, picked = random.random((2, rows))
    action, reward = np.empty(rows, dtype=np.int64), np.empty(rows)
    probabilities = np.full((rows, ACTIONS), EPSILON / ACTIONS)
    for row, here in enumerate(task):
        probabilities[row, best[here]] += 1.0 - EPSILON
        taken = int((probabilities[row].cumsum() <= drawn[row]).sum())
        times = WORLD.samples[int(here), taken]
        value = -times[int(picked[row] * len(times))] / WORLD.default_us[here]
        action[row], reward[row] = taken, value
        sums[here, taken] += value
        counts[here, taken] += 1
        means = np.where(counts[here] > 0, sums[here] / np.maximum(counts[here], 1), -np.inf)
        best[here] = means.argmax()
    propensity = probabilities[np.arange(rows), action]
    return Log(task, action, reward, propensity, adaptive=True, probabilities=probabilities)


def test_intervals_hold_the_truth_nine_times_in_ten() -> None:
    policies = {
        "default": DEFAULT,
        "oracle": ORACLE,
        "half random": mixture(ORACLE, WORLD.mask, 0.5),
    }
    held = dict.fromkeys(policies, 0)
    widths: dict[str, list[float]] = {name: [] for name in policies}
    for seed in range(200):
        log = greedy_log(seed)
        for name, policy in policies.items():
            found = doubly_robust(log, policy, UNIFORM, 0.9)
            assert found.low is not None
            assert found.high is not None
            held[name] += found.low <= true_value(WORLD, policy) <= found.high
            widths[name].append(found.high - found.low)
    for name, count in held.items():
        assert 0.85 <= count / 200 <= 0.95, name
    # What the behaviour settled on is known best.
    assert np.mean(widths["oracle"]) < np.mean(widths["default"])


def test_weights_lower_the_spread_where_the_behaviour_moved_towards_the_policy() -> None:
    weighted, plain = [], []
    for seed in range(30):
        log = greedy_log(seed)
        found = adaptive_value(log, ORACLE)
        assert found is not None
        weighted.append(found[0])
        alike = np.ones((len(log), ACTIONS))  # any constant: all rows weigh alike
        flat = adaptive_value(replace(log, probabilities=alike), ORACLE)
        assert flat is not None
        plain.append(flat[0])
    assert np.std(weighted) < np.std(plain)


def test_without_all_probabilities_or_rows_enough_there_is_no_interval() -> None:
    log = greedy_log(0)
    bare = doubly_robust(replace(log, probabilities=None), ORACLE, UNIFORM, 0.9)
    short = doubly_robust(greedy_log(0, TASKS * MIN_ROWS // 2), ORACLE, UNIFORM, 0.9)
    for found in (bare, short, snips(log, ORACLE, UNIFORM, 0.9)):
        assert found.value is not None
        assert (found.low, found.note) == (None, NO_INTERVAL)
    with pytest.raises(ValueError, match="probabilities of all"):
        adaptive_value(replace(log, probabilities=None), ORACLE)


def test_what_the_behaviour_could_not_do_is_no_overlap() -> None:
    narrow = UNIFORM * (np.arange(ACTIONS) < 2)
    found = doubly_robust(greedy_log(0), WORST, narrow / narrow.sum(axis=1, keepdims=True), 0.9)
    assert (found.value, found.note) == (None, NO_OVERLAP)
