"""Detection delay and false alarms of the Trigger and of rival detectors.

    python benchmarks/bench_trigger.py

A made-up site: keys whose log times have t3 noise of robust sigma 0.02 to 0.5, and a second one
whose noise is autocorrelated as well. On each a Trigger is trained and calibrated as
`dynamiccl-train trigger` does it, for 0.5 false alarms in 100,000 calls, and so is every rival.
Then fresh streams: 256 quiet calls that are known to be quiet, and from then on quiet calls, of
which all alarms are false, or a slowdown that stays. Writes out/bench/trigger.json:

    false_alarms_per_1e5, delay_1_5x_calls, delay_1_15x_calls      ours at sigma 0.1, medians
    ewma_..., clipped_cusum_..., pelt_...                          the same of the rivals
    sigma_S_... and RIVAL_sigma_S_...                              the same at other sigmas
    autocorrelated_...                                             the second site, sigma 0.1

null is a median delay of more than HORIZON calls. PELT's false alarms are measured at sigma 0.1
alone (standardised, they are the same at all).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import ruptures
import torch
from harness import write_result

from dynamiccl.train.policy import script
from dynamiccl.train.trigger import RUNGS, SMALLEST_SLOWDOWN, FloatArray
from dynamiccl.train.trigger_fit import (
    FALSE_ALARMS_PER_1E5,
    Peaks,
    Series,
    Watch,
    delays_of,
    make_trigger,
    watch_with,
)

SIGMAS: Final = (0.02, 0.1, 0.5)
MAIN: Final = 0.1
FACTORS: Final = {"1_5x": 1.5, "1_15x": 1.15}
#: Calls of a key that are known to be quiet.
KNOWN: Final = 256
WIDTH: Final = 500
QUIET: Final = 2_000
#: Rounds of WIDTH x QUIET quiet calls that are judged.
ROUNDS: Final = 3
ONSETS: Final = 1_024
HORIZON: Final = 500
PER_CALL: Final = FALSE_ALARMS_PER_1E5 * 1e-5
#: Robust sigma of Student's t with three degrees of freedom: 1.4826 x its upper quartile.
T3_SIGMA: Final = 1.4826 * 0.7648923
PERSISTENCE: Final = 0.9

_MAD: Final = 0.6745
_CLIP: Final = 3.0
Flags = npt.NDArray[np.bool_]
#: Standardised noise (T, N).
Noise = Callable[[np.random.Generator, int, int], FloatArray]
#: Log times of KNOWN quiet calls to a detector that has seen them.
Make = Callable[[FloatArray], Watch]


def t3_noise(random: np.random.Generator, steps: int, width: int) -> FloatArray:
    """Independent, of robust sigma 1."""
    return (random.standard_t(3, (steps, width)) / T3_SIGMA).astype(np.float32)


def autocorrelated_noise(random: np.random.Generator, steps: int, width: int) -> FloatArray:
    """Equal parts of t3 noise and of a slow wander, together of robust sigma about 1."""
    wander = np.empty((steps, width), dtype=np.float32)
    wander[0] = random.standard_normal(width)
    pushes = np.sqrt(1.0 - PERSISTENCE**2) * random.standard_normal((steps, width))
    for step in range(1, steps):
        wander[step] = PERSISTENCE * wander[step - 1] + pushes[step]
    return (wander + t3_noise(random, steps, width)) / np.float32(np.sqrt(2.0))


def site(noise: Noise, random: np.random.Generator) -> Series:
    """Quiet calls of 60 keys."""
    scales = np.exp(random.uniform(np.log(SIGMAS[0]), np.log(SIGMAS[-1]), 60)).astype(np.float32)
    times = noise(random, 4_000, 60) * scales
    return Series.of(list(times.T), [np.zeros(4_000, dtype=np.float32)] * 60)


def count_false_alarms(watch: Watch, log_time: FloatArray, known: int) -> tuple[int, int]:
    """Alarms that begin on quiet streams (T, N), and calls during one; the `known` calls aside."""
    was = np.zeros(log_time.shape[1], dtype=np.bool_)
    onsets = alarmed = 0
    for number, times in enumerate(log_time):
        now = watch(times)
        if number >= known:
            onsets += int((now & ~was).sum())
            alarmed += int(now.sum())
        was = now
    return onsets, alarmed


def judge(make: Make, noise: Noise, sigma: float, rounds: int, seed: int) -> dict[str, Any]:
    """False alarms and delays of a detector on fresh streams."""
    random = np.random.default_rng(seed)
    calls = onsets = alarmed = 0
    for _ in range(rounds):
        quiet = noise(random, KNOWN + QUIET, WIDTH) * np.float32(sigma) + np.float32(5.0)
        found, during = count_false_alarms(make(quiet[:KNOWN]), quiet[KNOWN:], 0)
        calls, onsets, alarmed = calls + QUIET * WIDTH, onsets + found, alarmed + during
    figures: dict[str, Any] = {}
    if calls:
        figures["false_alarms_per_1e5"] = 1e5 * onsets / calls
        figures["false_alarm_calls_share"] = alarmed / calls
        figures["quiet_calls"] = calls
    for name, factor in FACTORS.items():
        streams = noise(random, KNOWN + HORIZON, ONSETS) * np.float32(sigma) + np.float32(5.0)
        streams[KNOWN:] += np.float32(np.log(factor))
        found_after = delays_of(make(streams[:KNOWN]), streams[KNOWN:], 0)
        middle = float(np.median(found_after))
        figures[f"delay_{name}_calls"] = middle if np.isfinite(middle) else None
        figures[f"onsets_{name}"] = len(found_after)
    return figures


def our_maker(series: Series) -> Make:
    """A Trigger for a site."""
    module, _ = make_trigger(series)
    scripted = script(module)

    def make(known: FloatArray) -> Watch:
        watch = watch_with(scripted, known.shape[1])
        for times in known:
            watch(times)
        return watch

    return make


def rival_makers(noise: Noise, sigma: float, random: np.random.Generator) -> dict[str, Make]:
    """The charts, each with its threshold for this noise."""
    rounds = [
        noise(random, KNOWN + QUIET, WIDTH) * np.float32(sigma) + np.float32(5.0) for _ in range(2)
    ]
    makers: dict[str, Make] = {}
    for name, chart in CHARTS.items():
        threshold = chart_threshold(chart, rounds, PER_CALL)
        makers[name] = lambda known, c=chart, t=threshold: c(known).watch(t)  # type: ignore[misc]
    return makers


# --- rivals: each has its key's first KNOWN calls to learn what is quiet ---


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
    return peaks.threshold(per_call)


def pelt_penalty(log_time: FloatArray, per_call: float) -> float:
    """The penalty for a false alarm rate, interpolated between two penalties."""
    penalties, quiet = (14.0, 20.0), log_time[KNOWN:]
    watches = [Pelt(log_time[:KNOWN]).watch(penalty) for penalty in penalties]
    rates = [count_false_alarms(watch, quiet, 0)[0] / quiet.size for watch in watches]
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


# --- what is judged ---


def main() -> None:
    """Train on both sites, judge, write."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    figures: dict[str, Any] = {
        "wanted_false_alarms_per_1e5": FALSE_ALARMS_PER_1E5,
        "robust_sigma": MAIN,
    }
    ours = our_maker(site(t3_noise, random))
    figures |= judge(ours, t3_noise, MAIN, ROUNDS, 1)
    quiet = t3_noise(random, KNOWN + 500, WIDTH)
    penalty = pelt_penalty(quiet, PER_CALL)
    for sigma in SIGMAS:
        makers = rival_makers(t3_noise, sigma, random)
        makers["pelt"] = lambda known: Pelt(known).watch(penalty)
        if sigma != MAIN:
            found = judge(ours, t3_noise, sigma, 1, 2)
            figures |= {f"sigma_{sigma}_{key}": value for key, value in found.items()}
        for name, make in makers.items():
            rounds = 1 if name != "pelt" or sigma == MAIN else 0
            found = judge(make, t3_noise, sigma, rounds, 3)
            prefix = name if sigma == MAIN else f"{name}_sigma_{sigma}"
            figures |= {f"{prefix}_{key}": value for key, value in found.items()}
    makers = {"": our_maker(site(autocorrelated_noise, random))} | {
        f"{name}_": make for name, make in rival_makers(autocorrelated_noise, MAIN, random).items()
    }
    for name, make in makers.items():
        found = judge(make, autocorrelated_noise, MAIN, 1, 4)
        figures |= {f"autocorrelated_{name}{key}": value for key, value in found.items()}
    write_result("trigger", figures)


if __name__ == "__main__":
    main()
