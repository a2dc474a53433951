"""Replay buffer: batches of n-step transitions for d3rlpy, straight from columns.

d3rlpy's own replay buffer takes every transition through Python, which is most of a training step
for a small network; here a batch is a handful of array operations, whatever the number of steps.
What comes out is what its `MultiStepTransitionPicker` (2.8.1) gives, row by row.

`Steps.observe` defines what a step sees. It takes logarithms of every call of every window, each
time; in `FeatureRows` each call has its row of window features, and a row of what the history is
when it is the last call: 152 bytes a step, where windows are the calls before a step.

N steps, B rows of a batch, K calls in the window.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from d3rlpy.dataset import TransitionMiniBatch

from dynamiccl.datasets.features import HISTORY_SLICE, NUM_CELLS, Observations, set_sizes
from dynamiccl.datasets.history import (
    HISTORY_COLUMNS,
    WINDOW_LENGTH,
    CallColumns,
    Float32Array,
    HistoryColumns,
    Past,
    feature_rows,
)
from dynamiccl.datasets.steps import Int64Array, Steps

#: Steps that are worked on at a time: they stay in the processor's cache.
_PART: Final = 1 << 14
_LOOK_BACK: Final = np.arange(-WINDOW_LENGTH, 0)


class FeatureRows:
    """Observes steps as `Steps.observe`, ten times as fast."""

    def __init__(self, steps: Steps, columns: HistoryColumns = HISTORY_COLUMNS) -> None:
        """Compute all rows; raises ValueError for steps with windows of their own."""
        if steps.windows is not None:
            raise ValueError("these steps have windows of their own")
        self._steps = steps
        self._columns = columns
        is_first = np.isin(np.arange(len(steps)), steps.starts)
        self._calls = np.empty((len(steps), len(columns.window_features)), dtype=np.float32)
        self._history = np.empty((len(steps), len(columns.history_features)), dtype=np.float32)
        for start in range(0, len(steps), _PART):
            self._fill(start, min(start + _PART, len(steps)), is_first)
        self._log2_size = np.log2(np.maximum(steps.calls.size_bytes, 1)).astype(np.float32)

    def observe(
        self, rows: Int64Array, episode: Int64Array
    ) -> tuple[Observations, Float32Array, Int64Array]:
        """As `Steps.observe`."""
        steps = self._steps
        num_calls = np.minimum(rows - steps.starts[episode], WINDOW_LENGTH)
        window = self._calls.take(rows[:, None] + _LOOK_BACK, axis=0, mode="clip")
        window[:, 0, self._columns.comparing] = 0.0  # nothing is before the window's first
        task = steps.task[episode]
        context = steps.tasks.context.take(task, axis=0)
        set_sizes(context, self._log2_size[rows])
        history = context[:, HISTORY_SLICE.start :][:, : self._history.shape[1]]
        history[:] = self._history.take(rows - 1, axis=0, mode="clip")
        short = np.flatnonzero(num_calls < WINDOW_LENGTH)
        padded = window[short]
        padded[num_calls[short, None] < -_LOOK_BACK] = 0.0
        window[short] = padded
        cold = short[num_calls[short] == 0]
        history[cold] = 0.0
        return Observations(window, context), steps.tasks.mask.take(task, axis=0), task

    def _fill(self, start: int, end: int, is_first: npt.NDArray[np.bool_]) -> None:
        """Compute the rows of steps `start` to `end`, given also the window before them."""
        before = max(0, start - WINDOW_LENGTH)
        past = _Steps(self._steps.calls.take(slice(before, end)), is_first[before:end])
        own = slice(start - before, None)
        shape = (end - before,)
        self._calls[start:end] = feature_rows(self._columns.window, past, shape)[own]
        self._history[start:end] = feature_rows(self._columns.history, past, shape)[own]


class _Steps(Past):
    """Past of N steps (N,), each the last of the window of K calls that ends with it."""

    def __init__(self, calls: CallColumns, is_first: npt.NDArray[np.bool_]) -> None:
        super().__init__(np, calls.as_float64(), np.True_)
        self._is_first = is_first

    def before(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = values.copy()
        np.copyto(found[1:], values[:-1], where=~self._is_first[1:])
        return found

    def last(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values

    def largest(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._over_window(values, np.maximum)

    def smallest(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._over_window(values, np.minimum)

    def _over_window(self, values: npt.NDArray[Any], better: np.ufunc) -> npt.NDArray[Any]:
        """Extreme of each value and the WINDOW_LENGTH - 1 before it in its episode."""
        best = values.copy()
        reaches = ~self._is_first  # whether the episode goes back as far
        for back in range(1, min(WINDOW_LENGTH, len(values))):
            goes = reaches[back:]
            best[back:] = np.where(goes, better(best[back:], values[:-back]), best[back:])
            reaches = np.concatenate([reaches[:1], reaches[1:] & reaches[:-1]])
        return best


#: Steps whose features are kept in memory, 152 bytes each; of more they are made for each batch.
MAX_CACHED: Final = 11_000_000


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
