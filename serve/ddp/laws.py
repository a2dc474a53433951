"""The laws by their mode, and that of mode paper: Algorithm 1 of NetSenseML to the letter."""

from typing import Any

from dynamiccl.serve.ddp.law import Gradient, Interval, Law
from dynamiccl.serve.ddp.model_law import ModelLaw
from dynamiccl.serve.ddp.settings import Settings
from dynamiccl.serve.ddp.wire import DENSE, Decision, Method


class PaperLaw(Law):
    """Algorithm 1 for the ratio, and step 1 of Algorithm 2 for 16-bit values."""

    def __init__(self, settings: Settings, gradient: Gradient) -> None:
        super().__init__(settings, gradient)
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
        return super().state() | {
            "ratio": self._ratio,
            "starting": self._starting,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See `Law`."""
        super().restore(state)
        self._ratio, self._starting = state["ratio"], state["starting"]


def make_law(settings: Settings, gradient: Gradient) -> Law:
    """The law of `settings.mode`."""
    return (PaperLaw if settings.mode == "paper" else ModelLaw)(settings, gradient)
