"""Network estimates from transfers, after BBR: EBB, BtlBw, RTprop and their product, the BDP.

Each formula stands here once. The features of a policy (`datasets/history_columns.py`) take them
over whole windows, as arrays; the gradient hook (`serve/ddp`) keeps the same windows as transfers
come in. The terms are those of NetSenseML, section 4.1, equations 1 and 2.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

#: Window of BtlBw in transfers; BBR keeps its largest bandwidth for ten round trips.
BTLBW_WINDOW: Final = 10
#: Window of RTprop in transfers: after a change to a longer route the old minimum must expire.
RTPROP_WINDOW: Final = 100


def ebb_gbytes_per_s(size_bytes: Any, time_us: Any) -> Any:
    """Effective bottleneck bandwidth of a transfer; numbers, or arrays of one shape."""
    return size_bytes / (1000.0 * time_us)


def bdp_bytes(btlbw_gbytes_per_s: Any, rtprop_us: Any) -> Any:
    """Bandwidth-delay product: bytes in flight before a queue builds; numbers or arrays."""
    return btlbw_gbytes_per_s * rtprop_us * 1000.0


class Windowed:
    """The largest, smallest or median of the last `window` values."""

    def __init__(self, of: Callable[[Iterable[float]], float], window: int) -> None:
        self._of = of
        self._values: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        """Append a value; the oldest of a full window is dropped."""
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """The current statistic; None before the first value."""
        return self._of(self._values) if self._values else None

    @property
    def values(self) -> list[float]:
        """The window, oldest first (for checkpoints)."""
        return list(self._values)

    @values.setter
    def values(self, values: Iterable[float]) -> None:
        self._values.clear()
        self._values.extend(values)


class NetworkSense:
    """EBB, BtlBw, RTprop and BDP of a sequence of transfers; None before the first."""

    def __init__(
        self, btlbw_window: int = BTLBW_WINDOW, rtprop_window: int = RTPROP_WINDOW
    ) -> None:
        self.ebb_gbytes_per_s: float | None = None
        self.btlbw = Windowed(max, btlbw_window)
        self.rtprop = Windowed(min, rtprop_window)

    def add(self, size_bytes: float, time_us: float) -> None:
        """Add a transfer of `size_bytes` bytes that took `time_us` > 0."""
        ebb = ebb_gbytes_per_s(size_bytes, time_us)
        self.ebb_gbytes_per_s = ebb
        self.btlbw.add(ebb)
        self.rtprop.add(time_us)

    @property
    def bdp_bytes(self) -> float | None:
        """BtlBw x RTprop."""
        btlbw, rtprop_us = self.btlbw.value, self.rtprop.value
        if btlbw is None or rtprop_us is None:
            return None
        product: float = bdp_bytes(btlbw, rtprop_us)
        return product
