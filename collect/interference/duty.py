"""Busy for a share of the time: what a level means to a disturbance that keeps something busy."""

import time
from collections.abc import Callable
from typing import Final

#: Length of a busy stretch, in seconds: shorter than a launch, longer than the clock's grain.
BUSY_S: Final = 0.01


def idle_seconds(busy_s: float, level: float) -> float:
    """How long to rest after being busy for `busy_s`, so that the share of busy time is `level`.

    >>> idle_seconds(0.01, 0.25)
    0.03
    >>> idle_seconds(0.01, 1.0)
    0.0
    """
    if not 0.0 < level <= 1.0:
        raise ValueError(f"level is {level} and must be above 0 and at most 1")
    return busy_s / level - busy_s


def repeat(work: Callable[[], None], level: float, over: Callable[[float], bool]) -> None:
    """Do `work`, rest, and so on, until `over(seconds to rest)` says that it is over.

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
