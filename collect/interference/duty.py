"""Duty cycle: busy for a fraction `level` of the time."""

import time
from collections.abc import Callable
from typing import Final

#: Length of a busy stretch, in seconds: shorter than a launch, longer than the clock's grain.
BUSY_S: Final = 0.01


def idle_seconds(busy_s: float, level: float) -> float:
    """Seconds to rest after `busy_s` seconds of work, so that the busy fraction is `level`.

    >>> idle_seconds(0.01, 0.25)
    0.03
    >>> idle_seconds(0.01, 1.0)
    0.0
    """
    if not 0.0 < level <= 1.0:
        raise ValueError(f"level is {level} and must be above 0 and at most 1")
    return busy_s / level - busy_s


def repeat(work: Callable[[], None], level: float, over: Callable[[float], bool]) -> None:
    """Alternate `work` and rest, until `over(seconds to rest)` returns True.

    A rest is stretched by what the last one missed of its length, so that a coarse clock or a late
    wake-up does not shift the share.
    """
    debt_s = 0.0
    while True:
        began = time.perf_counter()
        work()
        worked = time.perf_counter()
        debt_s += idle_seconds(worked - began, level)
        if over(max(0.0, debt_s)):
            return
        debt_s -= time.perf_counter() - worked
