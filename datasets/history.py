"""The history of a task key: its past calls, the features of them, and estimates of the network.

A feature of the past is defined once, in `WINDOW` or `HISTORY`, as a function of `Past`, whose
arrays are numpy's or torch's: `serve/brain_module.py` is exported with the policy.

EBB, BtlBw, RTprop and their product, the BDP, are those of BBR, in the terms of NetSenseML, section
4.1, equations 1 and 2: over a window of calls for a policy, and as transfers come in for the
gradient hook (`serve/ddp`).

N windows, K = WINDOW_LENGTH calls, W = len(WINDOW_FEATURES), H = len(HISTORY_FEATURES).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import Algorithm, Protocol

Float32Array = npt.NDArray[np.float32]

WINDOW_LENGTH: Final = 8
#: Code of an unknown algorithm, protocol, interference or skew; unknown channels are 0.
UNKNOWN: Final = -1
MAX_INFLIGHT: Final = 8.0
#: Transfers; BBR keeps its largest bandwidth for ten round trips.
BTLBW_WINDOW: Final = 10
#: Transfers: after a change to a longer route the old minimum must expire.
RTPROP_WINDOW: Final = 100


@dataclass(frozen=True, slots=True)
class Feature:
    """One number that a policy sees."""

    name: str
    unit: str
    meaning: str


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


#: Of CallColumns, in order.
_CALL_TYPES: Final = (np.int64, np.float64, np.int8, np.int8, np.int16, np.float64, np.float64)


@dataclass(frozen=True, slots=True)
class CallColumns:
    """Attributes of calls as arrays of one shape; unknown values as codes."""

    size_bytes: Any
    time_us: Any
    algorithm: Any
    protocol: Any
    num_channels: Any
    interference: Any
    skew_us: Any

    def __len__(self) -> int:
        return len(self.time_us)

    def take(self, index: npt.NDArray[np.int64] | slice) -> Self:
        """The calls at `index`; a slice gives views."""
        return type(self)(*(getattr(self, name)[index] for name in self.__slots__))

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Self:
        """One row a call."""
        columns = []
        for name, kind in zip(cls.__slots__, _CALL_TYPES, strict=True):
            unknown = 0 if name == "num_channels" else UNKNOWN
            values = [getattr(call, name) for call in calls]
            known = [unknown if value is None else value for value in values]
            columns.append(np.array(known, dtype=kind))
        return cls(*columns)

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> Self:
        """Calls of which nothing is true yet."""
        return cls(*(np.ones(shape, dtype=kind) for kind in _CALL_TYPES))


def ebb_gbytes_per_s(size_bytes: Any, time_us: Any) -> Any:
    """Effective bottleneck bandwidth; numbers or arrays."""
    return size_bytes / (1000.0 * time_us)


def bdp_bytes(btlbw_gbytes_per_s: Any, rtprop_us: Any) -> Any:
    """Bytes in flight before a queue builds; numbers or arrays."""
    return btlbw_gbytes_per_s * rtprop_us * 1000.0


class Past:
    """N right-aligned windows of K calls (N, K), in arrays of `xp`; times are float64."""

    def __init__(self, xp: Any, calls: CallColumns, valid: Any) -> None:
        self.valid = valid
        self.xp = xp
        # Harmless numbers, so that no logarithm is taken of 0.
        self.size_bytes = xp.where(valid, calls.size_bytes, 1000)
        self.time_us = xp.where(valid, calls.time_us, 1.0)
        self.gbytes_per_s = ebb_gbytes_per_s(self.size_bytes, self.time_us)
        self.algorithm, self.protocol = calls.algorithm, calls.protocol
        self.num_channels = calls.num_channels
        #: 0 = unknown or one.
        self.log2_channels = xp.log2(1.0 * xp.clip(calls.num_channels, min=1))
        self.interference, self.skew_us = calls.interference, calls.skew_us

    def one_hot(self, code: Any, count: int) -> Any:
        """(..., count) of codes (...); all 0 for -1."""
        return code[..., None] == self.xp.arange(count)

    def before(self, values: Any) -> Any:
        """The value of the call before; the first of a window has its own."""
        earlier = self.xp.where(self.valid[:, :-1], values[:, :-1], values[:, 1:])
        return self.xp.concat([values[:, :1], earlier], 1)

    def largest(self, values: Any) -> Any:
        """(N,) of each window."""
        return self.xp.amax(self._in_window(values), 1)

    def smallest(self, values: Any) -> Any:
        """(N,) of each window."""
        return self.xp.amin(self._in_window(values), 1)

    def _in_window(self, values: Any) -> Any:
        return self.xp.where(self.valid, values, values[:, -1:])


@dataclass(frozen=True, slots=True)
class Columns:
    """Features computed together: one, (...) values, or several, (..., count)."""

    features: tuple[Feature, ...]
    of: Callable[[Past], Any]


def features_of(columns: Sequence[Columns]) -> tuple[Feature, ...]:
    """All their features, in order."""
    return tuple(feature for each in columns for feature in each.features)


def positions(features: Sequence[Feature]) -> dict[str, int]:
    """Each feature's position."""
    return {feature.name: index for index, feature in enumerate(features)}


def one_hot(prefix: str, names: Sequence[str], meaning: str) -> tuple[Feature, ...]:
    """One flag for each name."""
    return tuple(Feature(f"{prefix}_{name}", "0/1", meaning) for name in names)


def _column(name: str, unit: str, meaning: str, of: Callable[[Past], Any]) -> Columns:
    return Columns((Feature(name, unit, meaning),), of)


def _of_last(columns: Columns) -> Columns:
    features = [Feature(f"last_{f.name}", f.unit, f.meaning) for f in columns.features]
    return Columns(tuple(features), lambda past: columns.of(past)[:, -1])


