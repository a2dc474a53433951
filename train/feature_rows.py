"""Precomputed history features of all steps, so that a batch is a copy.

`Steps.observe` defines what a step sees. It takes logarithms of every call of every window, each
time; here each call has its row of window features, and a row of what the history is when it is the
last call. 104 bytes a step, so it is for steps that fit the memory, and only where windows are the
calls before a step. The columns are those of `datasets/history.py`.

N steps, B rows of a batch, K calls in the window.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import HISTORY_SLICE, Observations, set_sizes
from dynamiccl.datasets.history import (
    HISTORY_COLUMNS,
    WINDOW_LENGTH,
    CallColumns,
    Float32Array,
    HistoryColumns,
    Past,
    computed_rows,
    window_rows,
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
        self._computed = np.empty((len(steps), len(columns.computed_features)), dtype=np.float32)
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
        history = context[:, HISTORY_SLICE.start :]
        computed = self._computed.take(rows - 1, axis=0, mode="clip")
        self._columns.fill(history, computed, window[:, -1])
        short = np.flatnonzero(num_calls < WINDOW_LENGTH)
        padded = window[short]
        padded[num_calls[short, None] < -_LOOK_BACK] = 0.0
        window[short] = padded
        cold = short[num_calls[short] == 0]
        history[cold, : len(self._columns.history_features)] = 0.0
        return Observations(window, context), steps.tasks.mask.take(task, axis=0), task

    def _fill(self, start: int, end: int, is_first: npt.NDArray[np.bool_]) -> None:
        """Compute the rows of steps `start` to `end`, given also the window before them."""
        before = max(0, start - WINDOW_LENGTH)
        past = _Steps(self._steps.calls.take(slice(before, end)), is_first[before:end])
        own = slice(start - before, None)
        self._calls[start:end] = window_rows(past, (end - before,), self._columns)[own]
        self._computed[start:end] = computed_rows(past, end - before, self._columns)[own]


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
