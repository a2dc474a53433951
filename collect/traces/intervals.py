"""Unions of time intervals, and their overlap with other intervals."""

from typing import Self

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class Union:
    """A union of intervals; overlapping time counts once."""

    def __init__(self, starts: FloatArray, ends: FloatArray) -> None:
        """Merge intervals [starts, ends), (N,) us each, in any order."""
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order]) if len(ends) else ends
        is_first = np.ones(len(starts), dtype=np.bool_)
        is_first[1:] = starts[1:] > ends[:-1]
        self.starts: FloatArray = starts[is_first]
        is_last = np.append(is_first[1:], True) if len(starts) else is_first
        self.ends: FloatArray = ends[is_last]
        self._before = np.concatenate([[0.0], np.cumsum(self.ends - self.starts)])

    def with_other(self, other: Self) -> "Union":
        """The union of both."""
        return Union(
            np.concatenate([self.starts, other.starts]), np.concatenate([self.ends, other.ends])
        )

    def between(self, begin: FloatArray, end: FloatArray) -> FloatArray:
        """(N,) us of the union that lie between each `begin` and `end`."""
        return self._until(end) - self._until(begin)

    def _until(self, moment: FloatArray) -> FloatArray:
        if not len(self.starts):
            return np.zeros(len(moment))
        place = np.searchsorted(self.starts, moment, side="right")
        last = np.maximum(place - 1, 0)
        within = np.clip(moment - self.starts[last], 0.0, self.ends[last] - self.starts[last])
        found: FloatArray = np.where(place > 0, self._before[last] + within, 0.0)
        return found
