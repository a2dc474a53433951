"""From what the ranks agreed on to the next step's decision: Algorithm 1, and the model of times.

A law is plain arithmetic on agreed numbers and on its own past, which is of agreed numbers too. So
ranks that begin alike decide alike, whatever their own clocks say.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Protocol

from dynamiccl.datasets.network_sense import NetworkSense, Windowed
from dynamiccl.serve.ddp.settings import Settings
from dynamiccl.serve.ddp.wire import DENSE, FP16, Decision, Method

#: A measured time is at least so much above the latency: else B would have no bound.
_LEAST_SHARE: Final = 0.1
#: Measured steps before mode model leaves the first ratio: a median of three forgives one.
_FIRST_STEPS: Final = 3


@dataclass(frozen=True, slots=True)
class Interval:
    """A step as all ranks saw it; what no rank could measure is None."""

    method: Method
    wire_bytes: float
    #: Least over ranks: whoever was early also waited for the others.
    transfer_s: float | None
    latency_s: float | None
    #: Largest over ranks: the step without transfer and compressing.
    compute_s: float | None
    #: Least over ranks: from the first bucket's launch to the last one's.
    overlap_s: float | None
    #: Largest over ranks: selecting, packing and adding up.
    codec_s: float | None
    #: L2 norm of the mean gradient.
    norm: float | None


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a step exchanges: values, bytes in their own type, and between how many ranks."""

    numel: int
    num_bytes: int
    ranks: int

    def wire_bytes(self, decision: Decision) -> float:
        """Bytes that a rank receives in a step, but for the rounding of each bucket."""
        each = round(self.num_bytes / max(1, self.numel))
        return decision.wire_bytes(self.numel, each, self.ranks)


class Law(Protocol):
    """Decides the next step from the last agreed one."""

    sense: NetworkSense
    decision: Decision

    def update(self, interval: Interval) -> None:
        """Take an interval; `decision` is then that of the next step."""

    def facts(self) -> dict[str, float]:
        """What it knows, in numbers for people."""

    def state(self) -> dict[str, Any]:
        """All that `restore` needs: plain numbers, lists and words."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""


def make_law(settings: Settings, gradient: Gradient) -> Law:
    """The law of `settings.mode`."""
    return (PaperLaw if settings.mode == "paper" else ModelLaw)(settings, gradient)


class PaperLaw:
    """Algorithm 1 for the ratio, and step 1 of Algorithm 2 for 16-bit values."""

    def __init__(self, settings: Settings, gradient: Gradient) -> None:
        self.sense = NetworkSense(settings.btlbw_window, settings.rtprop_window)
        self.decision = _first(settings)
        self._set = settings
        self._gradient = gradient
        self._ratio = settings.start_ratio
        self._starting = True

    def update(self, interval: Interval) -> None:
        """One interval of Algorithm 1."""
        if interval.transfer_s is not None:
            time_us = interval.transfer_s * 1e6
            self.sense.add(interval.wire_bytes, time_us)
            self._ratio = self._next(interval.wire_bytes, time_us)
        self.decision = self._quantised(interval.norm)

    def _next(self, size_bytes: float, rtt_us: float) -> float:
        rtprop_us, bdp = self.sense.rtprop.value or rtt_us, self.sense.bdp_bytes or 0.0
        if self._starting:
            self._starting = rtt_us <= self._set.excessive_rtt * rtprop_us and self._ratio < 1.0
            if self._starting:
                return min(1.0, self._ratio + self._set.beta1)
        if size_bytes > self._set.bdp_share * bdp:
            return max(self._set.min_ratio, self._ratio * self._set.alpha)
        return min(1.0, self._ratio + self._set.beta2)

    def _quantised(self, norm: float | None) -> Decision:
        ratio = self._ratio
        if ratio >= 1.0:
            return DENSE
        if ratio < self._set.tr_q and norm is not None and norm > self._set.tr_d:
            # Algorithm 2 doubles the ratio, as if positions halved with the values.
            return Decision(Method.SPARSE, min(1.0, 2.0 * ratio), quantised=True)
        return Decision(Method.SPARSE, ratio)

    def facts(self) -> dict[str, float]:
        """Whether start-up is over, and the ratio before quantisation doubles it."""
        return {"starting": float(self._starting), "ratio_before_quantisation": self._ratio}

    def state(self) -> dict[str, Any]:
        """See `Law`."""
        return {
            "sense": sense_state(self.sense),
            "decision": decision_state(self.decision),
            "ratio": self._ratio,
            "starting": self._starting,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See `Law`."""
        restore_sense(self.sense, state["sense"])
        self.decision = restored_decision(state["decision"])
        self._ratio, self._starting = state["ratio"], state["starting"]


