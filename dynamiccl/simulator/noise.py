"""Measurement noise of simulated sweeps: heavy-tailed, with a drift common to a run.

Shaped as published repeats, at the sweep file's strengths. Draws are keyed by (seed, run, trial):
neither the order of trials nor a resume changes a figure.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

#: Of the Pareto tail; at 2.5 the variance exists.
_TAIL_SHAPE: Final = 2.5


@dataclass(frozen=True, slots=True)
class Noise:
    """Multiplicative noise; all strengths are unitless."""

    seed: int
    sigma: float
    tail_probability: float
    drift_sigma: float

    def factor(self, run: str, trial_key: str) -> float:
        """Measured / noise-free time of one trial in one run; > 0."""
        drift = _drift(self.seed, self.drift_sigma, run)
        own = _generator(self.seed, run, trial_key)
        factor = float(np.exp(drift + own.normal(0.0, self.sigma)))
        if own.random() < self.tail_probability:
            factor *= 1.0 + float(own.pareto(_TAIL_SHAPE))
        return factor

    def factors(self, run: str, trial_key: str, count: int) -> npt.NDArray[np.float64]:
        """(count,) factors of communicators that run a trial at once."""
        own = _generator(self.seed, run, trial_key, "at once")
        drift = _drift(self.seed, self.drift_sigma, run)
        factors = np.exp(drift + own.normal(0.0, self.sigma, count))
        tails = 1.0 + own.pareto(_TAIL_SHAPE, count)
        return np.where(own.random(count) < self.tail_probability, factors * tails, factors)


@cache  # all trials of a run ask
def _drift(seed: int, sigma: float, run: str) -> float:
    return float(_generator(seed, run).normal(0.0, sigma))


def _generator(seed: int, *names: str) -> np.random.Generator:
    digest = hashlib.sha256("|".join((str(seed), *names)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))
