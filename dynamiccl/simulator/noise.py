"""Measurement noise of simulated sweeps: heavy-tailed, with a drift common to a run.

Shapes after published repeats (medians agree to a per cent or two, single launches are slow by a
multiple, launches of one run are correlated); the strengths are the sweep file's and are not fitted
to any machine. Every draw is keyed by (seed, run, trial), so neither the order of trials nor a
resume changes a figure.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

#: Shape of the Pareto tail: the smaller, the longer; at 2.5 the variance still exists.
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
        """(count,) factors for communicators that run a trial at once, with a common drift."""
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
