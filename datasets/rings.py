"""Ring buffers of the last calls of many task keys, from which windows are made.

R rings, one for each (job, task key); N calls at a time; K = WINDOW_LENGTH.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import WINDOW_LENGTH, Float32Array
from dynamiccl.datasets.history import CallColumns, history_features

_SLOTS = np.arange(WINDOW_LENGTH)


class CallRings:
    """The latest K calls of each of R rings."""

    def __init__(self, num_rings: int) -> None:
        """Start empty."""
        size = num_rings * WINDOW_LENGTH
        self._calls = CallColumns(
            # Any valid value for the padding, which is ignored.
            size_bytes=np.ones(size, dtype=np.int64),
            time_us=np.ones(size, dtype=np.float64),
            algorithm=np.zeros(size, dtype=np.int8),
            protocol=np.zeros(size, dtype=np.int8),
            num_channels=np.zeros(size, dtype=np.int16),
            interference=np.zeros(size, dtype=np.float64),
            skew_us=np.zeros(size, dtype=np.float64),
        )
        self._count = np.zeros(num_rings, dtype=np.int64)

    def clear(self) -> None:
        """Remove all calls."""
        self._count[:] = 0

    def add(self, ring: npt.NDArray[np.int64], calls: CallColumns) -> None:
        """Add one call to each of N different rings (N,)."""
        place = ring * WINDOW_LENGTH + self._count[ring] % WINDOW_LENGTH
        for name in CallColumns.__slots__:
            kept: npt.NDArray[Any] = getattr(self._calls, name)
            kept[place] = getattr(calls, name)
        self._count[ring] += 1

    def observe(self, ring: npt.NDArray[np.int64]) -> tuple[Float32Array, Float32Array]:
        """Windows (N, K, W) and history features (N, H) of rings (N,)."""
        count = self._count[ring][:, None]
        index = ring[:, None] * WINDOW_LENGTH + (count + _SLOTS) % WINDOW_LENGTH
        valid = WINDOW_LENGTH - count <= _SLOTS
        return history_features(self._calls.take(index), valid)
