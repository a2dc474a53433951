"""What a policy sees of the past: the window of calls and the features drawn from it.

The one definition, for many task keys at once; `serve/brain_module.py` has the same in TorchScript,
and `serve/brain_check.py` compares the two.

N windows, K = WINDOW_LENGTH calls, W = len(WINDOW_FEATURES), H = len(HISTORY_FEATURES).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import (
    CONFIG_USED,
    HISTORY_FEATURES,
    MAX_INFLIGHT,
    WINDOW_FEATURES,
    WINDOW_LENGTH,
    Float32Array,
)
from dynamiccl.nccl import Algorithm, Protocol

#: An algorithm, a protocol, an interference or a skew that is not known; channels are then 0.
UNKNOWN: Final = -1
_W: Final = {feature.name: index for index, feature in enumerate(WINDOW_FEATURES)}
_H: Final = {feature.name: index for index, feature in enumerate(HISTORY_FEATURES)}
_W_USED: Final = slice(_W[CONFIG_USED[0].name], _W[CONFIG_USED[-1].name] + 1)
_H_USED: Final = slice(_H[f"last_{CONFIG_USED[0].name}"], _H[f"last_{CONFIG_USED[-1].name}"] + 1)
_W_ALGORITHM: Final = slice(_W_USED.start, _W_USED.start + len(Algorithm))
_W_PROTOCOL: Final = slice(_W_ALGORITHM.stop, _W_ALGORITHM.stop + len(Protocol))
#: The one-hots of algorithms and of protocols; the last row is that of UNKNOWN, -1.
_ALGORITHMS: Final = np.eye(len(Algorithm) + 1, len(Algorithm), dtype=np.float32)
_PROTOCOLS: Final = np.eye(len(Protocol) + 1, len(Protocol), dtype=np.float32)
_LOG2: Final = np.log2(np.maximum(np.arange(1 << 16), 1)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Call:
    """One past call as the window holds it."""

    size_bytes: int
    time_us: float
    algorithm: Algorithm | None
    protocol: Protocol | None
    num_channels: int | None
    interference: float | None = None
    skew_us: float | None = None


@dataclass(frozen=True, slots=True)
class CallColumns:
    """Facts of calls as arrays of one shape; what is unknown is as UNKNOWN says."""

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
        """The facts at `index`, in its shape."""
        return type(self)(*(getattr(self, name)[index] for name in self.__slots__))

    def part(self, steps: slice) -> Self:
        """The facts of some rows, not copied."""
        return type(self)(*(getattr(self, name)[steps] for name in self.__slots__))

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Self:
        """One row a call."""
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
    # Something has to stand in the padding's place; it is not looked at.
    padded = CallColumns.of(recent or [Call(1, 1.0, None, None, None)])
    window, history = history_features(padded.take(np.maximum(slots, 0)[None]), valid[None])
    return window[0], history[0]


def history_features(
    calls: CallColumns, valid: npt.NDArray[np.bool_]
) -> tuple[Float32Array, Float32Array]:
    """Windows (N, K, W) and history features (N, H) of N windows of K calls.

    Calls are right-aligned, oldest first; where `valid` (N, K) is false there is padding, whose
    size and time must be positive, and which comes out as zeros.
    """
    window, gbytes_per_s = call_features(calls)
    window[..., _W["changed"]] = _changed(calls, valid)
    window[~valid] = 0.0
    return window, _history(calls, valid, gbytes_per_s, window[:, -1])


def call_features(calls: CallColumns) -> tuple[Float32Array, npt.NDArray[np.float64]]:
    """The window features (..., W) of calls by themselves, `changed` left 0, and size / time."""
    time_us = calls.time_us.astype(np.float64)
    gbytes_per_s = calls.size_bytes / (1000.0 * time_us)
    features = np.empty((*time_us.shape, len(WINDOW_FEATURES)), dtype=np.float32)
    channels = calls.num_channels
    throughput = np.log2(gbytes_per_s) - _LOG2[channels]
    features[..., _W["valid"]] = 1.0
    features[..., _W["log2_time"]] = np.log2(time_us)
    features[..., _W["log2_channel_throughput"]] = np.where(channels > 0, throughput, 0.0)
    features[..., _W_ALGORITHM] = _ALGORITHMS[calls.algorithm]
    features[..., _W_PROTOCOL] = _PROTOCOLS[calls.protocol]
    features[..., _W["log2_channels"]] = _LOG2[channels]
    features[..., _W["changed"]] = 0.0
    features[..., _W["interference"]] = np.maximum(calls.interference, 0.0)
    return features, gbytes_per_s


def _or_unknown(value: float | None) -> float:
    return UNKNOWN if value is None else value


def _changed(calls: CallColumns, valid: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(N, K) whether a call's config differs from that of the call before in its window."""
    changed = np.zeros(valid.shape, dtype=np.bool_)
    for knob in (calls.algorithm, calls.protocol, calls.num_channels):
        changed[:, 1:] |= knob[:, 1:] != knob[:, :-1]
    changed[:, 1:] &= valid[:, :-1]
    return changed


def _history(
    calls: CallColumns,
    valid: npt.NDArray[np.bool_],
    gbytes_per_s: npt.NDArray[np.float64],
    last: Float32Array,
) -> Float32Array:
    """History features (N, H); `last` (N, W) are the features of the windows' last calls."""
    history = np.zeros((len(valid), len(HISTORY_FEATURES)), dtype=np.float32)
    known = valid[:, -1]
    if not known.any():
        return history
    interference, skew_us = calls.interference[:, -1], calls.skew_us[:, -1].astype(np.float64)
    btlbw = np.where(valid, gbytes_per_s, 0.0).max(axis=1)
    rtprop_us = np.where(valid, calls.time_us.astype(np.float64), np.inf).min(axis=1)
    btlbw, rtprop_us = np.where(known, btlbw, 1.0), np.where(known, rtprop_us, 1.0)
    inflight = calls.size_bytes[:, -1] / (btlbw * rtprop_us * 1000.0)
    history[:, _H["last_known"]] = 1.0
    history[:, _H_USED] = last[:, _W_USED]
    history[:, _H["interference_known"]] = interference >= 0.0
    history[:, _H["interference"]] = np.maximum(interference, 0.0)
    history[:, _H["skew_known"]] = skew_us >= 0.0
    history[:, _H["log2_skew"]] = np.log2(1.0 + np.maximum(skew_us, 0.0))
    history[:, _H["sense_known"]] = 1.0
    history[:, _H["log2_ebb"]] = np.log2(gbytes_per_s[:, -1])
    history[:, _H["log2_btlbw"]] = np.log2(btlbw)
    history[:, _H["log2_rtprop"]] = np.log2(rtprop_us)
    history[:, _H["inflight_over_bdp"]] = np.minimum(inflight, MAX_INFLIGHT)
    history[~known] = 0.0
    return history
