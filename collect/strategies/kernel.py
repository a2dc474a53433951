"""The prior covariance of log times of two configs of one (algorithm, protocol).

A subspace has a curve over the message size that all of its configs share, and on it an effect of
the knobs (channels, chunk size) that changes smoothly with them and with the size: so neighbouring
sizes behave alike and a knob has few optima, which is what AutoCCL reports of NCCL's resources
(Xu et al., NSDI 2025: near-unimodal in each (algorithm, protocol, transport)). It is not forced to
have one only: the data may say otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.strategies.samples import Floats

#: Prior standard deviations of a subspace's level and of its slope per octave. Log times of
#: 1 us to 1 s, and of flat (latency) to proportional (bandwidth) growth, lie well within.
_LEVEL: Final = 3.0
_SLOPE: Final = 0.5


def points(trials: Sequence[Trial]) -> Floats:
    """Coordinates of trials, shape (trials, 3): log2 of size, channels and chunk; AUTO is NaN."""
    rows = [
        (t.size_bytes, t.config.num_channels or np.nan, t.config.chunk_bytes or np.nan)
        for t in trials
    ]
    places: Floats = np.log2(np.array(rows, dtype=np.float64).reshape(-1, 3))
    return places


@dataclass(frozen=True, slots=True)
class Kernel:
    """A covariance of log times; the amplitudes are standard deviations."""

    #: Reach over the message size, in octaves.
    size_octaves: float = 3.0
    #: Reach over a knob, in octaves.
    knob_octaves: float = 2.0
    #: How far the size curve leaves its straight line.
    curve: float = 0.4
    #: How far the knobs move a time.
    knobs: float = 0.3
    #: What one cell has of its own, shared with no neighbour.
    own: float = 0.01

    def matrix(self, a: Floats, b: Floats) -> Floats:
        """Covariances, shape (len(a), len(b))."""
        size = matern(np.subtract.outer(a[:, 0], b[:, 0]) / self.size_octaves)
        alike = self._alike(a[:, 1], b[:, 1]) * self._alike(a[:, 2], b[:, 2])
        line = _LEVEL**2 + _SLOPE**2 * np.multiply.outer(a[:, 0] - 20.0, b[:, 0] - 20.0)
        same = np.subtract.outer(a[:, 0], b[:, 0]) == 0
        for knob in (1, 2):
            same = same & _both_equal(a[:, knob], b[:, knob])
        result: Floats = line + size * (self.curve**2 + self.knobs**2 * alike) + self.own**2 * same
        return result

    def _alike(self, a: Floats, b: Floats) -> Floats:
        # AUTO is NCCL's own number, which is not known: it is like AUTO at other sizes only.
        both_auto = np.logical_and.outer(np.isnan(a), np.isnan(b))
        apart = np.subtract.outer(a, b) / self.knob_octaves
        return np.where(np.isnan(apart), both_auto.astype(np.float64), matern(np.nan_to_num(apart)))


def matern(distance: Floats) -> Floats:
    """Matern correlation of smoothness 5/2 (Rasmussen & Williams 2006, equation 4.17)."""
    d = np.sqrt(5.0) * np.abs(distance)
    result: Floats = (1.0 + d + d**2 / 3.0) * np.exp(-d)
    return result


def _both_equal(a: Floats, b: Floats) -> npt.NDArray[np.bool_]:
    both_auto = np.logical_and.outer(np.isnan(a), np.isnan(b))
    result: npt.NDArray[np.bool_] = both_auto | (np.subtract.outer(a, b) == 0)
    return result
