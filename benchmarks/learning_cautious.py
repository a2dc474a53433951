"""A baseline with a confidence threshold: it acts only where it is sure enough.

So baselines and policies are compared at equal safety. The bound is that of a Gaussian process
(train/cautious/caution.py). The score is the predicted gain itself, since a baseline says not how
sure it is. Held out are the validation bins; training octaves, too, by turns, where these are too
few for the bound: they are further from what is known than test bins are, which costs gain.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.baselines.tables import Predictor, least
from dynamiccl.evaluate.policies import Actions
from dynamiccl.sizes import BINS_PER_OCTAVE
from dynamiccl.train.cautious.caution import MIN_GAIN, Calibration

#: Parts that the training octaves are held out in.
_PARTS: Final = 3


class Cautious:
    """The config with the smallest prediction, if its gain exceeds a calibrated threshold."""

    def __init__(
        self,
        make: Callable[[TaskGrid], Predictor],
        training: TaskGrid,
        validation: TaskGrid,
        alpha: float,
    ) -> None:
        """Fit, and calibrate the threshold for P(acts and is slower) <= `alpha`."""
        self._policy = make(training)
        self.name = f"{self._policy.name}, cautious"
        parts = [_compare(self._policy, validation)]
        if parts[0].least_alpha() > alpha:
            octave = training.tasks["bin"].to_numpy() // BINS_PER_OCTAVE
            turn = np.searchsorted(np.unique(octave), octave) % _PARTS
            for part in np.unique(turn):
                kept, held = np.flatnonzero(turn != part), np.flatnonzero(turn == part)
                if len(kept):
                    parts.append(_compare(make(training.take(kept)), training.take(held)))
        self.calibration = Calibration.joined(parts)
        self._threshold = max(self.calibration.caution(alpha), MIN_GAIN)

    def choose(self, grid: TaskGrid) -> Actions:
        """That config, or NCCL's default."""
        chosen, gain = _best(self._policy, grid)
        return np.where(gain > self._threshold, chosen, ABSTAIN_ACTION)


def _best(policy: Predictor, grid: TaskGrid) -> tuple[Actions, npt.NDArray[np.float64]]:
    predicted = policy.predict(grid)
    chosen = least(predicted, grid)
    return chosen, -predicted[np.arange(len(chosen)), chosen]


def _compare(policy: Predictor, grid: TaskGrid) -> Calibration:
    chosen, gain = _best(policy, grid)
    ones = np.ones(len(chosen))
    measured = np.log(grid.default_us / grid.chosen_us(chosen))
    return Calibration(gain, measured, ones, 0.0 * ones)
