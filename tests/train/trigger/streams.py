"""Made-up quiet calls."""

import numpy as np

from dynamiccl.train.trigger import FloatArray
from dynamiccl.train.trigger_fit import Series

#: Robust sigma of Student's t with three degrees of freedom: 1.4826 x its upper quartile.
T3_SIGMA = 1.4826 * 0.7648923


def t3(random: np.random.Generator, steps: int, width: int, sigma: float = 1.0) -> FloatArray:
    """Heavy-tailed noise (steps, width) of a robust sigma."""
    return (random.standard_t(3, (steps, width)) * sigma / T3_SIGMA).astype(np.float32)


def series_of(times: FloatArray) -> Series:
    """A series of each column of log times."""
    return Series.of(list(times.T), [np.zeros(len(times), dtype=np.float32)] * times.shape[1])


def made_up_series(seed: int = 0, keys: int = 30, calls: int = 1_000) -> Series:
    """Quiet calls of keys with noise of 0.02 to 0.5."""
    random = np.random.default_rng(seed)
    scales = np.exp(random.uniform(np.log(0.02), np.log(0.5), keys)).astype(np.float32)
    return series_of(t3(random, calls, keys) * scales)
