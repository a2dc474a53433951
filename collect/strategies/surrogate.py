"""A Gaussian process over one (algorithm, protocol) subspace, robust against slow outliers.

Written out in numpy (Rasmussen & Williams 2006, chapter 2), since a subspace has some hundred cells
and what is needed is not what scikit-learn's regressor offers: a noise of its own for each cell,
weights against outliers from leave-one-out residuals, joint posteriors of a task's configs, and no
further package on a login node.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dynamiccl.collect.strategies.kernel import Kernel
from dynamiccl.collect.strategies.samples import Floats

#: Values that each figure of the kernel may take.
_GRID: Final = {
    "curve": (0.1, 0.2, 0.4, 0.8),
    "knobs": (0.02, 0.06, 0.15, 0.3, 0.6),
    "size_octaves": (1.0, 2.0, 4.0, 8.0),
    "knob_octaves": (0.7, 1.5, 3.0, 6.0),
    "own": (0.002, 0.01, 0.03, 0.1),
}
_PASSES: Final = 2
#: Cells of one subspace that the kernel is chosen by.
_CHOOSE_BY: Final = 120
#: A time that is slower than its neighbours say by more than so many standard deviations gets the
#: variance that makes it so many, and hardly counts. A fast one is believed: nothing makes a call
#: faster than the machine is. Medians of three repeats and more are believed too.
_DOUBTED_SIGMAS: Final = 2.5
_BELIEVED_REPEATS: Final = 3
_REWEIGHTS: Final = 3


@dataclass(frozen=True, slots=True)
class Observed:
    """Cells of one subspace: places (n, 3), log times (n,), variances (n,), repeats (n,)."""

    places: Floats
    log_us: Floats
    variance: Floats
    repeats: Floats


@dataclass(frozen=True, slots=True)
class Surface:
    """The posterior of one subspace."""

    kernel: Kernel
    observed: Observed
    _inverse: Floats
    _weights: Floats
    _mean: float

    def predict(self, places: Floats) -> tuple[Floats, Floats]:
        """Mean log times (m,) and their covariance (m, m) at `places` (m, 3), without noise."""
        cross = self.kernel.matrix(places, self.observed.places)
        mean = self._mean + cross @ self._weights
        covariance = self.kernel.matrix(places, places) - cross @ self._inverse @ cross.T
        return mean, (covariance + covariance.T) / 2.0


def fit(kernel: Kernel, observed: Observed) -> Surface:
    """Condition on observations, slow outliers counting less; none at all leave the prior."""
    variance = robust_variance(kernel, observed)
    mean = float(np.median(observed.log_us)) if len(observed.log_us) else 0.0
    inverse = _inverse(kernel, observed, variance)
    return Surface(kernel, observed, inverse, inverse @ (observed.log_us - mean), mean)


def robust_variance(kernel: Kernel, observed: Observed) -> Floats:
    """The variances, raised where a cell is much slower than all others say (leave-one-out).

    Leave-one-out residuals: Rasmussen & Williams 2006, equations 5.10 to 5.12.
    """
    variance: Floats = observed.variance
    doubtful = observed.repeats < _BELIEVED_REPEATS
    if len(variance) < 3 or not doubtful.any():
        return variance
    centred = observed.log_us - np.median(observed.log_us)
    for _ in range(_REWEIGHTS):
        inverse = _inverse(kernel, observed, variance)
        spread = 1.0 / np.diag(inverse)
        residual = (inverse @ centred) * spread
        # What it was expected to vary by before it was doubted.
        expected = np.maximum(spread - variance, 0.0) + observed.variance
        wanted = np.maximum(residual / _DOUBTED_SIGMAS, 0.0) ** 2
        excess = np.maximum(wanted - expected, 0.0)
        variance = np.where(doubtful, observed.variance + excess, observed.variance)
    return variance


def choose_kernel(subspaces: Sequence[Observed]) -> Kernel:
    """The grid point of kernel parameters with the largest likelihood, by coordinate search."""
    kernel = Kernel()
    thinned = [_thin(observed) for observed in subspaces if len(observed.log_us) > 1]
    if not thinned:
        return kernel
    weighted = [replace(o, variance=robust_variance(kernel, o)) for o in thinned]
    best = sum(_log_likelihood(kernel, observed) for observed in weighted)
    for _, (name, values) in itertools.product(range(_PASSES), _GRID.items()):
        for value in values:
            other = replace(kernel, **{name: value})
            likelihood = sum(_log_likelihood(other, observed) for observed in weighted)
            if likelihood > best + 1e-9:
                kernel, best = other, likelihood
    return kernel


def _inverse(kernel: Kernel, observed: Observed, variance: Floats) -> Floats:
    matrix = kernel.matrix(observed.places, observed.places) + np.diag(variance + 1e-9)
    inverse = np.linalg.inv(matrix)
    result: Floats = (inverse + inverse.T) / 2.0
    return result


def _log_likelihood(kernel: Kernel, observed: Observed) -> float:
    """Log marginal likelihood without its constant (Rasmussen & Williams 2006, equation 2.30)."""
    matrix = kernel.matrix(observed.places, observed.places)
    factor = np.linalg.cholesky(matrix + np.diag(observed.variance + 1e-9))
    half = np.linalg.solve(factor, observed.log_us - np.median(observed.log_us))
    return float(-0.5 * half @ half - np.log(np.diag(factor)).sum())


def _thin(observed: Observed) -> Observed:
    count = len(observed.log_us)
    keep = np.unique(np.linspace(0, count - 1, min(count, _CHOOSE_BY)).astype(np.intp))
    return Observed(
        observed.places[keep],
        observed.log_us[keep],
        observed.variance[keep],
        observed.repeats[keep],
    )
