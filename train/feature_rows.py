"""Features of all steps, computed once: what makes a batch a copy.

`Steps.observe` defines what a step sees. It takes logarithms of every call of every window, each
time; here each call has its row of window features, and a row of what the history is when it is the
last call. 104 bytes a step, so it is for steps that fit the memory, and only where windows are the
calls before a step.

N steps, B rows of a batch, K calls in the window, W features of a call.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import (
    CONFIG_USED,
    FEATURES,
    HISTORY_FEATURES,
    MAX_INFLIGHT,
    STATIC_FEATURES,
    WINDOW_FEATURES,
    WINDOW_LENGTH,
    Float32Array,
    Observations,
)
from dynamiccl.datasets.history import call_features
from dynamiccl.datasets.steps import Int64Array, Steps

#: Steps that are worked on at a time: they stay in the processor's cache.
_PART: Final = 1 << 14
_W: Final = {feature.name: index for index, feature in enumerate(WINDOW_FEATURES)}
_C: Final = {feature.name: index for index, feature in enumerate(FEATURES)}
_USED: Final = slice(_W[CONFIG_USED[0].name], _W[CONFIG_USED[-1].name] + 1)
_H: Final = len(STATIC_FEATURES)
_H_USED: Final = slice(_C[f"last_{CONFIG_USED[0].name}"], _C[f"last_{CONFIG_USED[-1].name}"] + 1)
#: The history features that do not repeat the window's, in order; the step's own size comes last.
_REST: Final = slice(_H_USED.stop, _H + len(HISTORY_FEATURES))
_R: Final = {f.name: i - _REST.start for i, f in enumerate(FEATURES) if i >= _REST.start}
_SIZE: Final = len(_R)
_LOOK_BACK: Final = np.arange(-WINDOW_LENGTH, 0)


class FeatureRows:
    """Observes steps as `Steps.observe` does, ten times as fast."""

    def __init__(self, steps: Steps) -> None:
        """Compute every step's rows; raises ValueError for steps with windows of their own."""
        if steps.windows is not None:
            raise ValueError("these steps have windows of their own")
        self._steps = steps
        self._calls = np.empty((len(steps), len(WINDOW_FEATURES)), dtype=np.float32)
        self._rest = np.empty((len(steps), _SIZE + 1), dtype=np.float32)
        is_first = np.zeros(len(steps), dtype=np.bool_)
        is_first[steps.starts[:-1]] = True
        for start in range(0, len(steps), _PART):
            self._fill(start, min(start + _PART, len(steps)), is_first)

    def observe(
        self, rows: Int64Array, episode: Int64Array
    ) -> tuple[Observations, Float32Array, Int64Array]:
        """As `Steps.observe`."""
        steps = self._steps
        num_calls = np.minimum(rows - steps.starts[episode], WINDOW_LENGTH)
        window = self._calls.take(rows[:, None] + _LOOK_BACK, axis=0, mode="clip")
        window[:, 0, _W["changed"]] = 0.0  # nothing is before the window's first
        task = steps.task[episode]
        context = steps.tasks.context.take(task, axis=0)
        size = self._rest[rows, _SIZE]
        context[:, _C["log2_size"]] = size
        context[:, _C["log2_bytes_per_rank"]] = size - context[:, _C["log2_ranks"]]
        context[:, _C["last_known"]] = 1.0
        context[:, _H_USED] = window[:, -1, _USED]
        context[:, _REST] = self._rest.take(rows - 1, axis=0, mode="clip")[:, :_SIZE]
        short = np.flatnonzero(num_calls < WINDOW_LENGTH)
        if len(short):
            padded, context_of = window[short], context[short]
            padded[num_calls[short, None] < -_LOOK_BACK] = 0.0
            context_of[num_calls[short] == 0, _H : _REST.stop] = 0.0
            window[short], context[short] = padded, context_of
        return Observations(window, context), steps.tasks.mask.take(task, axis=0), task

    def _fill(self, start: int, end: int, is_first: npt.NDArray[np.bool_]) -> None:
        """The rows of some steps, which need the window before them as well."""
        before = max(0, start - WINDOW_LENGTH)
        calls = self._steps.calls.part(slice(before, end))
        own = slice(start - before, None)
        features, gbytes_per_s = call_features(calls)
        first = is_first[before:end]
        for knob in (calls.algorithm, calls.protocol, calls.num_channels):
            features[1:, _W["changed"]] += knob[1:] != knob[:-1]
        features[:, _W["changed"]] = (features[:, _W["changed"]] > 0.0) & ~first
        self._calls[start:end] = features[own]
        ebb = np.log2(gbytes_per_s)
        times = np.log2(calls.time_us, dtype=np.float64)
        btlbw = _over_window(ebb, first, np.maximum)
        rtprop = _over_window(times, first, np.minimum)
        rest = self._rest[start:end]
        rest[:, _R["interference_known"]] = calls.interference[own] >= 0.0
        rest[:, _R["interference"]] = features[own, _W["interference"]]
        rest[:, _R["skew_known"]] = calls.skew_us[own] >= 0.0
        rest[:, _R["log2_skew"]] = np.log2(1.0 + np.maximum(calls.skew_us[own], 0.0, dtype=float))
        rest[:, _R["sense_known"]] = 1.0
        rest[:, _R["log2_ebb"]] = ebb[own]
        rest[:, _R["log2_btlbw"]] = btlbw[own]
        rest[:, _R["log2_rtprop"]] = rtprop[own]
        # size / (BtlBw x RTprop), with size = EBB x time.
        inflight = np.exp2((ebb + times - btlbw - rtprop)[own])
        rest[:, _R["inflight_over_bdp"]] = np.minimum(inflight, MAX_INFLIGHT)
        rest[:, _SIZE] = np.log2(np.maximum(calls.size_bytes[own], 1))


def _over_window(
    values: npt.NDArray[np.float64], is_first: npt.NDArray[np.bool_], better: np.ufunc
) -> npt.NDArray[np.float64]:
    """The best of each value and the WINDOW_LENGTH - 1 before it in its episode."""
    best = values.copy()
    reaches = ~is_first  # whether the episode goes back as far
    for back in range(1, min(WINDOW_LENGTH, len(values))):
        goes = reaches[back:]
        best[back:] = np.where(goes, better(best[back:], values[:-back]), best[back:])
        reaches = np.concatenate([reaches[:1], reaches[1:] & reaches[:-1]])
    return best
