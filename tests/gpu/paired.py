"""A paired test of two kinds of process: mean log ratio against all sign flips."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Self

import numpy as np

#: A shift that nobody would call one, though it may be measured well.
NEGLIGIBLE: Final = 0.005
SIGNIFICANT: Final = 0.01


@dataclass(frozen=True)
class Shift:
    """Mean relative difference of pairs."""

    ratio: float
    #: Share of the sign flips whose mean is at least as far from 0: exact for any noise that
    #: does not tell the first from the second.
    p_value: float
    #: The smallest shift that would have been seen, about: three standard errors of the mean.
    least_seen: float

    @classmethod
    def of(cls, log_ratios: Sequence[float]) -> Self:
        """From one log ratio of a pair each; 20 pairs at most."""
        values = np.array(log_ratios)
        flips = np.array(list(product((1.0, -1.0), repeat=len(values))))
        means = np.abs(flips @ values)
        as_far = means >= abs(values.sum()) * (1.0 - 1e-9)
        error = float(values.std(ddof=1)) / np.sqrt(len(values))
        return cls(float(np.exp(values.mean())), float(as_far.mean()), 3.0 * error)

    @property
    def is_none(self) -> bool:
        """Whether the difference is noise, or too small to matter."""
        return self.p_value > SIGNIFICANT or abs(self.ratio - 1.0) <= NEGLIGIBLE

    def __str__(self) -> str:
        seen = f"from {100 * self.least_seen:.2f} % on it would have been seen"
        return f"{100 * (self.ratio - 1):+.2f} % (p = {self.p_value:.3f}; {seen})"
