"""Mode model: time = L + bytes/B, fitted to the last steps, and what fits a budget by it."""

from statistics import median
from typing import Any, Final

from dynamiccl.datasets.history import Windowed
from dynamiccl.serve.ddp.law import Gradient, Interval, Law
from dynamiccl.serve.ddp.settings import Settings
from dynamiccl.serve.ddp.wire import DENSE, FP16, Decision, Method

#: A measured time is at least so much above the latency: else B would have no bound.
_LEAST_SHARE: Final = 0.1
#: Measured steps before mode model leaves the first ratio: a median of three forgives one.
_FIRST_STEPS: Final = 3


class ModelLaw(Law):
    """The largest ratio whose predicted communication, L + bytes/B, fits the budget.

    L is the windowed least of the agreement's own times. B is the median slope from there to each
    step of the window: a fit of the two-parameter line that one slow step does not move. Methods
    differ in how much of B they get (all-gather and all-reduce, sums of 16 bits on a CPU), so each
    has an efficiency: B under it over B under sparse, measured when it is taken. One that was never
    tried is thought to have `Settings.optimism`, so that it is tried where it may pay.
    """

    def __init__(self, settings: Settings, gradient: Gradient) -> None:
        super().__init__(settings, gradient)
        self._windows = {
            "latency_s": Windowed(min, settings.rtprop_window),
            # Of the present method.
            "own_bytes_per_s": Windowed(median, settings.bandwidth_window),
            "compute_s": Windowed(median, settings.compute_window),
            "overlap_s": Windowed(median, settings.compute_window),
            # Of a method that was left they stay: they are needed to come back to it.
            **{f"codec_{method}_s": Windowed(median, settings.compute_window) for method in Method},
        }
        #: B as sparse steps get it.
        self._bytes_per_s = 0.0
        self._efficiency: dict[str, float] = {}
        #: Whether the present method was taken so lately that it has not been measured.
        self._arriving = True

    def update(self, interval: Interval) -> None:
        """Add a step to the windows and decide again."""
        self._add("latency_s", interval.latency_s)
        self._add("compute_s", interval.compute_s)
        self._add("overlap_s", interval.overlap_s)
        self._add(f"codec_{interval.method}_s", interval.codec_s)
        if interval.transfer_s is None:
            return
        self.sense.add(interval.wire_bytes, interval.transfer_s * 1e6)
        if interval.method is not self.decision.method:
            # Of before the last switch.
            return
        latency_s = self._value("latency_s")
        time_s = max(interval.transfer_s - latency_s, _LEAST_SHARE * interval.transfer_s)
        own = self._windows["own_bytes_per_s"]
        own.add(interval.wire_bytes / time_s)
        if len(own.values) >= min(_FIRST_STEPS, self._set.bandwidth_window):
            self._sense_bandwidth(interval.method)
            self._arriving = False
            before, self.decision = self.decision, self._decide(interval.norm)
            if before.method is not self.decision.method:
                own.values, self._arriving = [], True

    def _sense_bandwidth(self, method: Method) -> None:
        """Set B; of a method that was just taken its efficiency, for B has not had time to change.

        Sparse is what others are compared with, and so is the first method of a job.
        """
        own = self._value("own_bytes_per_s")
        if method is Method.SPARSE or not self._bytes_per_s:
            self._efficiency[method] = 1.0
        elif self._arriving:
            self._efficiency[method] = own / self._bytes_per_s
        self._bytes_per_s = own / self._efficiency.get(method, 1.0)

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            self._windows[name].add(value)

    def _value(self, name: str) -> float:
        return self._windows[name].value or 0.0

    def transfer_s(self, decision: Decision) -> float:
        """What a step's communication is predicted to take."""
        wire_bytes = self._gradient.wire_bytes(decision)
        return self._value("latency_s") + wire_bytes / self._got(decision.method)

    def _got(self, method: Method) -> float:
        """Bytes a second that a method gets."""
        return self._bytes_per_s * self._efficiency.get(method, self._set.optimism)

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
        room_s = max(0.0, self.budget_s(whole.method) - self._value("latency_s"))
        room = room_s * self._got(Method.SPARSE)
        return min(1.0, max(self._set.min_ratio, room / self._gradient.wire_bytes(whole)))

    def facts(self) -> dict[str, float]:
        """The windows' values and the budget."""
        known = {name: self._value(name) for name in self._windows}
        efficiency = {f"efficiency_{name}": value for name, value in self._efficiency.items()}
        budget_s = self.budget_s(self.decision.method)
        return {**known, **efficiency, "bytes_per_s": self._bytes_per_s, "budget_s": budget_s}

    def state(self) -> dict[str, Any]:
        """See `Law`."""
        return super().state() | {
            "windows": {name: window.values for name, window in self._windows.items()},
            "bytes_per_s": self._bytes_per_s,
            "arriving": self._arriving,
            "efficiency": {str(name): value for name, value in self._efficiency.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See `Law`."""
        super().restore(state)
        for name, values in state["windows"].items():
            self._windows[name].values = values
        self._bytes_per_s, self._efficiency = state["bytes_per_s"], dict(state["efficiency"])
        self._arriving = state["arriving"]
