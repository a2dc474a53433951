"""Calibrates thresholds to a false alarm rate, by simulated average run lengths.

The whole detector, warm-up and forecaster included, runs on streams drawn from quiet calls,
without a threshold. Where its sums leave zero and come back there is one *excursion*, and a
threshold has as many false alarms as there are excursions that reach it. Far out in the tail, where
even millions of calls show few, the peaks of excursions are exponential (a random walk with
negative drift), and that is fitted to the largest.
"""

import copy
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dynamiccl.train.policy import script
from dynamiccl.train.trigger.detector import Detector
from dynamiccl.train.trigger.module import RUNGS, SMALLEST_SLOWDOWN, TriggerModule
from dynamiccl.train.trigger.series import FloatArray, Series

#: Told of the work in hand, and how much of it is done.
Progress = Callable[[str, int, int], None]
#: Quiet calls that are run for each rung.
CALLS_PER_RUNG: Final = 1_000_000
#: Streams that run side by side, and calls of each: as long as streams live in a job, roughly.
_WIDTH: Final = 500
_LENGTH: Final = 2_000
#: Peaks that the tail is fitted to.
_TAIL: Final = 100
#: No threshold while excursions are looked for; streams that get here begin anew.
_NO_THRESHOLD: Final = 1000.0


class Peaks:
    """Peaks of the excursions of a statistic above zero, over N streams."""

    def __init__(self, width: int, floor: float = 0.0) -> None:
        """Peaks up to `floor` are dropped."""
        self._peak = np.zeros(width)
        self._found: list[npt.NDArray[np.float64]] = []
        self._floor = floor
        self.calls = 0

    def take(self, statistic: npt.NDArray[Any], at_rest: npt.NDArray[np.bool_]) -> None:
        """Add the statistic (N,) after one call of each stream, and where its excursion ended."""
        self.calls += len(statistic)
        np.maximum(self._peak, statistic, out=self._peak)
        self._end(at_rest)

    def end(self) -> None:
        """End all streams and their excursions."""
        self._end(np.ones(len(self._peak), dtype=np.bool_))

    def _end(self, where: npt.NDArray[np.bool_]) -> None:
        ended = where & (self._peak > self._floor)
        if ended.any():
            self._found.append(self._peak[ended])
        self._peak[where] = 0.0

    def all(self) -> npt.NDArray[np.float64]:
        """The peaks of all ended excursions, largest first."""
        return np.sort(np.concatenate([np.zeros(0), *self._found]))[::-1]

    def threshold(self, per_call: float) -> float:
        """The threshold that a fraction `per_call` of calls would cross.

        Raises ValueError without any peak.
        """
        peaks, wanted = self.all(), per_call * self.calls
        if len(peaks) == 0:
            raise ValueError("a statistic that never left its rest has no threshold")
        if wanted >= _TAIL and wanted < len(peaks):
            return float(peaks[int(wanted)])
        count = min(_TAIL, max(len(peaks) // 2, 1))
        base = peaks[count - 1]
        mean_excess = float(np.mean(peaks[:count] - base))
        return float(base + mean_excess * np.log(count / wanted))


def scale_of_rung(rung: float) -> float:
    """The noise (robust sigma of log time) of a rung."""
    return 0.5 * float(np.log(SMALLEST_SLOWDOWN)) / rung


def find_peaks(
    module: TriggerModule,
    series: Series,
    calls_per_rung: int,
    *,
    seed: int,
    progress: Progress = lambda _what, _done, _total: None,
) -> list[Peaks]:
    """Run the detector on quiet streams at the noise of each rung; the peaks of each."""
    random = np.random.default_rng(seed)
    without = copy.deepcopy(module)
    without.set_thresholds([_NO_THRESHOLD] * len(RUNGS))
    scripted = script(without)  # a fifth faster
    length = min(_LENGTH, max(calls_per_rung // _WIDTH, 1))
    rounds = max(calls_per_rung // (_WIDTH * length), 1)
    found = []
    for number, rung in enumerate(RUNGS):
        peaks = Peaks(_WIDTH, floor=1.0)
        for turn in range(rounds):
            values, sizes, _ = series.draw(random, _WIDTH, length)
            log_time = values * np.float32(scale_of_rung(rung)) + np.float32(5.0)
            _run(scripted, log_time, sizes, peaks)
            progress("calibrating", number * rounds + turn + 1, rounds * len(RUNGS))
        found.append(peaks)
    return found


def _run(module: Any, log_time: FloatArray, sizes: FloatArray, peaks: Peaks) -> None:
    times, log_sizes = torch.from_numpy(log_time), torch.from_numpy(np.ascontiguousarray(sizes))
    with torch.inference_mode():
        state = module.new_state(log_time.shape[1])
        for time, size in zip(times, log_sizes, strict=True):
            state, _, _ = module(state, time, size)
            sums = state[:, 3:5].amax(dim=1).numpy()
            peaks.take(sums, sums <= 0.0)
    peaks.end()


#: Log times (N,) to alarms (N,), with a state of its own.
Watch = Callable[[FloatArray], npt.NDArray[np.bool_]]


def watch_with(module: Any, width: int) -> Watch:
    """A Trigger over `width` new streams; alarms of both directions count."""
    detector, streams = Detector(module), np.arange(width)
    return lambda log_time: detector.observe(streams, log_time)[0] != 0


def delays_of(watch: Watch, log_time: FloatArray, onset: int) -> FloatArray:
    """Calls from the onset (the first slow call is 1) to the alarm; infinite where none came.

    Of streams (T, N) that are slow from call `onset` on; those that were alarmed before are left
    out.
    """
    found = np.full(log_time.shape[1], np.inf, dtype=np.float32)
    before = np.zeros(log_time.shape[1], dtype=np.bool_)
    for number, times in enumerate(log_time):
        now = watch(times)
        if number < onset:
            before = now
        else:
            found[now & np.isinf(found)] = number - onset + 1
            if not np.isinf(found[~before]).any():
                break
    return found[~before]
