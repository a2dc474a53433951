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

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import ruptures
import torch
from harness import write_result

from dynamiccl.train.policy import script
from dynamiccl.train.trigger import RUNGS, SMALLEST_SLOWDOWN, Detector, FloatArray
from dynamiccl.train.trigger_fit import (
    FALSE_ALARMS_PER_1E5,
    Bools,
    Series,
    make_trigger,
    peaks_of,
    threshold_of,
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
Floats = npt.NDArray[np.float64]
#: Standardised noise (T, N).
Noise = Callable[[np.random.Generator, int, int], FloatArray]
#: Log times (KNOWN + T, N) to alarms of the same shape.
Detect = Callable[[FloatArray], Bools]


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


def count_onsets(alarms: Bools) -> int:
    """Alarms that begin, of streams (T, N)."""
    return int(alarms[0].sum() + (alarms[1:] & ~alarms[:-1]).sum())


def alarms_of(module: Any, log_time: FloatArray) -> Bools:
    """(T, N) whether a Trigger is alarmed, in either direction, over new streams."""
    detector, streams = Detector(module), np.arange(log_time.shape[1])
    return np.array([detector.observe(streams, times)[0] != 0 for times in log_time])


def delays_of(alarms: Bools, onset: int) -> npt.NDArray[np.float64]:
    """Calls from `onset` (as 1) to the alarm, or infinite, of streams (T, N) not alarmed before."""
    later = alarms[onset:, ~alarms[onset - 1]]
    return np.where(later.any(axis=0), later.argmax(axis=0) + 1.0, np.inf)


def judge(detect: Detect, noise: Noise, sigma: float, rounds: int, seed: int) -> dict[str, Any]:
    """False alarms and delays of a detector on fresh streams."""
    random = np.random.default_rng(seed)

    def streams(calls: int, width: int) -> FloatArray:
        return noise(random, KNOWN + calls, width) * np.float32(sigma) + np.float32(5.0)

    figures: dict[str, Any] = {}
    if rounds:
        quiet = [detect(streams(QUIET, WIDTH))[KNOWN:] for _ in range(rounds)]
        figures["false_alarms_per_1e5"] = 1e5 * sum(map(count_onsets, quiet)) / np.size(quiet)
        figures["false_alarm_calls_share"] = float(np.mean(quiet))
        figures["quiet_calls"] = np.size(quiet)
    for name, factor in FACTORS.items():
        slowed = streams(HORIZON, ONSETS)
        slowed[KNOWN:] += np.float32(np.log(factor))
        found = delays_of(detect(slowed), KNOWN)
        middle = float(np.median(found))
        figures[f"delay_{name}_calls"] = middle if np.isfinite(middle) else None
        figures[f"onsets_{name}"] = len(found)
    return figures


def our_trigger(series: Series) -> Detect:
    """A Trigger for a site."""
    return partial(alarms_of, script(make_trigger(series)[0]))


# --- rivals: each has its key's first KNOWN calls to learn what is quiet ---


def standardised(log_time: FloatArray) -> tuple[Floats, Floats]:
    """Log times by the median and MAD of the known calls, and these MADs as sigmas (N,)."""
    middle = np.median(log_time[:KNOWN], axis=0)
    scale = np.median(np.abs(log_time[:KNOWN] - middle), axis=0) / _MAD
    return (log_time - middle) / scale, scale


def ewma(log_time: FloatArray) -> Floats:
    """EWMA, in units of its own deviation, of the calls after the known ones."""
    gain, mean, found = 0.1, np.zeros(log_time.shape[1]), []
    for now in standardised(log_time)[0][KNOWN:]:
        mean = mean + gain * (now - mean)
        found.append(np.abs(mean) / np.sqrt(gain / (2.0 - gain)))
    return np.array(found)


def clipped_cusum(log_time: FloatArray) -> Floats:
    """The larger of two CUSUMs of calls clipped at 3, after the known ones."""
    standard, scale = standardised(log_time)
    # Half of the smallest slowdown, within what the Trigger has, too.
    reference = (0.5 * np.log(SMALLEST_SLOWDOWN) / scale).clip(RUNGS[-1], RUNGS[0])
    up, down, found = np.zeros_like(scale), np.zeros_like(scale), []
    for now in standard[KNOWN:].clip(-_CLIP, _CLIP):
        up = np.maximum(up + now - reference, 0.0)
        down = np.maximum(down - now - reference, 0.0)
        found.append(np.maximum(up, down))
    return np.array(found)


Chart = Callable[[FloatArray], Floats]
#: Charts, and the statistic below which an alarm is over.
CHARTS: Final[dict[str, tuple[Chart, float]]] = {
    "ewma": (ewma, 1.0),
    "clipped_cusum": (clipped_cusum, 0.0),
}


def charted(log_time: FloatArray, chart: Chart, rest: float, threshold: float) -> Bools:
    """Alarms of a chart, from its threshold on until it rests."""
    alarms = np.zeros(log_time.shape, dtype=np.bool_)
    for number, value in enumerate(chart(log_time), KNOWN):
        alarms[number] = (value >= threshold) | (alarms[number - 1] & (value > rest))
    return alarms


def calibrated(noise: Noise, sigma: float, random: np.random.Generator) -> dict[str, Detect]:
    """The charts, each with its threshold for this noise."""
    rounds = [
        noise(random, KNOWN + QUIET, WIDTH) * np.float32(sigma) + np.float32(5.0) for _ in range(2)
    ]
    found: dict[str, Detect] = {}
    for name, (chart, rest) in CHARTS.items():
        peaks = np.concatenate([peaks_of(chart(log_time), rest) for log_time in rounds])
        threshold = threshold_of(np.sort(peaks)[::-1], PER_CALL * 2 * QUIET * WIDTH)
        found[name] = partial(charted, chart=chart, rest=rest, threshold=threshold)
    return found


def pelt(log_time: FloatArray, penalty: float, window: int = 48) -> Bools:
    """Alarms while PELT (ruptures, least squares) finds a change in the last clipped calls."""
    standard = standardised(log_time)[0].clip(-_CLIP, _CLIP).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(standard, window, axis=0)
    alarms = np.zeros(log_time.shape, dtype=np.bool_)
    for number, stream in np.ndindex(len(log_time) - KNOWN, log_time.shape[1]):
        row = windows[KNOWN + number - window + 1, stream]
        found = ruptures.KernelCPD(kernel="linear", min_size=2).fit(row.copy())
        alarms[KNOWN + number, stream] = len(found.predict(pen=penalty)) > 1
    return alarms


def pelt_penalty(log_time: FloatArray) -> float:
    """The penalty for the wanted false alarms, interpolated between two penalties."""
    low, high = 14.0, 20.0
    rates = [count_onsets(pelt(log_time, each)[KNOWN:]) for each in (low, high)]
    wanted = PER_CALL * log_time[KNOWN:].size
    slope = np.log(rates[1] / rates[0]) / (high - low)
    return float(high + np.log(wanted / rates[1]) / slope)


def main() -> None:
    """Train on both sites, judge, write."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    figures: dict[str, Any] = {
        "wanted_false_alarms_per_1e5": FALSE_ALARMS_PER_1E5,
        "robust_sigma": MAIN,
    }
    ours = our_trigger(site(t3_noise, random))
    figures |= judge(ours, t3_noise, MAIN, ROUNDS, 1)
    penalty = pelt_penalty(t3_noise(random, KNOWN + 500, WIDTH))
    for sigma in SIGMAS:
        rivals = calibrated(t3_noise, sigma, random) | {"pelt": partial(pelt, penalty=penalty)}
        if sigma != MAIN:
            found = judge(ours, t3_noise, sigma, 1, 2)
            figures |= {f"sigma_{sigma}_{key}": value for key, value in found.items()}
        for name, detect in rivals.items():
            rounds = 1 if name != "pelt" or sigma == MAIN else 0
            found = judge(detect, t3_noise, sigma, rounds, 3)
            prefix = name if sigma == MAIN else f"{name}_sigma_{sigma}"
            figures |= {f"{prefix}_{key}": value for key, value in found.items()}
    detectors = {"": our_trigger(site(autocorrelated_noise, random))} | {
        f"{name}_": each for name, each in calibrated(autocorrelated_noise, MAIN, random).items()
    }
    for name, detect in detectors.items():
        found = judge(detect, autocorrelated_noise, MAIN, 1, 4)
        figures |= {f"autocorrelated_{name}{key}": value for key, value in found.items()}
    write_result("trigger", figures)


if __name__ == "__main__":
    main()
