"""Rival detectors of the Trigger: EWMA, a CUSUM, and ruptures' PELT.

Each has its key's first KNOWN calls to learn what is quiet, and a threshold for the same rate of
false alarms, found as the Trigger's is (`calibration.py`). N streams side by side.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import ruptures

from dynamiccl.train.trigger.calibration import Peaks, threshold_for
from dynamiccl.train.trigger.module import RUNGS, SMALLEST_SLOWDOWN
from dynamiccl.train.trigger.series import FloatArray

Flags = npt.NDArray[np.bool_]

#: Calls of a key that are known to be quiet.
KNOWN: Final = 256
_MAD: Final = 0.6745
_CLIP: Final = 3.0


class Chart(ABC):
    """A control chart: a statistic of N streams; large values are alarms."""

    #: Below which an alarm is over.
    rest = 0.0

    @abstractmethod
    def __init__(self, known: FloatArray) -> None:
        """Learn from log times (KNOWN, N)."""

    @abstractmethod
    def take(self, log_time: FloatArray) -> npt.NDArray[np.float64]:
        """The statistic (N,) after one more call of each."""

    def watch(self, threshold: float) -> Callable[[FloatArray], Flags]:
        """Alarms: from the threshold on until the statistic rests."""
        alarmed: list[Flags] = [np.zeros(0, dtype=np.bool_)]

        def watch(log_time: FloatArray) -> Flags:
            value = self.take(log_time)
            if len(alarmed[0]) != len(value):
                alarmed[0] = np.zeros(len(value), dtype=np.bool_)
            alarmed[0] = (value >= threshold) | (alarmed[0] & (value > self.rest))
            return alarmed[0]

        return watch


class Ewma(Chart):
    """EWMA of log time, standardised by median and MAD, in units of its own deviation."""

    rest = 1.0
    gain = 0.1

    def __init__(self, known: FloatArray) -> None:
        self._level, self._scale = _robust(known)
        self._mean = np.zeros(known.shape[1])

    def take(self, log_time: FloatArray) -> npt.NDArray[np.float64]:
        """The mean's distance from the level."""
        self._mean += self.gain * ((log_time - self._level) / self._scale - self._mean)
        found: npt.NDArray[np.float64]
        found = np.abs(self._mean) / np.sqrt(self.gain / (2.0 - self.gain))
        return found


class ClippedCusum(Chart):
    """Two-sided CUSUM of log time, standardised by median and MAD, clipped at 3."""

    def __init__(self, known: FloatArray) -> None:
        self._level, self._scale = _robust(known)
        self._reference = _reference(self._scale)
        self._sums = np.zeros((2, known.shape[1]))

    def take(self, log_time: FloatArray) -> npt.NDArray[np.float64]:
        """The larger sum."""
        standard = np.clip((log_time - self._level) / self._scale, -_CLIP, _CLIP)
        return _advance(self._sums, standard, self._reference)


class Pelt:
    """PELT (ruptures, least squares) on the last WINDOW clipped, standardised log times.

    Alarmed as long as it finds a change in the window.
    """

    window: Final = 48
    least: Final = 2

    def __init__(self, known: FloatArray) -> None:
        """Learn from log times (KNOWN, N), whose last ones are the first window."""
        self._level, self._scale = _robust(known)
        self._kept = self._standard(known[-self.window :]).T.copy()

    def _standard(self, log_time: FloatArray) -> npt.NDArray[np.float64]:
        standard = (log_time - self._level) / self._scale
        found: npt.NDArray[np.float64] = np.clip(standard, -_CLIP, _CLIP).astype(np.float64)
        return found

    def watch(self, penalty: float) -> Callable[[FloatArray], Flags]:
        """Alarms, by a penalty for each change."""

        def watch(log_time: FloatArray) -> Flags:
            self._kept = np.roll(self._kept, -1, axis=1)
            self._kept[:, -1] = self._standard(log_time)
            return np.array([self._has_change(row, penalty) for row in self._kept])

        return watch

    def _has_change(self, row: npt.NDArray[np.float64], penalty: float) -> bool:
        found = ruptures.KernelCPD(kernel="linear", min_size=self.least).fit(row)
        return len(found.predict(pen=penalty)) > 1


CHARTS: Final[dict[str, type[Chart]]] = {
    "ewma": Ewma,
    "clipped_cusum": ClippedCusum,
}


def chart_threshold(chart: type[Chart], rounds: list[FloatArray], per_call: float) -> float:
    """The threshold for a false alarm rate, from excursions on quiet streams (KNOWN + T, N)."""
    peaks = Peaks(rounds[0].shape[1], floor=chart.rest)
    for log_time in rounds:
        made = chart(log_time[:KNOWN])
        for times in log_time[KNOWN:]:
            value = made.take(times)
            peaks.take(value, value <= made.rest)
        peaks.end()
    return threshold_for(peaks.all(), peaks.calls, per_call)


def pelt_penalty(log_time: FloatArray, per_call: float) -> float:
    """The penalty for a false alarm rate, interpolated between two penalties."""
    penalties, rates = (14.0, 20.0), []
    for penalty in penalties:
        watch, onsets = Pelt(log_time[:KNOWN]).watch(penalty), 0
        was = np.zeros(log_time.shape[1], dtype=np.bool_)
        for times in log_time[KNOWN:]:
            now = watch(times)
            onsets += int((now & ~was).sum())
            was = now
        rates.append(onsets / log_time[KNOWN:].size)
    slope = np.log(rates[1] / rates[0]) / (penalties[1] - penalties[0])
    return float(penalties[1] + np.log(per_call / rates[1]) / slope)


def _robust(known: FloatArray) -> tuple[FloatArray, FloatArray]:
    middle = np.median(known, axis=0)
    return middle, np.median(np.abs(known - middle), axis=0) / _MAD


def _reference(scale: FloatArray) -> FloatArray:
    """Half of the smallest slowdown in standard units, within what the Trigger has, too."""
    reference: FloatArray = 0.5 * np.log(SMALLEST_SLOWDOWN) / scale
    return reference.clip(RUNGS[-1], RUNGS[0])


def _advance(
    sums: npt.NDArray[np.float64], standard: FloatArray, reference: FloatArray
) -> npt.NDArray[np.float64]:
    """One step of both sums; returns the larger."""
    sums[0] = np.maximum(sums[0] + standard - reference, 0.0)
    sums[1] = np.maximum(sums[1] - standard - reference, 0.0)
    larger: npt.NDArray[np.float64] = sums.max(axis=0)
    return larger
