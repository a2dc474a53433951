"""How many spreads a gain must exceed, by tasks that were left out.

Conformal risk control (Angelopoulos et al. 2022, section 2): on n tasks that are exchangeable with
those of deployment, the policy acts where its score (predicted gain over the spread of it) is above
a threshold; the least threshold at which (slower + 1) / (n + 1) <= alpha keeps the expected share
of tasks on which it acts and is slower at alpha or below. With fewer than 1 / alpha - 1 tasks none
does: then they only raise what drawn worlds ask for. *Slower* is by more than SLOWER and than the
noise: a config that is the one that NCCL runs anyway is measured as slower every other time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from dynamiccl.belief import LEAST_CAUTION, MIN_GAIN, SLOWER, Bools
from dynamiccl.drawn_worlds import Floats, Ints

#: Standard deviations of an interval that holds 90 % of normal values.
_NINETY: Final = 1.6449


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tasks that were left out: predicted gain of the chosen config, and measured gain."""

    #: (N,) ln of NCCL's time over that of the chosen config, as predicted and as measured.
    predicted: Floats
    measured: Floats
    #: (N,) the spread of the prediction.
    spread: Floats
    #: (N,) the spread of the measurement.
    noise: Floats

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All tasks of several calibrations; empty without any."""
        names = ("predicted", "measured", "spread", "noise")
        return cls(*(np.concatenate([np.empty(0), *(getattr(p, n) for p in parts)]) for n in names))

    def __len__(self) -> int:
        return len(self.predicted)

    @property
    def score(self) -> Floats:
        """(N,) predicted gain / its spread; 0 where the policy abstains anyway."""
        found = self.predicted > MIN_GAIN
        score: Floats = np.zeros(len(self.predicted))
        np.divide(self.predicted, self.spread, out=score, where=found)
        return score

    @property
    def coverage(self) -> float:
        """Fraction of measured gains inside the predicted 90 % intervals."""
        width = _NINETY * np.sqrt(self.spread**2 + self.noise**2)
        if not len(self):
            return math.nan
        inside = np.abs(self.predicted - self.measured) <= width + 1e-12
        return float(inside.mean())

    def least_alpha(self) -> float:
        """The smallest bound that this many tasks alone can support."""
        return 1.0 / (len(self) + 1)

    def raised(self, drawn: float, alpha: float) -> float:
        """The threshold on the score: what drawn worlds ask for, or more where these tasks do.

        That of these tasks alone where they are enough for `alpha`.
        """
        is_slower = self.measured < -math.log1p(SLOWER) - _NINETY * self.noise
        slower = np.sort(self.score[is_slower])[::-1]
        allowed = math.floor(alpha * (len(self) + 1) + 1e-9) - 1
        own = float(slower[max(allowed, 0)]) if max(allowed, 0) < len(slower) else 0.0
        return max(own, LEAST_CAUTION if allowed >= 0 else drawn)


def best_of(gain: Floats, spread: Floats, known: Bools, caution: float) -> Ints:
    """(N,) of each row the largest gain (N, A) among the sure ones; the largest where none is."""
    gain = np.where(known, gain, -np.inf)
    sure = gain > np.maximum(caution * np.where(known, spread, 0.0), MIN_GAIN)
    any_sure = sure.any(axis=1, keepdims=True)
    best: Ints = np.where(sure | ~any_sure, gain, -np.inf).argmax(axis=1)
    return best