def _channel_throughput(past: Past) -> Any:
    each = past.xp.log2(past.gbytes_per_s) - past.log2_channels
    return past.xp.where(past.num_channels > 0, each, 0.0)


def _changed(past: Past) -> Any:
    differs = past.algorithm != past.before(past.algorithm)
    differs = differs | (past.protocol != past.before(past.protocol))
    return differs | (past.num_channels != past.before(past.num_channels))


def _network_sense(past: Past) -> Any:
    xp = past.xp
    ebb = past.gbytes_per_s[:, -1]
    btlbw, rtprop_us = past.largest(past.gbytes_per_s), past.smallest(past.time_us)
    inflight = past.size_bytes[:, -1] / bdp_bytes(btlbw, rtprop_us)
    features = [
        xp.log2(ebb),
        xp.log2(btlbw),
        xp.log2(rtprop_us),
        xp.clip(inflight, max=MAX_INFLIGHT),
    ]
    return xp.stack([xp.ones_like(ebb), *features], -1)


_CONFIG_USED: Final = (
    Columns(
        one_hot("algorithm", [a.wire for a in Algorithm], "algorithm of the call"),
        lambda past: past.one_hot(past.algorithm, len(Algorithm)),
    ),
    Columns(
        one_hot("protocol", [p.wire for p in Protocol], "protocol of the call"),
        lambda past: past.one_hot(past.protocol, len(Protocol)),
    ),
    _column(
        "log2_channels",
        "log2",
        "channels of the call; 0 = unknown or one",
        lambda past: past.log2_channels,
    ),
)

WINDOW: Final = (
    _column("valid", "0/1", "0 = padding", lambda past: past.xp.ones_like(past.time_us)),
    _column("log2_time", "log2 us", "completion time", lambda past: past.xp.log2(past.time_us)),
    _column(
        "log2_channel_throughput",
        "log2 GB/s",
        "algbw per channel; 0 when unknown",
        _channel_throughput,
    ),
    *_CONFIG_USED,
    _column("changed", "0/1", "the config differs from the call before", _changed),
    _column(
        "interference",
        "",
        "interference level then",
        lambda past: past.xp.clip(past.interference, min=0.0),
    ),
)

#: All zero where the window has no call.
HISTORY: Final = (
    _column(
        "last_known",
        "0/1",
        "there is a last call",
        lambda past: past.xp.ones_like(past.time_us[:, -1]),
    ),
    *(_of_last(columns) for columns in _CONFIG_USED),
    _column(
        "interference_known",
        "0/1",
        "an interference level is known",
        lambda past: past.interference[:, -1] >= 0.0,
    ),
    _column(
        "interference",
        "",
        "interference level now",
        lambda past: past.xp.clip(past.interference[:, -1], min=0.0),
    ),
    _column(
        "skew_known",
        "0/1",
        "compute skew is known",
        lambda past: past.skew_us[:, -1] >= 0.0,
    ),
    _column(
        "log2_skew",
        "log2 us",
        "log2(1 + spin of the earliest rank)",
        lambda past: past.xp.log2(1.0 + past.xp.clip(past.skew_us[:, -1], min=0.0)),
    ),
    Columns(
        (
            Feature("sense_known", "0/1", "the four below are known"),
            Feature("log2_ebb", "log2 GB/s", "effective bandwidth of the last call: size / time"),
            Feature("log2_btlbw", "log2 GB/s", "bottleneck bandwidth: windowed maximum of it"),
            Feature("log2_rtprop", "log2 us", "round-trip propagation: windowed minimum time"),
            Feature("inflight_over_bdp", "", "nBytes / (BtlBw x RTprop), at most 8"),
        ),
        _network_sense,
    ),
)

WINDOW_FEATURES: Final = features_of(WINDOW)
HISTORY_FEATURES: Final = features_of(HISTORY)
WINDOW_COLUMN: Final = positions(WINDOW_FEATURES)


def history_features(
    calls: CallColumns, valid: npt.NDArray[np.bool_]
) -> tuple[Float32Array, Float32Array]:
    """Windows (N, K, W) and history (N, H) of right-aligned calls; 0 where not `valid` (N, K)."""
    times = {name: getattr(calls, name).astype(np.float64) for name in ("time_us", "skew_us")}
    past = Past(np, replace(calls, **times), valid)
    window = feature_rows(WINDOW, past, valid.shape)
    window[~valid] = 0.0
    known = valid[:, -1]
    history = feature_rows(HISTORY, past, known.shape)
    history[~known] = 0.0
    return window, history


def feature_rows(columns: Sequence[Columns], past: Past, shape: tuple[int, ...]) -> Float32Array:
    """(*shape, count) features of windows or calls."""
    widths = [len(each.features) for each in columns]
    rows = np.empty((*shape, sum(widths)), dtype=np.float32)
    for end, width, each in zip(np.cumsum(widths), widths, columns, strict=True):
        rows[..., end - 1 if width == 1 else slice(end - width, end)] = each.of(past)
    return rows


class Windowed:
    """A statistic of the last `window` values."""

    def __init__(self, of: Callable[[Iterable[float]], float], window: int) -> None:
        self._of = of
        self._values: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        """Append a value; a full window drops its oldest."""
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return self._of(self._values) if self._values else None


class NetworkSense:
    """EBB, BtlBw, RTprop and BDP of a sequence of transfers; None before the first."""

    def __init__(self) -> None:
        self.ebb_gbytes_per_s: float | None = None
        self.btlbw = Windowed(max, BTLBW_WINDOW)
        self.rtprop = Windowed(min, RTPROP_WINDOW)

    def add(self, size_bytes: float, time_us: float) -> None:
        """Add a transfer; `time_us` > 0."""
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
