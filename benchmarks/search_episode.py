"""One search of one task, with its probes counted by true times.

A *probe* is a call that runs another config than the incumbent of that moment. `probes_to` are
those made before the incumbent is within 2 % of the best config by true time *and stays so* to the
end of the episode. What probing costs is the true time by which probes were slower than the
incumbent, over the time of the episode with the incumbents alone; what they were faster by is not
set against it.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.serve.search.autoccl import Tuner

CALLS: Final = 1000
WITHIN: Final = 0.02
#: Degrees of freedom of the noise: stragglers (Student's t, as the Trigger agent is tested with).
_TAIL: Final = 3
#: The 0.75 quantile of t3 and of a normal: makes `sigma` the robust one (1.4826 x MAD).
_QUARTILE_T3, _QUARTILE_NORMAL = 0.764892, 0.674490


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The result of an episode."""

    #: Probes made before the answer is good for ever; None: it was not at the end.
    probes_to: int | None
    probes: int
    slowdown: float
    #: Time of all calls over what NCCL's own choice would have taken.
    total_ratio: float
    #: True time of the last incumbent over the best, minus one.
    regret: float


def noise(sigma: float, calls: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """(calls,) factors with heavy tails; `sigma` is the robust one of their logarithm."""
    scale = sigma * _QUARTILE_NORMAL / _QUARTILE_T3
    factors: npt.NDArray[np.float64] = np.exp(scale * random.standard_t(_TAIL, calls))
    return factors


def play(
    tuner: Tuner, times_us: npt.NDArray[np.float64], factors: npt.NDArray[np.float64], default: int
) -> EpisodeResult:
    """Run a new tuner on the calls of one task, which scatter by `factors` (calls,)."""
    key = "task"
    calls = len(factors)
    ran, incumbent = np.zeros((2, calls), dtype=np.int64)
    for call in range(calls):
        incumbent[call] = tuner.best(key)
        ran[call] = action = tuner.ask(key)
        tuner.tell(key, float(times_us[action] * factors[call]))
    took, settled = times_us[ran], times_us[incumbent]
    is_probe = ran != incumbent
    last = tuner.best(key)
    good = np.append(settled, times_us[last]) <= (1.0 + WITHIN) * times_us.min()
    bad = np.flatnonzero(~good)
    since = int(bad[-1]) + 1 if len(bad) else 0
    return EpisodeResult(
        probes_to=int(is_probe[:since].sum()) if since <= calls else None,
        probes=int(is_probe.sum()),
        slowdown=float(np.maximum(took - settled, 0.0)[is_probe].sum() / settled.sum()),
        total_ratio=float(took.sum() / (calls * times_us[default])),
        regret=float(times_us[last] / times_us.min() - 1.0),
    )
