"""Columns of steps: what a step sees, and what it earns."""

from dataclasses import replace

import numpy as np
import pytest

from tests.steps import make_steps


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
