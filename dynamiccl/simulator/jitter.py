"""Noise of calls in a running job: heavy tails, slow drift, and late ranks.

Heavy-tailed because repeats are (half of the published cells spread by under 1.5 %, one in ten by a
multiple); Student's t with three degrees of freedom, scaled to a robust sigma, cut where a call
would be taken for another size.
"""

import math
from typing import Final

import numpy as np

from dynamiccl.simulator.links import Float64Array
from dynamiccl.simulator.scenario import Jitter, Stragglers

#: Median of |t| with 3 degrees of freedom (quantile 0.75), over the normal's: MAD to sigma.
T3_ROBUST_SIGMA: Final = 0.7648923284 / 0.6744897502
#: No draw of the logarithm exceeds so many sigmas; t's tail has no third moment.
MAX_SIGMAS: Final = 30.0


class Noise:
    """Noise of N jobs."""

    def __init__(self, jitter: Jitter, stragglers: Stragglers | None, num_jobs: int) -> None:
        """Start without drift."""
        self._jitter = jitter
        self._stragglers = stragglers
        self._drift = np.zeros(num_jobs)
        self._keep = math.exp(-1.0 / jitter.drift_calls)

    def log_factors(self, random: np.random.Generator) -> Float64Array:
        """(N,) logarithm of measured over true time of the next calls."""
        jitter, count = self._jitter, len(self._drift)
        own = random.standard_t(3, count) / T3_ROBUST_SIGMA
        np.clip(own, -MAX_SIGMAS, MAX_SIGMAS, out=own)
        own *= jitter.sigma
        if jitter.drift_sigma:
            self._drift *= self._keep
            innovation = jitter.drift_sigma * math.sqrt(1.0 - self._keep**2)
            self._drift += innovation * random.standard_normal(count)
            own += self._drift
        return own

    def skew_us(self, random: np.random.Generator) -> Float64Array:
        """(N,) us that the earliest rank waits for the latest."""
        late = self._stragglers
        if late is None:
            return np.zeros(len(self._drift))
        skew = np.zeros(len(self._drift))
        comes_late = np.flatnonzero(random.random(len(skew)) < late.probability)
        skew[comes_late] = late.median_us * random.lognormal(0.0, late.sigma, len(comes_late))
        return skew
