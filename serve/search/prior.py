"""The prior of a search: a policy's prediction for a new system, and its usual error there.

The predictions are the policy's ranking: log(time of an action / time of NCCL's own choice). How
wrong they are on a system that was not in the training has three parts: what all configs share
(NCCL's own choice is slower here than elsewhere), what those of a subspace share (an algorithm is),
so that a probe of one of them tells about the others, and what each has for itself. Who trains the
policy measures them on systems left out of the training; the constants are for who has not.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

#: What is assumed where nobody measured how wrong a policy is on a new system (log time).
LEVEL_SIGMA: Final = 0.20
SHARED_SIGMA: Final = 0.20
OWN_SIGMA: Final = 0.10
#: Q values are -time / reference; what is masked is far below (train/heads.py).
_LEAST_Q: Final = -1e3


@dataclass(frozen=True, slots=True)
class Prior:
    """The prior over a task's A actions.

    Raises ValueError for spreads that are not above zero.
    """

    #: (A,) expected log(time / NCCL's own choice); 0 = as good as the default.
    log_ratio: npt.NDArray[np.float64]
    #: Spread of the error that all of a task's configs share: that of the default's time.
    level_sigma: float = LEVEL_SIGMA
    #: Spread of the error that a subspace shares.
    shared_sigma: float = SHARED_SIGMA
    #: Spread of each config's own error; neighbours along a knob share most of it.
    own_sigma: float = OWN_SIGMA

    def __post_init__(self) -> None:
        if not min(self.level_sigma, self.shared_sigma, self.own_sigma) > 0.0:
            raise ValueError("a prediction without error cannot be learned about: give spreads > 0")

    @classmethod
    def from_q(cls, q: npt.NDArray[np.floating], default: int = 0) -> "Prior":
        """A prior from an exported policy's Q values (A,).

        Masked actions get a prediction that is never worth a probe.
        """
        time = -np.clip(q.astype(np.float64), _LEAST_Q, -1e-6)
        return cls(np.log(time / time[default]))
