"""The history part of an observation for many task keys at once: call windows and their features.

The columns are those of `datasets/history_columns.py`; `serve/brain_module.py` has them in
TorchScript, and `serve/brain_check.py` compares the two.

N windows, K = WINDOW_LENGTH calls, W = len(WINDOW_FEATURES), H = len(HISTORY_FEATURES).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import WINDOW_LENGTH, Float32Array
from dynamiccl.datasets.history_columns import HISTORY_COLUMNS, HistoryColumns, Past
from dynamiccl.datasets.network_sense import ebb_gbytes_per_s
from dynamiccl.nccl import Algorithm, Protocol

#: Code of an unknown algorithm, protocol, interference or skew; unknown channels are 0.
UNKNOWN: Final = -1
_LOG2: Final = np.log2(np.maximum(np.arange(1 << 16), 1)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Call:
    """One past call of the window."""

    size_bytes: int
    time_us: float
    algorithm: Algorithm | None
    protocol: Protocol | None
    num_channels: int | None
    interference: float | None = None
    skew_us: float | None = None


@dataclass(frozen=True, slots=True)
class CallColumns:
    """Attributes of calls as arrays of one shape; UNKNOWN gives the codes for unknown values."""

    size_bytes: npt.NDArray[Any]
    time_us: npt.NDArray[Any]
    algorithm: npt.NDArray[Any]
    protocol: npt.NDArray[Any]
    num_channels: npt.NDArray[Any]
    interference: npt.NDArray[Any]
    skew_us: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.time_us)

    def take(self, index: npt.NDArray[np.int64]) -> Self:
        """The calls at `index`, in the shape of `index`."""
        return type(self)(*(getattr(self, name)[index] for name in self.__slots__))

    def part(self, steps: slice) -> Self:
        """A slice of the rows, as views."""
        return type(self)(*(getattr(self, name)[steps] for name in self.__slots__))

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Self:
        """Columns of a sequence of calls, one row a call."""
        return cls(
            np.array([call.size_bytes for call in calls], dtype=np.int64),
            np.array([call.time_us for call in calls], dtype=np.float64),
            np.array([_or_unknown(call.algorithm) for call in calls], dtype=np.int8),
            np.array([_or_unknown(call.protocol) for call in calls], dtype=np.int8),
            np.array([call.num_channels or 0 for call in calls], dtype=np.int16),
            np.array([_or_unknown(call.interference) for call in calls], dtype=np.float64),
            np.array([_or_unknown(call.skew_us) for call in calls], dtype=np.float64),
        )


def history_arrays(calls: Sequence[Call]) -> tuple[Float32Array, Float32Array]:
    """Window (K, W) and history features (H,) of the last calls of one task key, oldest first."""
    recent = list(calls)[-WINDOW_LENGTH:]
    slots = np.arange(WINDOW_LENGTH) - (WINDOW_LENGTH - len(recent))
    valid = slots >= 0
    # Any valid value for the padding, which is ignored.
    padded = CallColumns.of(recent or [Call(1, 1.0, None, None, None)])
    window, history = history_features(padded.take(np.maximum(slots, 0)[None]), valid[None])
    return window[0], history[0]


def history_features(
    calls: CallColumns, valid: npt.NDArray[np.bool_], columns: HistoryColumns = HISTORY_COLUMNS
) -> tuple[Float32Array, Float32Array]:
    """Windows (N, K, W) and history features (N, H) of N windows of K calls.

    Calls are right-aligned, oldest first; where `valid` (N, K) is false there is padding, whose
    size and time must be positive, and which comes out as zeros.
    """
    past = _Windows(calls, valid)
    window = window_rows(past, calls.time_us.shape, columns)
    window[~valid] = 0.0
    history = np.zeros((len(valid), len(columns.history_features)), dtype=np.float32)
    known = valid[:, -1]
    if known.any():
        computed = computed_rows(past, len(valid), columns)
        for to, source in columns.computed:
            history[:, to] = computed[:, source]
        for to, source in columns.repeated:
            history[:, to] = window[:, -1, source]
        history[~known] = 0.0
    return window, history


def window_rows(past: Past, shape: tuple[int, ...], columns: HistoryColumns) -> Float32Array:
    """The window features (..., W) of calls of a shape."""
    rows = np.empty((*shape, len(columns.window_features)), dtype=np.float32)
    for place, each in columns.window_places:
        rows[..., place] = each.of(past)
    return rows


def computed_rows(past: Past, num_rows: int, columns: HistoryColumns) -> Float32Array:
    """The computed history features (N, C) of N windows."""
    rows = np.empty((num_rows, len(columns.computed_features)), dtype=np.float32)
    for place, each in columns.computed_places:
        rows[:, place] = each.of(past)
    return rows


class NumpyCalls:
    """A numpy implementation of `Past`."""

    xp: Any = np

    def __init__(self, calls: CallColumns) -> None:
        """Keep the columns; times and skews as float64."""
        self.size_bytes = calls.size_bytes
        self.time_us = calls.time_us.astype(np.float64)
        self.gbytes_per_s = ebb_gbytes_per_s(calls.size_bytes, self.time_us)
        self.algorithm = calls.algorithm
        self.protocol = calls.protocol
        self.num_channels = calls.num_channels
        self.log2_channels = _LOG2[calls.num_channels]
        self.interference = calls.interference
        self.skew_us = calls.skew_us.astype(np.float64)

    def one_hot(self, code: npt.NDArray[Any], count: int) -> Float32Array:
        """(..., count) of codes (...)."""
        return _one_hots(count).take(code, axis=0)


class _Windows(NumpyCalls):
    """Past of N right-aligned windows of K calls (N, K)."""

    def __init__(self, calls: CallColumns, valid: npt.NDArray[np.bool_]) -> None:
        super().__init__(calls)
        self._valid = valid

    def before(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = values.copy()
        np.copyto(found[:, 1:], values[:, :-1], where=self._valid[:, :-1])
        return found

    def last(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values[:, -1]

    def largest(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._in_window(values).max(axis=1)  # type: ignore[no-any-return]

    def smallest(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._in_window(values).min(axis=1)  # type: ignore[no-any-return]

    def _in_window(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Values with padding replaced by the last value, which changes no extreme."""
        return np.where(self._valid, values, values[:, -1:])


@cache
def _one_hots(count: int) -> Float32Array:
    """(count + 1, count) one-hot rows; the last row, of UNKNOWN (-1), is zero."""
    return np.eye(count + 1, count, dtype=np.float32)


def _or_unknown(value: float | None) -> float:
    return UNKNOWN if value is None else value
