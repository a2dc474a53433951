"""Training steps stored as columns, from which batches are sampled.

A step is one collective call: the observation before it, the action, and the result. Only the
calls' attributes are stored, 30 bytes a step. Observations are computed when a batch is drawn.

N steps, E episodes, T tasks, B rows of a batch, K calls in the window, F features of the context,
A actions.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import (
    HISTORY_SLICE,
    WINDOW_LENGTH,
    Float32Array,
    Observations,
    set_sizes,
)
from dynamiccl.datasets.history import CallColumns, history_features
from dynamiccl.datasets.history_columns import WINDOW_FEATURES

Int64Array = npt.NDArray[np.int64]

_LOOK_BACK: Final = np.arange(-WINDOW_LENGTH, 0)


@dataclass(frozen=True, slots=True)
class Tasks:
    """Task attributes, stored once for all steps of a task."""

    context: Float32Array  # (T, F), cold
    mask: Float32Array  # (T, A), 1 = allowed
    group: Int64Array  # (T,), number of the task's (system, collective)


@dataclass(frozen=True)
class Steps:
    """N steps; the steps of an episode are adjacent."""

    tasks: Tasks
    starts: Int64Array  # (E + 1,), the first step of each episode, and N
    task: Int64Array  # (E,), the episode's task
    terminated: npt.NDArray[np.bool_]  # (E,), else cut off: no next state
    calls: CallColumns  # (N,), the calls, with their times
    action: npt.NDArray[np.integer]  # (N,)
    reward: Float32Array  # (N,)
    #: (N, K) the steps whose calls a step sees, right-aligned, -1 = padding. None: the K steps
    #: before it in its episode.
    windows: Int64Array | None = None

    def __post_init__(self) -> None:
        if self.starts[0] != 0 or self.starts[-1] != len(self.action):
            raise ValueError("the episodes do not cover the steps")
        if (np.diff(self.starts) < 1).any():
            raise ValueError("an episode has no step")

    def __len__(self) -> int:
        return len(self.action)

    @property
    def num_actions(self) -> int:
        """A."""
        return int(self.tasks.mask.shape[1])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one observation's window, context and mask."""
        window = (WINDOW_LENGTH, len(WINDOW_FEATURES))
        return [window, self.tasks.context.shape[1:], self.tasks.mask.shape[1:]]

    @cached_property
    def choosable(self) -> Int64Array:
        """(E,) steps of each episode with a next state: all, but the last of a cut-off one."""
        return np.diff(self.starts) - ~self.terminated

    def episode_of(self, rows: Int64Array) -> Int64Array:
        """(B,) episode of each step; fastest for sorted rows."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def observe(
        self, rows: Int64Array, episode: Int64Array
    ) -> tuple[Observations, Float32Array, Int64Array]:
        """Observations before the steps `rows` of the episodes `episode`, masks, and tasks."""
        if self.windows is None:
            seen = rows[:, None] + _LOOK_BACK
            valid = seen >= self.starts[episode][:, None]
        else:
            seen = self.windows[rows]
            valid = seen >= 0
        window, history = history_features(self.calls.take(np.maximum(seen, 0)), valid)
        task = self.task[episode]
        context = self.tasks.context[task]
        set_sizes(context, np.log2(np.maximum(self.calls.size_bytes[rows], 1)))
        context[:, HISTORY_SLICE] = history
        return Observations(window, context), self.tasks.mask[task], task

    def advance(
        self, rows: Int64Array, episode: Int64Array, num_steps: int
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """The step `num_steps` further on, as far as the episode goes, and whether it ends there.

        Where it ends the step is one past the episode's last. As d3rlpy's MultiStepTransitionPicker
        (2.8.1): a cut-off episode never ends, and is followed to its last step.
        """
        end, terminated = self.starts[episode + 1], self.terminated[episode]
        following = np.minimum(rows + num_steps, np.where(terminated, end, end - 1))
        return following, following == end

    def charged(self, lambda_switch: float, lambda_congestion: float) -> Self:
        """These steps with the costs of config changes and of congestion taken off the rewards.

        Both in units of NCCL's default: `lambda_switch` for a step whose action is not that of the
        step before it in its episode, `lambda_congestion` for each unit of interference level; an
        unknown level costs nothing.
        """
        if not lambda_switch and not lambda_congestion:
            return self
        changed = np.diff(self.action, prepend=self.action[:1]) != 0
        changed[self.starts[:-1]] = False
        cost = lambda_switch * changed
        cost = cost + lambda_congestion * np.maximum(self.calls.interference, 0.0)
        return replace(self, reward=(self.reward - cost).astype(np.float32))

    def held(self, most: int) -> Self:
        """These steps, each with the mean reward over the following calls with the same action.

        At most `most` calls, and none beyond the episode's end: a decision stays in force for a
        while, so that a change of config costs once and not at every call.
        """
        if most <= 1:
            return self
        place = np.arange(len(self))
        changes = np.diff(self.action, prepend=-1) != 0
        changes[self.starts[:-1]] = True
        bounds = np.append(np.flatnonzero(changes), len(self))
        run_end = bounds[np.cumsum(changes)]
        end = np.minimum(run_end, place + most)
        total = np.concatenate([[0.0], np.cumsum(self.reward, dtype=np.float64)])
        mean = (total[end] - total[place]) / (end - place)
        return replace(self, reward=mean.astype(np.float32))

    def discounted(self, rows: Int64Array, following: Int64Array, gamma: float) -> Float32Array:
        """(B,) discounted sum of rewards from `rows` to before `following`."""
        longest = int((following - rows).max(initial=0))
        if longest <= 1:
            return np.where(following > rows, self.reward[rows], 0.0).astype(np.float32)
        total = np.zeros(len(rows))
        last = len(self) - 1
        for step in range(longest):
            inside = rows + step < following
            total += inside * gamma**step * self.reward[np.minimum(rows + step, last)]
        return total.astype(np.float32)
