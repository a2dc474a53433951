"""Batches for d3rlpy, straight from columns.

d3rlpy's own replay buffer takes every transition through Python, which is most of a training step
for a small network; here a batch is a handful of array operations, whatever the number of steps.
What comes out is what its `MultiStepTransitionPicker` (2.8.1) gives, row by row.
"""

import numpy as np
from d3rlpy.dataset import TransitionMiniBatch

from dynamiccl.datasets.features import Float32Array
from dynamiccl.datasets.steps import Int64Array, Steps


class Replay:
    """Draws batches of n-step transitions from steps.

    The next observation of a step that ends its episode is all zero, mask included.
    """

    def __init__(
        self,
        steps: Steps,
        batch_size: int,
        *,
        seed: int,
        num_steps: int = 1,
        gamma: float = 0.0,
        balance: float = 0.0,
    ) -> None:
        """Weigh steps by the size of their task's group to the power of -`balance`."""
        self.steps = steps
        self.random = np.random.default_rng(seed)
        self._batch_size = batch_size
        self._num_steps = num_steps
        self._gamma = gamma
        group = steps.tasks.group[steps.task]
        choosable = steps.choosable.astype(np.float64)
        # Of an episode's steps, which are all of one task.
        self._weight = np.bincount(group, weights=choosable).clip(1.0)[group] ** -balance
        self._cumulative = np.cumsum(choosable * self._weight)
        if not self._cumulative[-1] > 0:
            raise ValueError("no step leads anywhere: every episode is cut off after its first")

    def sample(self) -> TransitionMiniBatch:
        """One batch, in the order of the steps: neighbours lie together in memory."""
        drawn = np.sort(self.random.random(self._batch_size)) * self._cumulative[-1]
        last = np.searchsorted(self._cumulative, self._cumulative[-1])  # that can be chosen
        episode = np.minimum(np.searchsorted(self._cumulative, drawn, side="right"), last)
        before = np.where(episode > 0, self._cumulative[episode - 1], 0.0)
        offset = ((drawn - before) / self._weight[episode]).astype(np.int64)
        offset = np.clip(offset, 0, self.steps.choosable[episode] - 1)
        return self.batch(self.steps.starts[episode] + offset, episode)

    def batch(self, rows: Int64Array, episode: Int64Array) -> TransitionMiniBatch:
        """The transitions that begin with the steps `rows` of the episodes `episode`."""
        steps = self.steps
        following, ends = steps.advance(rows, episode, self._num_steps)
        observations, mask, _ = steps.observe(rows, episode)
        goes_on = np.flatnonzero(~ends)
        next_observations, next_actions = self._next(
            [observations.window, observations.context, mask], following, episode, goes_on
        )
        return TransitionMiniBatch(
            observations=[observations.window, observations.context, mask],
            actions=_column(steps.action[rows]),
            rewards=_column(steps.discounted(rows, following, self._gamma)),
            next_observations=next_observations,
            next_actions=next_actions,
            terminals=_column(ends),
            intervals=_column(following - rows),
            transitions=[],
        )

    def _next(
        self,
        observation: list[Float32Array],
        following: Int64Array,
        episode: Int64Array,
        goes_on: Int64Array,
    ) -> tuple[list[Float32Array], Float32Array]:
        parts = [np.zeros_like(part) for part in observation]
        actions = np.zeros((len(following), 1), dtype=np.float32)
        if len(goes_on):
            rows = following[goes_on]
            found, mask, _ = self.steps.observe(rows, episode[goes_on])
            for part, values in zip(parts, (found.window, found.context, mask), strict=True):
                part[goes_on] = values
            actions[goes_on, 0] = self.steps.action[rows]
        return parts, actions


def _column(values: object) -> Float32Array:
    return np.asarray(values, dtype=np.float32)[:, None]
