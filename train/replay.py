"""Replay buffer: batches of n-step transitions for d3rlpy, straight from columns.

d3rlpy's own replay buffer takes every transition through Python, which is most of a training step
for a small network; here a batch is a handful of array operations, whatever the number of steps.
What comes out is what its `MultiStepTransitionPicker` (2.8.1) gives, row by row.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from d3rlpy.dataset import TransitionMiniBatch

from dynamiccl.datasets.features import NUM_CELLS
from dynamiccl.datasets.history import Float32Array
from dynamiccl.datasets.steps import Int64Array, Steps
from dynamiccl.train.feature_rows import FeatureRows

#: Steps whose features are kept in memory, 84 bytes each; of more they are made for each batch.
MAX_CACHED: Final = 16_000_000


class Replay:
    """Draws batches of n-step transitions from steps.

    The next observation of a step that ends its episode is all zero, mask included.
    """

    def __init__(
        self,
        steps: Steps,
        batch_size: int,
        *,
        seed: int | np.random.Generator,
        num_steps: int = 1,
        gamma: float = 0.0,
        balance: float = 0.0,
    ) -> None:
        """Weigh steps by the size of their task's group to the power of -`balance`.

        Replays that share one generator as their `seed` draw in turns from it.
        """
        self.steps = steps
        is_cached = steps.windows is None and len(steps) <= MAX_CACHED
        self._observe = FeatureRows(steps).observe if is_cached else steps.observe
        self.random = np.random.default_rng(seed)
        self._batch_size = batch_size
        self._num_steps = num_steps
        self._gamma = gamma
        group = steps.tasks.group[steps.task]
        choosable = steps.choosable.astype(np.float64)
        # Of an episode's steps, which are all of one task.
        self._weight = np.bincount(group, weights=choosable).clip(1.0)[group] ** -balance
        self._share = choosable * self._weight
        self._cumulative = np.cumsum(self._share)
        # Then no sum of weights need be searched.
        self._is_uniform = bool(steps.terminated.all()) and np.ptp(self._weight) == 0.0
        # The last episode that can be drawn, should rounding lead past it.
        self._last = int(np.searchsorted(self._cumulative, self._cumulative[-1]))
        if not self._cumulative[-1] > 0:
            raise ValueError("no step leads anywhere: every episode is cut off after its first")

    def sample(self) -> TransitionMiniBatch:
        """One batch, sorted by step: neighbours are adjacent in memory."""
        drawn = self.random.random(self._batch_size)
        drawn.sort()
        if self._is_uniform:
            rows = (drawn * len(self.steps)).astype(np.int64)
            return self.batch(rows, self.steps.episode_of(rows))
        drawn *= self._cumulative[-1]
        episode = np.minimum(np.searchsorted(self._cumulative, drawn, side="right"), self._last)
        into = drawn - (self._cumulative[episode] - self._share[episode])
        offset = np.minimum(
            (into / self._weight[episode]).astype(np.int64), self.steps.choosable[episode] - 1
        )
        return self.batch(self.steps.starts[episode] + np.maximum(offset, 0), episode)

    def batch(self, rows: Int64Array, episode: Int64Array) -> TransitionMiniBatch:
        """The transitions that begin with the steps `rows` of the episodes `episode`."""
        steps = self.steps
        following, ends = steps.advance(rows, episode, self._num_steps)
        rewards = steps.discounted(rows, following, self._gamma)
        parts, next_parts, next_actions = self._observations(rows, following, episode, ends)
        return TransitionMiniBatch(
            observations=parts,
            actions=_column(steps.action[rows]),
            rewards=_column(rewards),
            next_observations=next_parts,
            next_actions=next_actions,
            terminals=_column(ends),
            intervals=_column(following - rows),
            transitions=[],
        )

    def _observations(
        self,
        rows: Int64Array,
        following: Int64Array,
        episode: Int64Array,
        ends: npt.NDArray[np.bool_],
    ) -> tuple[list[Float32Array], list[Float32Array], Float32Array]:
        """Observations, next observations, and actions taken."""
        if ends.all():
            found, mask, _ = self._observe(rows, episode)
            parts = [found.window, found.context, mask]
            zeros = [np.zeros_like(part) for part in parts]
            return parts, zeros, np.zeros((len(rows), 1), dtype=np.float32)
        # Of an episode that ends, its last step stands in until it is blanked. Both at once: most
        # of the time goes to calls of NumPy, not to what they copy.
        following = following - ends
        both = np.concatenate([rows, following]), np.concatenate([episode, episode])
        found, mask, _ = self._observe(*both)
        parts = [found.window, found.context, mask]
        actions = _column(self.steps.action[following])
        next_parts = [part[len(rows) :] for part in parts]
        blank = np.flatnonzero(ends)
        for part in (*next_parts, actions):
            part[blank] = 0.0
        return [part[: len(rows)] for part in parts], next_parts, actions


class Mixed:
    """Batches composed of equal parts from each replay, such as sweeps and calls."""

    def __init__(self, replays: Sequence[Replay]) -> None:
        """Mix replays that share a generator; raises ValueError when they do not."""
        self.random = replays[0].random
        if any(replay.random is not self.random for replay in replays):
            raise ValueError("mixed replays must share one generator")
        self._replays = replays

    def sample(self) -> TransitionMiniBatch:
        """One batch: the parts of the replays, concatenated."""
        parts = [replay.sample() for replay in self._replays]
        return TransitionMiniBatch(
            observations=_joined([part.observations for part in parts]),
            actions=np.concatenate([part.actions for part in parts]),
            rewards=np.concatenate([part.rewards for part in parts]),
            next_observations=_joined([part.next_observations for part in parts]),
            next_actions=np.concatenate([part.next_actions for part in parts]),
            terminals=np.concatenate([part.terminals for part in parts]),
            intervals=np.concatenate([part.intervals for part in parts]),
            transitions=[],
        )


class CostDropout:
    """Batches in which NCCL's costs are hidden from some rows and their next observations."""

    def __init__(self, replay: "Replay | Mixed", cost_start: int, share: float) -> None:
        """Hide the costs, which begin in column `cost_start` of contexts, from a share of rows."""
        self.random = replay.random
        self._replay, self._share = replay, share
        self._costs = slice(cost_start, cost_start + NUM_CELLS)

    def sample(self) -> TransitionMiniBatch:
        """One batch."""
        batch = self._replay.sample()
        hidden = np.flatnonzero(self.random.random(len(batch.actions)) < self._share)
        for _, context, _ in (batch.observations, batch.next_observations):
            context[hidden, self._costs] = 0.0
        return batch


def _joined(observations: Sequence[Any]) -> list[Float32Array]:
    return [np.concatenate(parts) for parts in zip(*observations, strict=True)]


def _column(values: npt.ArrayLike) -> Float32Array:
    return np.array(values, dtype=np.float32)[:, None]
