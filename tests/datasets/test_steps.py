"""Columns of steps: what a step sees, and what it earns."""

from dataclasses import replace

import numpy as np
import pytest

from dynamiccl.datasets.features import CONTEXT_COLUMN, HISTORY_SLICE
from dynamiccl.datasets.history import WINDOW_LENGTH, history_features
from tests.steps import make_steps


@pytest.mark.parametrize("own_windows", [False, True])
def test_a_step_sees_the_calls_before_it(own_windows: bool) -> None:
    steps = make_steps(own_windows=own_windows)
    rows = np.arange(len(steps))
    episode = steps.episode_of(rows)
    observations, mask, task = steps.observe(rows, episode)
    for row in rows:
        start = int(steps.starts[episode[row]])
        seen = list(range(max(start, int(row) - WINDOW_LENGTH), int(row)))
        if steps.windows is not None:
            seen = [int(each) for each in steps.windows[row] if each >= 0]
        index = np.zeros((1, WINDOW_LENGTH), dtype=np.int64)
        index[0, WINDOW_LENGTH - len(seen) :] = seen
        valid = np.arange(WINDOW_LENGTH)[None] >= WINDOW_LENGTH - len(seen)
        (window,), (history,) = history_features(steps.calls.take(index), valid)
        np.testing.assert_array_equal(observations.window[row], window)
        found = observations.context[row, HISTORY_SLICE]
        np.testing.assert_array_equal(found, history)
        log2_size = observations.context[row, CONTEXT_COLUMN["log2_size"]]
        assert log2_size == np.float32(np.log2(steps.calls.size_bytes[row]))
    np.testing.assert_array_equal(mask, steps.mask[steps.task[episode]])
    np.testing.assert_array_equal(task, steps.task[episode])


def test_a_change_and_congestion_cost_what_is_asked() -> None:
    steps = make_steps(lengths=(4, 2))
    calls = replace(steps.calls, interference=np.array([-1.0, 0.5, 0.0, 2.0, 0.0, 0.5]))
    reward = np.full(6, -1.5, dtype=np.float32)
    steps = replace(steps, action=np.array([0, 0, 1, 1, 0, 1]), reward=reward, calls=calls)
    assert steps.charged(0.0, 0.0).reward is reward
    switched = steps.charged(0.2, 0.0).reward
    # The first step of an episode changes nothing.
    np.testing.assert_allclose(switched, [-1.5, -1.5, -1.7, -1.5, -1.5, -1.7], rtol=1e-6)
    congested = steps.charged(0.0, 0.1).reward
    np.testing.assert_allclose(congested, [-1.5, -1.55, -1.5, -1.7, -1.5, -1.55], rtol=1e-6)
    assert switched.dtype == congested.dtype == np.float32


@pytest.mark.parametrize("most", [1, 2, 8])
def test_a_held_action_is_rewarded_by_the_mean_of_its_calls(most: int) -> None:
    steps = make_steps(num_actions=2)
    held = steps.held(most)
    for row, found in enumerate(held.reward):
        end = int(steps.starts[steps.episode_of(np.array([row]))[0] + 1])
        rewards = []
        for later in range(row, min(end, row + most)):
            if steps.action[later] != steps.action[row]:
                break
            rewards.append(steps.reward[later])
        assert found == pytest.approx(np.mean(rewards), rel=1e-6)
    np.testing.assert_array_equal(held.action, steps.action)
