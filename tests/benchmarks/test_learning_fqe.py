"""Fitted Q evaluation where the value is known."""

from pathlib import Path

import numpy as np
import pytest
from learning_fqe import fitted_value

from dynamiccl.datasets.features import FEATURES, STATIC_FEATURES
from dynamiccl.datasets.history import CallColumns
from dynamiccl.datasets.steps import Steps, Tasks
from dynamiccl.train.policy import TorchPolicy
from tests.conftest import Trained

GAMMA = 0.5
#: Reward of each action, from NCCL's default on.
REWARDS = np.array([-1.0, -2.0, -0.5])


def random_log(policy: TorchPolicy) -> Steps:
    """Calls of one task whose actions are drawn alike, each with a reward of its own."""
    random = np.random.default_rng(0)
    episodes, length = 40, 50
    size = episodes * length
    action = random.integers(0, len(REWARDS), size)
    context = np.zeros((1, len(FEATURES) + len(policy.manifest.launch_profiles)), np.float32)
    context[0, : len(STATIC_FEATURES)] = random.random(len(STATIC_FEATURES))
    mask = np.zeros((1, len(policy.manifest.catalogue)), dtype=np.float32)
    mask[0, : len(REWARDS)] = 1.0
    return Steps(
        tasks=Tasks(context, mask, np.zeros(1, dtype=np.int64)),
        starts=np.arange(episodes + 1) * length,
        task=np.zeros(episodes, dtype=np.int64),
        terminated=np.zeros(episodes, dtype=np.bool_),
        calls=CallColumns(
            size_bytes=np.full(size, 1 << 20),
            time_us=(-100.0 * REWARDS[action]).astype(np.float32),
            algorithm=action.astype(np.int8),
            protocol=np.zeros(size, dtype=np.int8),
            num_channels=np.full(size, 8, dtype=np.int16),
            interference=np.zeros(size, dtype=np.float32),
            skew_us=np.zeros(size, dtype=np.float32),
        ),
        action=action,
        reward=REWARDS[action].astype(np.float32),
    )


class Always(TorchPolicy):
    """Takes one action, whatever the network says."""

    def __init__(self, policy: TorchPolicy, action: int) -> None:
        super().__init__(policy._module, policy.manifest)
        self._action = action

    def act(self, observations, mask):  # type: ignore[no-untyped-def]
        return super().act(observations, mask) * 0 + self._action


@pytest.mark.parametrize(
    "action", [pytest.param(0, marks=pytest.mark.soak), pytest.param(1, marks=pytest.mark.soak), 2]
)
def test_the_value_of_always_the_same_is_its_reward_for_ever(action: int, trained: Trained) -> None:
    policy = TorchPolicy.load(Path(trained.policy))
    steps = random_log(policy)
    value = fitted_value(
        Always(policy, action),
        steps,
        gamma=GAMMA,
        seed=0,
        gradient_steps=400,
        hidden_sizes=(32,),
    )
    assert value == pytest.approx(REWARDS[action] / (1.0 - GAMMA), rel=0.05)


def test_without_a_future_the_value_is_the_reward(trained: Trained) -> None:
    policy = TorchPolicy.load(Path(trained.policy))
    always = Always(policy, 2)
    value = fitted_value(
        always, random_log(policy), gamma=0.0, seed=0, gradient_steps=400, hidden_sizes=(32,)
    )
    assert value == pytest.approx(REWARDS[2], rel=0.05)


def test_a_future_without_end_has_no_value(trained: Trained) -> None:
    policy = TorchPolicy.load(Path(trained.policy))
    with pytest.raises(ValueError, match="gamma 1"):
        fitted_value(policy, random_log(policy), gamma=1.0, seed=0)
