"""Detection delay and false alarms of the Trigger, and of a CUSUM of clipped calls.

    python benchmarks/bench_trigger.py

A made-up site: keys whose log times have t3 noise of robust sigma 0.02 to 0.5, and a second one
whose noise is autocorrelated as well. On each a Trigger is trained and calibrated as
`dynamiccl-train trigger` does it, for 0.5 false alarms in 100,000 calls, and so is the rival.
Then fresh streams: 256 calls that are known to be quiet, and from then on quiet calls, of which all
alarms are false, or a slowdown that stays. `delay_*` are medians, null beyond HORIZON calls; names
without a sigma are of 0.1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from harness import write_result

from dynamiccl.train import trigger_fit as fitting
from dynamiccl.train.policy import script
from dynamiccl.train.trigger import RUNGS, SMALLEST_SLOWDOWN, Detector, FloatArray
from dynamiccl.train.trigger_fit import FALSE_ALARMS_PER_1E5, Bools, Series

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


def streams_of(noise: Noise, sigma: float, random: np.random.Generator, *shape: int) -> FloatArray:
    """Log times of streams (T, N), behind KNOWN calls."""
    calls, width = shape
    return noise(random, KNOWN + calls, width) * np.float32(sigma) + np.float32(5.0)


def judge(detect: Detect, noise: Noise, sigma: float, rounds: int, seed: int) -> dict[str, Any]:
    """False alarms and delays of a detector on fresh streams."""
    streams = partial(streams_of, noise, sigma, np.random.default_rng(seed))
    quiet = [detect(streams(QUIET, WIDTH))[KNOWN:] for _ in range(rounds)]
    figures: dict[str, Any] = {
        "false_alarms_per_1e5": 1e5 * sum(map(count_onsets, quiet)) / np.size(quiet),
        "quiet_calls": np.size(quiet),
    }
    for name, factor in FACTORS.items():
        slowed = streams(HORIZON, ONSETS)
        slowed[KNOWN:] += np.float32(np.log(factor))
        alarms = detect(slowed)
        # Calls from the onset (as 1) to the alarm, of streams that were not alarmed before.
        later = alarms[KNOWN:, ~alarms[KNOWN - 1]]
        middle = np.median(np.where(later.any(axis=0), later.argmax(axis=0) + 1.0, np.inf))
        figures[f"delay_{name}_calls"] = float(middle) if np.isfinite(middle) else None
    return figures


def clipped_cusum(log_time: FloatArray) -> Floats:
    """The larger of two CUSUMs after the known calls, whose median and MAD scale it; clipped."""
    middle = np.median(log_time[:KNOWN], axis=0)
    scale = np.median(np.abs(log_time[:KNOWN] - middle), axis=0) / _MAD
    # Half of the smallest slowdown, within what the Trigger has, too.
    reference = (0.5 * np.log(SMALLEST_SLOWDOWN) / scale).clip(RUNGS[-1], RUNGS[0])
    up, down, found = np.zeros_like(scale), np.zeros_like(scale), []
    for now in ((log_time[KNOWN:] - middle) / scale).clip(-_CLIP, _CLIP):
        up = np.maximum(up + now - reference, 0.0)
        down = np.maximum(down - now - reference, 0.0)
        found.append(np.maximum(up, down))
    return np.array(found)


def alarms_of_cusum(log_time: FloatArray, threshold: float) -> Bools:
    """Alarms from the threshold on until the sum is 0."""
    alarms = np.zeros(log_time.shape, dtype=np.bool_)
    for number, value in enumerate(clipped_cusum(log_time), KNOWN):
        alarms[number] = (value >= threshold) | (alarms[number - 1] & (value > 0.0))
    return alarms


def calibrated(noise: Noise, sigma: float, random: np.random.Generator) -> Detect:
    """The rival with its threshold for this noise."""
    streams = partial(streams_of, noise, sigma, random)
    peaks = [fitting.peaks_of(clipped_cusum(streams(QUIET, WIDTH))) for _ in range(2)]
    highest = np.sort(np.concatenate(peaks))[::-1]
    threshold = fitting.threshold_of(highest, FALSE_ALARMS_PER_1E5 * 1e-5 * 2 * QUIET * WIDTH)
    return partial(alarms_of_cusum, threshold=threshold)


def main() -> None:
    """Train on both sites, judge, write."""
    torch.set_num_threads(1)
    random, figures = np.random.default_rng(0), dict[str, Any]()
    for noise, place, sigmas in (
        (t3_noise, "", SIGMAS),
        (autocorrelated_noise, "autocorrelated_", (MAIN,)),
    ):
        ours = partial(alarms_of, script(fitting.make_trigger(site(noise, random))[0]))
        for sigma in sigmas:
            is_main = sigma == MAIN
            name, rounds = ("", ROUNDS) if is_main else (f"sigma_{sigma}_", 1)
            found = judge(ours, noise, sigma, rounds, 1 if is_main else 2)
            figures |= {f"{place}{name}{key}": each for key, each in found.items()}
            found = judge(calibrated(noise, sigma, random), noise, sigma, 1, 3)
            figures |= {f"{place}clipped_cusum_{name}{key}": each for key, each in found.items()}
    write_result("trigger", figures)


if __name__ == "__main__":
    main()
