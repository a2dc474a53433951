"""What a step sends, and the two laws that decide it, by agreed numbers alone."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Final, Literal, get_args

import numpy as np

from dynamiccl.datasets.history import RTPROP_WINDOW, NetworkSense, Windowed
from dynamiccl.errors import UnknownName, UserError

Mode = Literal["model", "paper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Constants of the hook; "paper" is NetSenseML (section 4, Algorithms 1 and 2).

    Raises UserError outside their ranges, and UnknownName for a mode.
    """

    #: "model" fits time = L + bytes/B and fills a budget; "paper" is Algorithm 1.
    mode: Mode = "model"
    #: Share of values that the first step sends. Paper: the same.
    start_ratio: float = 0.01
    #: ... and the smallest; in mode model the mean of eight steps. None: 0.02 there at shared
    #: positions, about as many bytes between eight ranks as 0.003 of own ones, and else 0.005.
    min_ratio: float | None = None

    #: Mode model: communication may take what backward hides (first bucket's launch to last), the
    #: latency, which a smaller ratio does not shorten, and this share of compute, compressing and
    #: latency: the slowdown against an endlessly fast network.
    slowdown: float = 0.15

    #: Mode paper: of Algorithm 1 what has no value there, the increase in start-up and the
    #: RTT / RTprop that ends it ("excessive").
    beta1: float = 0.05
    excessive_rtt: float = 2.0

    #: Values have 16 bits where the ratio is below. Paper: tr_q, no value.
    tr_q: float = 0.2
    #: ... and the previous mean gradient's L2 norm is above. Paper: tr_d, no value; below 0.01
    #: most values of a large gradient would be subnormal in 16 bits.
    tr_d: float = 0.01

    #: Whether all ranks send the values of the same positions; else each its own largest. None:
    #: where `NetSense` is given SGD without momentum. Momentum multiplies what comes late.
    shared: bool | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UnknownName("mode", self.mode, get_args(Mode))
        for name, ratio in (("start_ratio", self.start_ratio), ("min_ratio", self.least_ratio)):
            if not 0.0 < ratio <= 1.0:
                raise UserError(f"setting {name} is {ratio:g}: give a value above 0 and at most 1")
        for name in ("slowdown", "beta1", "excessive_rtt", "tr_q", "tr_d"):
            value, least = getattr(self, name), 1 if name == "excessive_rtt" else 0
            if not value >= least:
                raise UserError(f"setting {name} is {value:g}: give a value at least {least}")

    @property
    def least_ratio(self) -> float:
        """`min_ratio`, None resolved."""
        if self.min_ratio is None:
            return 0.005 if self.mode == "paper" or self.shared is False else 0.02
        return self.min_ratio


INDEX_BYTES: Final = 4
HALF_BYTES: Final = 2
SINGLE_BYTES: Final = 4


class Method(StrEnum):
    """How a step's gradients are exchanged."""

    DENSE = "dense"
    FP16 = "fp16"
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do in a step, and the share of values sent.

    Bytes are what one rank receives: 2(N-1)/N of the payload in an all-reduce of N ranks, N-1
    payloads in an all-gather. In a ring it sends as many. Sparse has both at shared positions.
    """

    method: Method
    ratio: float
    quantised: bool = False

    def count(self, numel: int) -> int:
        """Values of a bucket that are sent when sparse."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def proposed(self, numel: int, ranks: int) -> int:
        """Positions of a bucket that each rank proposes when sparse."""
        return math.ceil(self.count(numel) / ranks)

    def wire_bytes(
        self, numel: int, element_bytes: int, ranks: int, count: int = 0, *, shared: bool = True
    ) -> float:
        """Bytes of a bucket; `element_bytes` is of the gradient's own type, `count` values sent."""
        if self.method is Method.SPARSE:
            each = HALF_BYTES if self.quantised else SINGLE_BYTES
            count = count or self.count(numel)
            if not shared:
                return float((ranks - 1) * count * (each + INDEX_BYTES))
            values = 2.0 / ranks * count * each
            return (ranks - 1) * (values + INDEX_BYTES * self.proposed(numel, ranks))
        each = min(HALF_BYTES, element_bytes) if self.method is Method.FP16 else element_bytes
        return 2.0 * (ranks - 1) / ranks * numel * each


