"""The features of past calls, each defined once: name, unit, and formula.

A column is written against `Past`, which hides whose arrays hold the calls. Three places compute
all the columns that stand here, in this order: `datasets/history.py` (numpy, windows as they come),
`train/replay.py` (numpy, all steps at once) and `serve/brain_module.py` (torch, exported with
the policy). To add a column, add it here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

from dynamiccl.datasets.network_sense import bdp_bytes
from dynamiccl.nccl import Algorithm
from dynamiccl.nccl import Protocol as NcclProtocol

MAX_INFLIGHT: Final = 8.0


@dataclass(frozen=True, slots=True)
class Feature:
    """One number that a policy sees: name, unit, meaning."""

    name: str
    unit: str
    meaning: str


class Past(Protocol):
    """Calls and their windows, in the arrays of numpy or torch.

    Facts are arrays of one shape, one value a call. What is unknown is -1, of channels 0; where
    there is padding, size and time are some positive number, and what comes out is not looked at.
    """

    #: The library, for what both have: log2, where, clip, ones_like, stack.
    xp: Any
    size_bytes: Any
    time_us: Any
    gbytes_per_s: Any  # size / time
    algorithm: Any
    protocol: Any
    num_channels: Any
    log2_channels: Any  # 0 = unknown or one
    interference: Any
    skew_us: Any

    def one_hot(self, code: Any, count: int) -> Any:
        """(..., count) of codes (...); nothing but 0 for -1."""

    def before(self, values: Any) -> Any:
        """For each call the value of the call before; its own value for the first of the window."""

    def last(self, values: Any) -> Any:
        """The value of the last call of each window."""

    def largest(self, values: Any) -> Any:
        """The largest value of each window."""

    def smallest(self, values: Any) -> Any:
        """The smallest value of each window."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Features that are computed together: one, (...) values, or several, (..., count)."""

    features: tuple[Feature, ...]
    of: Callable[[Past], Any]
    #: Uses `Past.before`. Such a column is 0 where a call is as the one before: what is the first
    #: of one window is further on in another, and `train/replay.py` keeps one row a call.
    compares: bool = False


@dataclass(frozen=True, slots=True)
class OfLast:
    """A history feature that repeats a window feature of the last call."""

    feature: Feature
    column: str


@dataclass(frozen=True)
class HistoryColumns:
    """All window features, W, and history features, H, in order."""

    window: tuple[Columns, ...]
    #: All zero where the window has no call.
    history: tuple[Columns | OfLast, ...]

    @cached_property
    def window_features(self) -> tuple[Feature, ...]:
        """The W features of each call of the window."""
        return tuple(feature for columns in self.window for feature in columns.features)

    @cached_property
    def history_features(self) -> tuple[Feature, ...]:
        """The H features of the history."""
        return tuple(
            feature
            for each in self.history
            for feature in (each.features if isinstance(each, Columns) else (each.feature,))
        )

    @cached_property
    def window_places(self) -> list[tuple[int | slice, Columns]]:
        """The window columns, each with its position or slice."""
        return _placed(self.window)

    @cached_property
    def computed_features(self) -> tuple[Feature, ...]:
        """The history features computed from the window (not the repeated ones)."""
        return tuple(feature for _, columns in self.computed_places for feature in columns.features)

    @cached_property
    def computed_places(self) -> list[tuple[int | slice, Columns]]:
        """Their columns, each with its position or slice among them."""
        return _placed([each for each in self.history if isinstance(each, Columns)])

    @cached_property
    def repeated(self) -> list[tuple[slice, slice]]:
        """Pairs of slices: the last call's features in the history, and in the window."""
        history, window = positions(self.history_features), positions(self.window_features)
        repeats = [each for each in self.history if isinstance(each, OfLast)]
        return runs([(history[each.feature.name], window[each.column]) for each in repeats])

    @cached_property
    def computed(self) -> list[tuple[slice, slice]]:
        """Pairs of slices: the computed features in the history, and among themselves."""
        places = positions(self.history_features)
        return runs([(places[f.name], index) for index, f in enumerate(self.computed_features)])

    @cached_property
    def comparing(self) -> list[int]:
        """Positions of the window features that depend on the call before."""
        places = positions(self.window_features)
        compares = [columns for columns in self.window if columns.compares]
        return [places[feature.name] for columns in compares for feature in columns.features]


def positions(features: Sequence[Feature]) -> dict[str, int]:
    """The position of each feature by its name."""
    return {feature.name: index for index, feature in enumerate(features)}


def runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[slice, slice]]:
    """Pairs of positions merged into as few pairs of slices as possible."""
    found: list[tuple[slice, slice]] = []
    for to, source in pairs:
        if found and (found[-1][0].stop, found[-1][1].stop) == (to, source):
            first_to, first_source = found.pop()
            found.append((slice(first_to.start, to + 1), slice(first_source.start, source + 1)))
        else:
            found.append((slice(to, to + 1), slice(source, source + 1)))
    return found


def _placed(columns: Sequence[Columns]) -> list[tuple[int | slice, Columns]]:
    """Positions of columns in a row: an int for one feature, a slice for several."""
    found: list[tuple[int | slice, Columns]] = []
    start = 0
    for each in columns:
        width = len(each.features)
        found.append((start if width == 1 else slice(start, start + width), each))
        start += width
    return found


def one_hot(prefix: str, names: Sequence[str], meaning: str) -> tuple[Feature, ...]:
    """One flag feature for each name."""
    return tuple(Feature(f"{prefix}_{name}", "0/1", meaning) for name in names)


def _column(name: str, unit: str, meaning: str, of: Callable[[Past], Any]) -> Columns:
    return Columns((Feature(name, unit, meaning),), of)


def _channel_throughput(past: Past) -> Any:
    each = past.xp.log2(past.gbytes_per_s) - past.log2_channels
    return past.xp.where(past.num_channels > 0, each, 0.0)


def _changed(past: Past) -> Any:
    differs = past.algorithm != past.before(past.algorithm)
    differs = differs | (past.protocol != past.before(past.protocol))
    return differs | (past.num_channels != past.before(past.num_channels))


def _network_sense(past: Past) -> Any:
    xp = past.xp
    ebb = past.last(past.gbytes_per_s)
    btlbw, rtprop_us = past.largest(past.gbytes_per_s), past.smallest(past.time_us)
    inflight = past.last(past.size_bytes) / bdp_bytes(btlbw, rtprop_us)
    features = [
        xp.log2(ebb),
        xp.log2(btlbw),
        xp.log2(rtprop_us),
        xp.clip(inflight, max=MAX_INFLIGHT),
    ]
    return xp.stack([xp.ones_like(ebb), *features], -1)


#: The config of a call, as the window and the history hold it.
_CONFIG_USED: Final = (
    Columns(
        one_hot("algorithm", [a.wire for a in Algorithm], "algorithm of the call"),
        lambda past: past.one_hot(past.algorithm, len(Algorithm)),
    ),
    Columns(
        one_hot("protocol", [p.wire for p in NcclProtocol], "protocol of the call"),
        lambda past: past.one_hot(past.protocol, len(NcclProtocol)),
    ),
    _column(
        "log2_channels",
        "log2",
        "channels of the call; 0 = unknown or one",
        lambda past: past.log2_channels,
    ),
)

_WINDOW: Final = (
    _column("valid", "0/1", "0 = padding", lambda past: past.xp.ones_like(past.time_us)),
    _column("log2_time", "log2 us", "completion time", lambda past: past.xp.log2(past.time_us)),
    _column(
        "log2_channel_throughput",
        "log2 GB/s",
        "algbw per channel; 0 when unknown",
        _channel_throughput,
    ),
    *_CONFIG_USED,
    Columns(
        (Feature("changed", "0/1", "the config differs from the call before"),),
        _changed,
        compares=True,
    ),
    _column(
        "interference",
        "",
        "interference level then",
        lambda past: past.xp.clip(past.interference, min=0.0),
    ),
)

_HISTORY: Final[tuple[Columns | OfLast, ...]] = (
    OfLast(Feature("last_known", "0/1", "there is a last call"), "valid"),
    *(
        OfLast(Feature(f"last_{feature.name}", feature.unit, feature.meaning), feature.name)
        for columns in _CONFIG_USED
        for feature in columns.features
    ),
    _column(
        "interference_known",
        "0/1",
        "an interference level is known",
        lambda past: past.last(past.interference) >= 0.0,
    ),
    _column(
        "interference",
        "",
        "interference level now",
        lambda past: past.xp.clip(past.last(past.interference), min=0.0),
    ),
    _column(
        "skew_known",
        "0/1",
        "compute skew is known",
        lambda past: past.last(past.skew_us) >= 0.0,
    ),
    _column(
        "log2_skew",
        "log2 us",
        "log2(1 + spin of the earliest rank)",
        lambda past: past.xp.log2(1.0 + past.xp.clip(past.last(past.skew_us), min=0.0)),
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

HISTORY_COLUMNS: Final = HistoryColumns(_WINDOW, _HISTORY)
WINDOW_FEATURES: Final = HISTORY_COLUMNS.window_features
#: Known from history: all zero in a cold observation.
HISTORY_FEATURES: Final = HISTORY_COLUMNS.history_features
#: Position of each feature in a call of the window.
WINDOW_COLUMN: Final = positions(WINDOW_FEATURES)
