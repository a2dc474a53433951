"""From a recipe to a d3rlpy algorithm, and from transitions to its batches."""

from typing import Any, cast

import d3rlpy
import numpy as np
import torch
from d3rlpy.dataset import TransitionMiniBatch
from d3rlpy.optimizers import AdamFactory
from d3rlpy.optimizers.lr_schedulers import CosineAnnealingLRFactory

from dynamiccl.datasets.episodes import Transitions
from dynamiccl.errors import UnknownName
from dynamiccl.train.networks import (
    LogTimeDuelingFactory,
    LogTimeDuelingQFunction,
    ObservationEncoderFactory,
)
from dynamiccl.train.recipes import Recipe


def make_algorithm(recipe: Recipe, transitions: Transitions) -> Any:
    """The d3rlpy algorithm of a recipe, its networks built and its input scaling set.

    Raises UnknownName when the recipe names an algorithm that is not here.
    """
    if recipe.algorithm != "DoubleDQN":
        raise UnknownName("algorithm", recipe.algorithm, ["DoubleDQN"])
    config = d3rlpy.algos.DoubleDQNConfig(
        batch_size=recipe.batch_size,
        gamma=recipe.gamma,
        learning_rate=recipe.learning_rate,
        n_critics=recipe.num_members,
        target_update_interval=recipe.target_update_interval,
        optim_factory=AdamFactory(
            lr_scheduler_factory=CosineAnnealingLRFactory(T_max=recipe.steps)
        ),
        encoder_factory=ObservationEncoderFactory(list(recipe.hidden_sizes)),
        q_func_factory=LogTimeDuelingFactory(),
    )
    algorithm = config.create(device="cpu:0")
    shapes = [
        transitions.window.shape[1:],
        transitions.context.shape[1:],
        transitions.mask.shape[1:],
    ]
    algorithm.create_impl(shapes, transitions.mask.shape[1])
    _set_scaling(algorithm, transitions)
    return algorithm


def q_functions(algorithm: Any) -> list[LogTimeDuelingQFunction]:
    """The online Q functions of a built algorithm, one a member of the ensemble."""
    return [cast(LogTimeDuelingQFunction, q_func) for q_func in algorithm.impl.q_function]


def _set_scaling(algorithm: Any, transitions: Transitions) -> None:
    mean = torch.from_numpy(transitions.context.mean(axis=0))
    spread = transitions.context.std(axis=0)
    # A feature that never varies says nothing, and must not explode where it does at last.
    scale = torch.from_numpy(np.where(spread > 1e-6, spread, 1.0).astype(np.float32))
    for ensemble in (algorithm.impl.q_function, algorithm.impl.modules.targ_q_funcs):
        for q_func in ensemble:
            q_func.encoder.set_scaling(mean, scale)


class BatchSampler:
    """Draws batches of one-step transitions from the columns.

    The next observation of a terminal step is all zero, as in d3rlpy's own replay buffer.
    """

    def __init__(
        self, transitions: Transitions, batch_size: int, *, balance: float, seed: int
    ) -> None:
        """Weigh rows by their group's size to the power of -`balance`."""
        self._transitions = transitions
        self._batch_size = batch_size
        self._random = np.random.default_rng(seed)
        weights = (np.bincount(transitions.group)[transitions.group]).astype(float) ** -balance
        self._cumulative = np.cumsum(weights) / weights.sum()

    def sample(self) -> TransitionMiniBatch:
        """One batch."""
        columns = self._transitions
        drawn = np.searchsorted(self._cumulative, self._random.random(self._batch_size))
        rows = np.minimum(drawn, len(columns) - 1)
        observation = [columns.window[rows], columns.context[rows], columns.mask[rows]]
        action = columns.action[rows, None].astype(np.float32)
        ones = np.ones((self._batch_size, 1), dtype=np.float32)
        return TransitionMiniBatch(
            observations=observation,
            actions=action,
            rewards=columns.reward[rows, None],
            next_observations=[np.zeros_like(part) for part in observation],
            next_actions=np.zeros_like(action),
            terminals=ones,
            intervals=ones,
            transitions=[],
        )