DENSE: Final = Decision(Method.DENSE, 1.0)
FP16: Final = Decision(Method.FP16, 1.0, quantised=True)


@dataclass(frozen=True, slots=True)
class Interval:
    """A step as one rank saw it, or as agreed: the least over ranks; None: not measured."""

    decision: Decision
    wire_bytes: float = 0.0
    #: While at least one bucket was under way; early ranks also wait for others.
    transfer_s: float | None = None
    latency_s: float | None = None
    #: The step without transfer and compressing. Agreed: the largest over ranks.
    compute_s: float | None = None
    #: From the first bucket's launch to the last one's.
    overlap_s: float | None = None
    #: Selecting, packing and writing.
    codec_s: float | None = None
    #: Segments that TCP sent again. Agreed: the most of a rank.
    lost: float | None = None
    #: L2 norm of the mean gradient.
    norm: float | None = None


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a step exchanges; `num_bytes` in the values' own type."""

    numel: int
    num_bytes: int
    ranks: int
    shared: bool = True

    def wire_bytes(self, decision: Decision) -> float:
        """Bytes that a rank receives in a step, but for each bucket's rounding."""
        each = round(self.num_bytes / max(1, self.numel))
        return decision.wire_bytes(self.numel, each, self.ranks, shared=self.shared)


class Law(ABC):
    """Decides the next step from the last agreed one."""

    def __init__(self, settings: Settings, gradient: Gradient) -> None:
        self.sense = NetworkSense()
        ratio = settings.start_ratio
        self.decision = DENSE if ratio >= 1.0 else Decision(Method.SPARSE, ratio)
        self._set = settings
        self._gradient = gradient

    @abstractmethod
    def update(self, interval: Interval) -> None:
        """Take an interval, and decide the next step."""


#: Algorithm 1's: what a ratio falls to, the increase after start-up, and the share of the BDP above
#: which it falls.
_ALPHA, _BETA2, _BDP_SHARE = 0.5, 0.01, 0.9


class PaperLaw(Law):
    """Algorithm 1 for the ratio, step 1 of Algorithm 2 for 16-bit values."""

    def __init__(self, settings: Settings, gradient: Gradient) -> None:
        super().__init__(settings, gradient)
        self._ratio = settings.start_ratio
        self._starting = True

    def update(self, interval: Interval) -> None:
        """One interval of Algorithm 1."""
        if interval.transfer_s is not None:
            time_us = interval.transfer_s * 1e6
            self.sense.add(interval.wire_bytes, time_us)
            self._ratio = self._next(interval.wire_bytes, time_us, bool(interval.lost))
        self.decision = self._quantised(interval.norm)

    def _next(self, size_bytes: float, rtt_us: float, lost: bool) -> float:
        rtprop_us, bdp = self.sense.rtprop.value or rtt_us, self.sense.bdp_bytes or 0.0
        if self._starting:
            excessive = lost or rtt_us > self._set.excessive_rtt * rtprop_us
            self._starting = not excessive and self._ratio < 1.0
            if self._starting:
                return min(1.0, self._ratio + self._set.beta1)
        if size_bytes > _BDP_SHARE * bdp:
            return max(self._set.least_ratio, self._ratio * _ALPHA)
        return min(1.0, self._ratio + _BETA2)

    def _quantised(self, norm: float | None) -> Decision:
        ratio = self._ratio
        if ratio >= 1.0:
            return DENSE
        if ratio < self._set.tr_q and norm is not None and norm > self._set.tr_d:
            # Algorithm 2 doubles it, as if positions halved, too.
            return Decision(Method.SPARSE, min(1.0, 2.0 * ratio), quantised=True)
        return Decision(Method.SPARSE, ratio)


