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
from typing import Any, Final

import numpy as np
import torch
from harness import write_result
from trigger_rivals import CHARTS, KNOWN, Pelt, chart_threshold, pelt_penalty

from dynamiccl.train.policy import script
from dynamiccl.train.trigger.calibration import Watch, delays_of, watch_with
from dynamiccl.train.trigger.fit import FALSE_ALARMS_PER_1E5, TriggerSettings, make_trigger
from dynamiccl.train.trigger.series import FloatArray, Series

SIGMAS: Final = (0.02, 0.1, 0.5)
MAIN: Final = 0.1
FACTORS: Final = {"1_5x": 1.5, "1_15x": 1.15}
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
    module, _, _ = make_trigger(series, TriggerSettings())
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
