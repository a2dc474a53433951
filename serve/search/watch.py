"""Level and scatter of the incumbent's latest calls, with which probes are compared.

The scatter is taken from the differences of neighbouring calls, so that a level that wanders does
not pass for noise, and by their median, so that stragglers do not either.
"""

import math
from collections import deque
from statistics import median
from typing import Final

#: Calls that are looked back on.
WINDOW: Final = 32
#: What calls are taken to scatter by before they show it (robust sigma of log time), and for how
#: many calls' worth.
_NOISE_SIGMA: Final = 0.03
_NOISE_WEIGHT: Final = 4
_LEAST_SIGMA: Final = 0.002
#: The standard deviation over the median of the absolute value, for a normal; and for differences.
_MAD: Final = 1.4826 / math.sqrt(2.0)


class Watch:
    """The latest log times of the incumbent."""

    def __init__(self) -> None:
        """Start empty."""
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._steps: deque[float] = deque(maxlen=2 * WINDOW)

    def __len__(self) -> int:
        return len(self._times)

    def add(self, log_time: float) -> None:
        """Add a call of the incumbent."""
        if self._times:
            self._steps.append(abs(log_time - self._times[-1]))
        self._times.append(log_time)

    def level(self) -> float:
        """Median log time. Raises statistics.StatisticsError when empty."""
        return median(self._times)

    def sigma(self) -> float:
        """Standard deviation of one call, in log time."""
        if not self._steps:
            return _NOISE_SIGMA
        seen = max(_MAD * median(self._steps), _LEAST_SIGMA)
        count = len(self._steps)
        squared = (count * seen**2 + _NOISE_WEIGHT * _NOISE_SIGMA**2) / (count + _NOISE_WEIGHT)
        return math.sqrt(squared)

    def level_variance(self) -> float:
        """Variance of `level`: for normal noise pi / 2 times that of a mean."""
        return 0.5 * math.pi * self.sigma() ** 2 / len(self._times)

    def restart(self) -> None:
        """Drop the calls of another incumbent or surroundings; keep the scatter."""
        self._times.clear()
