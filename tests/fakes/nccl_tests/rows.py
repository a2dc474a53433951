"""One row of a benchmark, and the statistics of its iterations (`src/util.cu`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """What a row is about; `count` is NCCL's, `size_bytes` the larger buffer."""

    size_bytes: int
    count: int
    datatype: str
    operation: str
    root: int


@dataclass(frozen=True, slots=True)
class Iterations:
    """Statistics of `-I`; those of the single process times come with more than one process."""

    times_us: tuple[float, ...]
    skipped: int
    processes_us: tuple[tuple[float, ...], ...]

    @property
    def _kept(self) -> list[float]:
        return sorted(self.times_us[self.skipped :])

    @property
    def min_us(self) -> float:
        """Shortest."""
        return self._kept[0]

    @property
    def max_us(self) -> float:
        """Longest."""
        return self._kept[-1]

    @property
    def avg_us(self) -> float:
        """Mean."""
        return sum(self._kept) / len(self._kept)

    @property
    def p50_us(self) -> float:
        """Median, the upper one of two."""
        return self._kept[len(self._kept) // 2]

    @property
    def p95_us(self) -> float:
        """95th percentile, by nearest rank."""
        return self._percentile(95)

    @property
    def p99_us(self) -> float:
        """99th percentile, by nearest rank."""
        return self._percentile(99)

    @property
    def stdev_us(self) -> float:
        """Standard deviation of all of them, not of a sample."""
        average = self.avg_us
        return math.sqrt(sum((t - average) ** 2 for t in self._kept) / len(self._kept))

    @property
    def cv_percent(self) -> float:
        """Deviation over mean."""
        return self.stdev_us / self.avg_us * 100.0 if self.avg_us > 0 else 0.0

    def _percentile(self, percent: int) -> float:
        count = len(self._kept)
        return self._kept[min(count - 1, (count * percent + 99) // 100 - 1)]


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a row; `wrong` is None where nothing was checked."""

    in_place: bool
    time_us: float
    algbw: float
    busbw: float
    wrong: int | None
    iterations: Iterations | None


def slowest(processes_us: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The longest time of each iteration over all processes."""
    return tuple(max(times) for times in zip(*processes_us, strict=True))
