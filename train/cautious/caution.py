"""Calibration of a policy's confidence: a bound on P(it acts and is slower), from held-out tasks.

Conformal risk control (Angelopoulos et al. 2022, section 2): on n calibration tasks that are
exchangeable with those of deployment, the policy acts where its score (predicted gain over the
spread of it) is above a threshold; the least threshold at which (slower + 1) / (n + 1) <= alpha
keeps the expected share of tasks on which it acts and is slower at alpha or below. With fewer than
1 / alpha - 1 tasks none does, and the policy abstains. *Slower* is by more than SLOWER: a config
that is the one that NCCL runs anyway is measured as slower every other time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

#: ln of time: gains below are not worth a change of NCCL's choice.
MIN_GAIN: Final = 0.005
#: By which share of NCCL's time a config must be slower to count as slower.
SLOWER: Final = 0.01


@dataclass(frozen=True, slots=True)
class Calibration:
    """Held-out tasks: predicted gain of the chosen config, and measured gain."""

    #: (N,) ln of NCCL's time over that of the chosen config, as predicted and as measured.
    predicted: npt.NDArray[np.float64]
    measured: npt.NDArray[np.float64]
    #: (N,) the spread of the prediction.
    spread: npt.NDArray[np.float64]
    #: (N,) the spread of the measurement.
    noise: npt.NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All tasks of several calibrations; empty without any."""
        names = ("predicted", "measured", "spread", "noise")
        return cls(*(np.concatenate([np.empty(0), *(getattr(p, n) for p in parts)]) for n in names))

    def __len__(self) -> int:
        return len(self.predicted)

    @property
    def score(self) -> npt.NDArray[np.float64]:
        """(N,) predicted gain / its spread; 0 where the policy abstains anyway."""
        found = self.predicted > MIN_GAIN
        score: npt.NDArray[np.float64] = np.zeros(len(self.predicted))
        np.divide(self.predicted, self.spread, out=score, where=found)
        return score

    @property
    def coverage(self) -> float:
        """Fraction of measured gains inside the predicted 90 % intervals."""
        width = 1.6449 * np.sqrt(self.spread**2 + self.noise**2)
        if not len(self):
            return math.nan
        inside = np.abs(self.predicted - self.measured) <= width + 1e-12
        return float(inside.mean())

    def least_alpha(self) -> float:
        """The smallest bound that this many tasks can support."""
        return 1.0 / (len(self) + 1)

    def caution(self, alpha: float) -> float:
        """The threshold on the score for bound `alpha`; infinite if it cannot be kept."""
        slower = np.sort(self.score[self.measured < -math.log1p(SLOWER)])[::-1]
        allowed = math.floor(alpha * (len(self) + 1) + 1e-9) - 1
        if allowed < 0:
            return math.inf
        return float(slower[allowed]) if allowed < len(slower) else 0.0