#: A ratio, or 16 bits above tr_q, stay while another one fits by less.
DEAD_BAND: Final = 0.25
#: A method never tried is predicted so many times the bandwidth.
_OPTIMISM: Final = 2.0
#: Another method must be predicted faster by this share.
_SWITCH_GAIN: Final = 0.15
#: Steps in the medians of compute, overlap, compressing and a whole method's B.
_COMPUTE_WINDOW: Final = 9
#: Least share of a measured time that is not latency: else B has no bound.
_LEAST_SHARE: Final = 0.1
#: Measured steps before the first ratio changes: a median of three forgives one.
_FIRST_STEPS: Final = 3
#: Sparse steps in the fit; fewer where the last _FIRST_STEPS took so many times longer or shorter.
_FIT_STEPS, _CHANGED = 48, 1.3
#: Pairs in the fit differ by this share of the most bytes; the B of before counts as so many.
_APART, _KNOWN = 0.25, 8
#: Of the ratio, by turns: equal bytes do not tell B. Twice: values have positions one step old.
_TURNS: Final = (1.5, 1.5, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0)


class ModelLaw(Law):
    """The largest ratio whose predicted communication, L + bytes/B, fits the budget.

    1/B is the median slope between two sparse steps. Methods get different shares of B, so each has
    an efficiency: its B over that of sparse, measured when it is taken, _OPTIMISM before that.
    """

    def __init__(self, settings: Settings, gradient: Gradient) -> None:
        super().__init__(settings, gradient)
        self._windows = {
            "latency_s": Windowed(min, RTPROP_WINDOW),
            "compute_s": Windowed(median, _COMPUTE_WINDOW),
            "overlap_s": Windowed(median, _COMPUTE_WINDOW),
            # Those of a method that was left are needed to come back.
            **{f"{method}_codec_s": Windowed(median, _COMPUTE_WINDOW) for method in Method},
        }
        #: L and B of sparse steps.
        self._latency_s = 0.0
        self._bytes_per_s = 0.0
        self._efficiency: dict[str, float] = {}
        #: Bytes and seconds of the method's last ones.
        self._steps: list[tuple[float, float]] = []
        #: The sparse ratio that `_TURNS` multiply.
        self._ratio, self._turn = settings.start_ratio, 0

    def update(self, interval: Interval) -> None:
        """Add a step to the windows, and decide."""
        method = interval.decision.method
        for name in ("latency_s", "compute_s", "overlap_s", "codec_s"):
            value = getattr(interval, name)
            if value is not None:
                self._windows[f"{method}_{name}" if name == "codec_s" else name].add(value)
        if interval.transfer_s is None:
            return
        self.sense.add(interval.wire_bytes, interval.transfer_s * 1e6)
        if method is not self.decision.method:
            # Launched before the last switch.
            return
        # New objects here and below: a checkpoint may hold the old ones.
        self._steps = [*self._steps, (interval.wire_bytes, interval.transfer_s)][-_FIT_STEPS:]
        if len(self._steps) < _FIRST_STEPS:
            return
        (self._fit if method is Method.SPARSE else self._follow)(method)
        self.decision = self._decide(interval.norm)
        if self.decision.method is not method:
            self._steps = []
        if self.decision.method is Method.SPARSE:
            self._ratio, self._turn = self.decision.ratio, (self._turn + 1) % len(_TURNS)
            ratio = min(1.0, _TURNS[self._turn] * self._ratio)
            self.decision = replace(self.decision, ratio=ratio)

    def _fit(self, sparse: Method) -> None:
        """Set L and B; after a change in proportion, until bytes differ again."""
        sizes, times_s = np.array(self._steps).T
        # Where nothing is known, any B is a change.
        slope, least_s = 1.0 / (self._bytes_per_s or 1.0), self._value("latency_s")
        longer = (times_s / (self._latency_s + sizes * slope))[-_FIRST_STEPS:]
        if longer.min() > _CHANGED or longer.max() < 1.0 / _CHANGED:
            self._steps, slope = self._steps[-_FIRST_STEPS:], slope * np.median(longer)
            sizes, times_s = np.array(self._steps).T
        apart = sizes[:, None] - sizes
        told = apart >= _APART * sizes.max()
        slopes = (times_s[:, None] - times_s)[told] / apart[told]
        slope = np.median([*slopes, *[slope] * _KNOWN])
        slope = min(slope, np.median((times_s - least_s) / sizes))
        slope = max(slope, _LEAST_SHARE * times_s.min() / sizes.max())
        latency_s = min(np.median(times_s - sizes * slope), times_s.min())
        self._latency_s, self._bytes_per_s = float(max(latency_s, least_s)), float(1.0 / slope)
        self._efficiency = {**self._efficiency, str(sparse): 1.0}

    def _follow(self, method: Method) -> None:
        """Set B by a method that sends all values, or its efficiency if it was just taken."""
        self._latency_s = max(self._latency_s, self._value("latency_s"))
        own = median(
            size / max(time_s - self._latency_s, _LEAST_SHARE * time_s)
            for size, time_s in self._steps[-_COMPUTE_WINDOW:]
        )
        if len(self._steps) == _FIRST_STEPS:
            # At least 1: what is measured of more bytes tells more of B than a fit.
            found = max(1.0, own / (self._bytes_per_s or own))
            self._efficiency = {**self._efficiency, str(method): found}
        self._bytes_per_s = own / self._efficiency[method]

    def _value(self, name: str) -> float:
        return self._windows[name].value or 0.0

    def transfer_s(self, decision: Decision) -> float:
        """Predicted time of a step's communication."""
        wire_bytes = self._gradient.wire_bytes(decision)
        return self._latency_s + wire_bytes / self._got(decision.method)

    def _got(self, method: Method) -> float:
        return self._bytes_per_s * self._efficiency.get(method, _OPTIMISM)

    def budget_s(self, method: Method) -> float:
        """What communication may take in a step; see `Settings.slowdown`."""
        alone_s = self._value("compute_s") + self._value(f"{method}_codec_s") + self._latency_s
        return self._value("overlap_s") + self._set.slowdown * alone_s + self._latency_s

    def _decide(self, norm: float | None) -> Decision:
        halves = norm is not None and norm > self._set.tr_d
        whole = [DENSE, FP16] if halves else [DENSE]
        whole = [d for d in whole if self._gradient.wire_bytes(d) <= self._reach()]
        fitting = [d for d in whole if self.transfer_s(d) <= self.budget_s(d.method)]
        if DENSE in fitting:
            return DENSE
        return self._fastest(whole if fitting else [*whole, self._sparse(halves)])

    def _reach(self) -> float:
        # Further than twice what was tried, the fit tells little.
        most = 2.0 * max(size for size, _ in self._steps)
        return min(most, self._gradient.wire_bytes(DENSE))

    def _fastest(self, choices: list[Decision]) -> Decision:
        best = min(choices, key=self._step_s)
        for each in choices:
            same = each.method is self.decision.method
            if same and self._step_s(best) > (1.0 - _SWITCH_GAIN) * self._step_s(each):
                return each
        return best

    def _step_s(self, decision: Decision) -> float:
        return self.transfer_s(decision) + self._value(f"{decision.method}_codec_s")

    def _sparse(self, halves: bool) -> Decision:
        half = Decision(Method.SPARSE, self._fitting(Decision(Method.SPARSE, 1.0, quantised=True)))
        last = self.decision
        most = self._set.tr_q * (1.0 + DEAD_BAND * last.quantised)
        quantised = half.ratio < most and halves
        ratio = half.ratio if quantised else self._fitting(Decision(Method.SPARSE, 1.0))
        same = last.method is Method.SPARSE and last.quantised == quantised
        if same and abs(ratio / self._ratio - 1.0) < DEAD_BAND:
            ratio = self._ratio
        return Decision(Method.SPARSE, ratio, quantised)

    def _fitting(self, whole: Decision) -> float:
        """The ratio at which `whole`, of ratio 1, fits the budget."""
        room_s = self.budget_s(whole.method) - self._latency_s
        room = min(room_s * self._got(Method.SPARSE), self._reach())
        return min(1.0, max(self._set.least_ratio, room / self._gradient.wire_bytes(whole)))


def make_law(settings: Settings, gradient: Gradient) -> Law:
    """The law of `settings.mode`."""
    return (PaperLaw if settings.mode == "paper" else ModelLaw)(settings, gradient)