class ModelLaw:
    """The largest ratio whose predicted communication, L + bytes/B, fits the budget.

    L is the windowed least of the agreement's own times. B is the median slope from there to each
    step of the window: a fit of the two-parameter line that one slow step does not move.
    """

    def __init__(self, settings: Settings, gradient: Gradient) -> None:
        self.sense = NetworkSense(settings.btlbw_window, settings.rtprop_window)
        self.decision = _first(settings)
        self._set = settings
        self._gradient = gradient
        self._windows = {
            "latency_s": Windowed(min, settings.rtprop_window),
            "bytes_per_s": Windowed(median, settings.bandwidth_window),
            "compute_s": Windowed(median, settings.compute_window),
            "overlap_s": Windowed(median, settings.compute_window),
            # Of a method that was left they stay: they are needed to come back to it.
            **{f"codec_{method}_s": Windowed(median, settings.compute_window) for method in Method},
        }

    def update(self, interval: Interval) -> None:
        """Add a step to the windows and decide again."""
        self._add("latency_s", interval.latency_s)
        self._add("compute_s", interval.compute_s)
        self._add("overlap_s", interval.overlap_s)
        self._add(f"codec_{interval.method}_s", interval.codec_s)
        if interval.transfer_s is not None:
            self.sense.add(interval.wire_bytes, interval.transfer_s * 1e6)
            latency_s = self._value("latency_s")
            time_s = max(interval.transfer_s - latency_s, _LEAST_SHARE * interval.transfer_s)
            self._add("bytes_per_s", interval.wire_bytes / time_s)
        if len(self._windows["bytes_per_s"].values) >= _FIRST_STEPS:
            self.decision = self._decide(interval.norm)

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            self._windows[name].add(value)

    def _value(self, name: str) -> float:
        return self._windows[name].value or 0.0

    def transfer_s(self, decision: Decision) -> float:
        """What a step's communication is predicted to take."""
        wire_bytes = self._gradient.wire_bytes(decision)
        return self._value("latency_s") + wire_bytes / self._value("bytes_per_s")

    def budget_s(self, method: Method) -> float:
        """What a step's communication may take: `Settings.slowdown` says why so much."""
        alone_s = self._value("compute_s") + self._codec_s(method)
        return self._value("overlap_s") + self._set.slowdown * alone_s

    def _codec_s(self, method: Method) -> float:
        return self._value(f"codec_{method}_s")

    def _decide(self, norm: float | None) -> Decision:
        if self._fits(DENSE):
            return DENSE
        whole = [DENSE, FP16] if self._allowed(FP16, norm) else [DENSE]
        if FP16 in whole and self._fits(FP16):
            return self._fastest(whole)
        return self._fastest([*whole, self._sparse(norm)])

    def _fits(self, decision: Decision) -> bool:
        return self.transfer_s(decision) <= self.budget_s(decision.method)

    def _fastest(self, choices: list[Decision]) -> Decision:
        """Of several the fastest, but the present method where that gains too little."""
        best = min(choices, key=self._step_s)
        gain = 1.0 - self._set.switch_gain
        for each in choices:
            same = each.method is self.decision.method
            if same and self._step_s(best) > gain * self._step_s(each):
                return each
        return best

    def _step_s(self, decision: Decision) -> float:
        return self.transfer_s(decision) + self._codec_s(decision.method)

    def _allowed(self, decision: Decision, norm: float | None) -> bool:
        """16 bits are for a gradient that is large enough."""
        return not decision.quantised or (norm is not None and norm > self._set.tr_d)

    def _sparse(self, norm: float | None) -> Decision:
        """The largest ratio that fits, in 16 bits if that is allowed there."""
        half = Decision(Method.SPARSE, self._fitting(Decision(Method.SPARSE, 1.0, quantised=True)))
        quantised = half.ratio < self._set.tr_q and self._allowed(FP16, norm)
        ratio = half.ratio if quantised else self._fitting(Decision(Method.SPARSE, 1.0))
        last = self.decision
        same = last.method is Method.SPARSE and last.quantised == quantised
        if same and abs(ratio / last.ratio - 1.0) < self._set.dead_band:
            return last
        return Decision(Method.SPARSE, ratio, quantised)

    def _fitting(self, whole: Decision) -> float:
        """The ratio at which `whole`, the sparse decision of ratio 1, fits the budget."""
        room = max(0.0, self.budget_s(whole.method) - self._value("latency_s")) * self._value(
            "bytes_per_s"
        )
        return min(1.0, max(self._set.min_ratio, room / self._gradient.wire_bytes(whole)))

    def facts(self) -> dict[str, float]:
        """The windows' values and the budget."""
        known = {name: self._value(name) for name in self._windows}
        return {**known, "budget_s": self.budget_s(self.decision.method)}

    def state(self) -> dict[str, Any]:
        """See `Law`."""
        return {
            "sense": sense_state(self.sense),
            "decision": decision_state(self.decision),
            "windows": {name: window.values for name, window in self._windows.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See `Law`."""
        restore_sense(self.sense, state["sense"])
        self.decision = restored_decision(state["decision"])
        for name, values in state["windows"].items():
            self._windows[name].values = values


def _first(settings: Settings) -> Decision:
    ratio = settings.start_ratio
    return DENSE if ratio >= 1.0 else Decision(Method.SPARSE, ratio)


def sense_state(sense: NetworkSense) -> dict[str, Any]:
    """What a checkpoint holds of the filters."""
    return {
        "ebb": sense.ebb_gbytes_per_s,
        "btlbw": sense.btlbw.values,
        "rtprop": sense.rtprop.values,
    }


def restore_sense(sense: NetworkSense, state: dict[str, Any]) -> None:
    """Put it back."""
    sense.ebb_gbytes_per_s = state["ebb"]
    sense.btlbw.values, sense.rtprop.values = state["btlbw"], state["rtprop"]


def decision_state(decision: Decision) -> list[Any]:
    """What a checkpoint holds of a decision."""
    return [str(decision.method), decision.ratio, decision.quantised]


def restored_decision(state: list[Any]) -> Decision:
    """The decision again."""
    method, ratio, quantised = state
    return Decision(Method(method), ratio, quantised)
