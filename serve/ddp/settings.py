"""Every constant of the hook: what it does, its default, and where that comes from.

"Paper" is NetSenseML (section 4, Algorithms 1 and 2). Where it gives no value, the field says so
and the default is ours.
"""

from dataclasses import dataclass
from typing import Final, Literal

from dynamiccl.datasets.history import BTLBW_WINDOW, RTPROP_WINDOW
from dynamiccl.errors import UnknownName, UserError

Mode = Literal["model", "paper"]
_PAPER_PRUNING: Final = 0.5
MODES: Final[tuple[Mode, ...]] = ("model", "paper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The constants; raises UserError for one outside its range, UnknownName for a mode."""

    #: "model" fits time = L + bytes/B and fills a budget; "paper" is Algorithm 1 to the letter.
    mode: Mode = "model"
    #: Share of the gradient's values that the first step sends. Paper: 0.01.
    start_ratio: float = 0.01
    #: The smallest ratio. Paper: 0.005.
    min_ratio: float = 0.005

    #: Mode model. The budget of a step's communication is what backward hides (from the first
    #: bucket's launch to the last one's) and, on top, this share of the step without transfers
    #: (compute and compressing): so much longer may a step be than with an endlessly fast network.
    slowdown: float = 0.15
    #: Mode model: steps whose median is the bandwidth B. Three of five must be new to change it.
    bandwidth_window: int = 5
    #: Mode model: steps whose median is the compute, the overlap and the cost of compressing.
    compute_window: int = 9
    #: Mode model: a ratio is kept while the one that fits differs by less than this share.
    dead_band: float = 0.1
    #: Mode model: a method that was never tried is predicted to get so many times the bandwidth.
    optimism: float = 2.0
    #: Mode model: another method must be predicted to be faster by this share to be taken.
    switch_gain: float = 0.15

    #: Mode paper: factor of a decrease. Paper: 0.5.
    alpha: float = 0.5
    #: Mode paper: increase of a start-up step. The paper gives no value.
    beta1: float = 0.05
    #: Mode paper: increase of a later step. Paper: 0.01.
    beta2: float = 0.01
    #: Mode paper: share of the BDP above which the ratio falls. Paper: 0.9.
    bdp_share: float = 0.9
    #: Mode paper: start-up ends when RTT > this x RTprop. The paper says "excessive", no value.
    excessive_rtt: float = 2.0

    #: Values of 16 bits where the ratio is below this. Paper: tr_q, without a value.
    tr_q: float = 0.2
    #: ... and the L2 norm of the previous step's mean gradient is above this. Paper: tr_d, without
    #: a value; below 0.01 most values of a large gradient would be subnormal in 16 bits.
    tr_d: float = 0.01
    #: This x (1 - ratio) of the weights, the smallest, have gradients that are not sent. None is
    #: 0.5 in mode paper, as there, and 0 in mode model, where it is not shown to help.
    #: Parameters of one dimension (biases, norms) are left alone: many begin at 0.
    pruning: float | None = None
    #: Whether the error feedback keeps what pruning takes out. The paper loses it.
    prune_to_residual: bool = False

    #: Steps over which BtlBw is the largest bandwidth.
    btlbw_window: int = BTLBW_WINDOW
    #: Steps after which RTprop and the latency L forget their smallest time.
    rtprop_window: int = RTPROP_WINDOW

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UnknownName("mode", self.mode, MODES)
        for name in ("start_ratio", "min_ratio", "alpha", "bdp_share"):
            _check(name, getattr(self, name), 0.0, 1.0, above=True)
        _check("pruning", self.pruning_scale, 0.0, 1.0)
        for name in ("dead_band", "switch_gain"):
            _check(name, getattr(self, name), 0.0, 1.0)
        for name in ("slowdown", "beta1", "beta2", "tr_q", "tr_d"):
            _check(name, getattr(self, name), 0.0, float("inf"))
        _check("optimism", self.optimism, 1.0, float("inf"))
        _check("excessive_rtt", self.excessive_rtt, 1.0, float("inf"))
        for name in ("bandwidth_window", "compute_window", "btlbw_window", "rtprop_window"):
            _check(name, getattr(self, name), 1, float("inf"))

    @property
    def pruning_scale(self) -> float:
        """`pruning`, or what None stands for."""
        if self.pruning is None:
            return _PAPER_PRUNING if self.mode == "paper" else 0.0
        return self.pruning


def _check(name: str, value: float, least: float, most: float, *, above: bool = False) -> None:
    if not least <= value <= most or (above and value == least):
        begin = f"above {least:g}" if above else f"at least {least:g}"
        end = f" and at most {most:g}" if most < float("inf") else ""
        raise UserError(f"setting {name} is {value:g}: give a value {begin}{end}")
