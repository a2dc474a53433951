"""Made-up quiet calls, and quickly trained Triggers for them."""

import numpy as np
import torch

from dynamiccl.train.trigger import TriggerModule
from dynamiccl.train.trigger_fit import FloatArray, Series, find_peaks

#: Robust sigma of Student's t with three degrees of freedom: 1.4826 x its upper quartile.
T3_SIGMA = 1.4826 * 0.7648923


def t3(random: np.random.Generator, steps: int, width: int, sigma: float = 1.0) -> FloatArray:
    """Heavy-tailed noise (steps, width) of a robust sigma."""
    return (random.standard_t(3, (steps, width)) * sigma / T3_SIGMA).astype(np.float32)


def made_up_series(seed: int = 0, keys: int = 30, calls: int = 1_000) -> Series:
    """Quiet calls of keys with noise of 0.02 to 0.5."""
    random = np.random.default_rng(seed)
    scales = np.exp(random.uniform(np.log(0.02), np.log(0.5), keys)).astype(np.float32)
    times = t3(random, calls, keys) * scales
    return Series.of(list(times.T), [np.zeros(calls, dtype=np.float32)] * keys)


class Calibration:
    """Triggers whose forecast is the level alone, for any rate of false alarms."""

    def __init__(self, series: Series, calls_per_rung: int) -> None:
        torch.manual_seed(0)
        self._module = TriggerModule(series.usual_scale).eval()
        self._peaks = find_peaks(self._module, series, calls_per_rung, seed=1)

    def trigger(self, per_call: float) -> TriggerModule:
        self._module.set_thresholds([each.threshold(per_call) for each in self._peaks])
        return self._module
