"""Fitted Q evaluation: a policy's discounted value from logs of another policy.

d3rlpy's DiscreteFQE (Le et al. 2019, "Batch Policy Learning under Constraints") over our encoder,
on one-step targets: with more of them it would follow the behaviour for the steps between. Its head
is plain and its loss is of the reward itself, not of its logarithm; it is d3rlpy's Huber loss, so
that rare long times count for less than in a mean. The policy is any exported one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import d3rlpy
import numpy as np
import torch
from d3rlpy.models import MeanQFunctionFactory
from d3rlpy.ope import DiscreteFQE, FQEConfig

from dynamiccl.datasets.features import WINDOW_LENGTH, Observations
from dynamiccl.datasets.steps import Steps
from dynamiccl.train.algorithms import set_scaling
from dynamiccl.train.encoders import ObservationEncoderFactory
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.replay import Mixed, Replay

_BATCH: Final = 256
_LEARNING_RATE: Final = 1e-3
_BEGINNING: Final = 2 * WINDOW_LENGTH
#: A hundred updates in all: what a value lacks of its horizon is then gamma^100.
_TARGET_UPDATES: Final = 100


def fitted_value(  # noqa: PLR0913 - all of an estimate
    policy: TorchPolicy,
    steps: Steps,
    *,
    gamma: float,
    seed: int,
    gradient_steps: int = 5_000,
    window_encoder: str = "mlp",
    hidden_sizes: Sequence[int] = (128, 128),
) -> float:
    """Mean discounted reward of the policy from the first step of every episode on.

    At a `gamma` of 0 it is a regression of the reward. No interval: the error of the fit is not in
    sight. Raises ValueError for a `gamma` outside 0 <= g < 1.
    """
    if not 0.0 <= gamma < 1.0:
        raise ValueError(f"gamma {gamma} is not from 0 to below 1")
    torch.manual_seed(seed)
    d3rlpy.seed(seed)
    config = FQEConfig(
        learning_rate=_LEARNING_RATE,
        encoder_factory=ObservationEncoderFactory(list(hidden_sizes), window_encoder),
        q_func_factory=MeanQFunctionFactory(),
        batch_size=_BATCH,
        gamma=gamma,
        target_update_interval=max(1, gradient_steps // _TARGET_UPDATES),
    )
    fqe: Any = DiscreteFQE(algo=_Fixed(policy), config=config, device="cpu:0")
    fqe.create_impl(steps.shapes, steps.num_actions)
    modules = fqe.impl.modules
    set_scaling([*modules.q_funcs, *modules.targ_q_funcs], [steps])
    random = np.random.default_rng(seed)
    replay = Mixed(
        [
            Replay(part, _BATCH // 2, seed=random, gamma=gamma)
            for part in (steps, _beginnings(steps))
        ]
    )
    for _ in range(gradient_steps):
        fqe.update(replay.sample())
    first = steps.starts[:-1]
    found, mask, _ = steps.observe(first, np.arange(len(first)))
    action = policy.act(found, mask > 0.5)
    value = fqe.predict_value([found.window, found.context, mask], action[:, None])
    return float(np.mean(value))


def _beginnings(steps: Steps) -> Steps:
    """The first steps of every episode, for which the value is asked."""
    ends = np.minimum(steps.starts[:-1] + _BEGINNING, steps.starts[1:])
    lengths = ends - steps.starts[:-1]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.arange(starts[-1]) + np.repeat(steps.starts[:-1] - starts[:-1], lengths)
    return replace(
        steps,
        starts=starts,
        terminated=steps.terminated & (ends == steps.starts[1:]),
        calls=steps.calls.take(rows),
        action=steps.action[rows],
        reward=steps.reward[rows],
    )


class _Fixed:
    """A policy with the algorithm interface that DiscreteFQE needs."""

    def __init__(self, policy: TorchPolicy) -> None:
        self._policy = policy
        self.impl = self

    def predict_best_action(self, x: Sequence[torch.Tensor]) -> torch.Tensor:
        window, context, mask = (part.numpy() for part in x)
        return torch.from_numpy(self._policy.act(Observations(window, context), mask > 0.5))
