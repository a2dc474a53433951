"""What a law takes and gives: intervals as all ranks saw them, and the next step's decision.

A law is plain arithmetic on agreed numbers and on its own past, which is of agreed numbers too. So
ranks that begin alike decide alike, whatever their own clocks say.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from dynamiccl.datasets.history import NetworkSense
from dynamiccl.serve.ddp.settings import Settings
from dynamiccl.serve.ddp.wire import DENSE, Decision, Method


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
    #: Least over ranks, which all do the same: selecting, packing and adding up.
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


class Law(ABC):
    """Decides the next step from the last agreed one."""

    def __init__(self, settings: Settings, gradient: Gradient) -> None:
        self.sense = NetworkSense(settings.btlbw_window, settings.rtprop_window)
        ratio = settings.start_ratio
        self.decision = DENSE if ratio >= 1.0 else Decision(Method.SPARSE, ratio)
        self._set = settings
        self._gradient = gradient

    @abstractmethod
    def update(self, interval: Interval) -> None:
        """Take an interval; `decision` is then that of the next step."""

    @abstractmethod
    def facts(self) -> dict[str, float]:
        """What it knows, in numbers for people."""

    def state(self) -> dict[str, Any]:
        """All that `restore` needs: plain numbers, lists and words."""
        return {
            "sense": {
                "ebb": self.sense.ebb_gbytes_per_s,
                "btlbw": self.sense.btlbw.values,
                "rtprop": self.sense.rtprop.values,
            },
            "decision": decision_state(self.decision),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        sense = state["sense"]
        self.sense.ebb_gbytes_per_s = sense["ebb"]
        self.sense.btlbw.values, self.sense.rtprop.values = sense["btlbw"], sense["rtprop"]
        self.decision = restored_decision(state["decision"])


def decision_state(decision: Decision) -> list[Any]:
    """What a checkpoint holds of a decision."""
    return [str(decision.method), decision.ratio, decision.quantised]


def restored_decision(state: list[Any]) -> Decision:
    """The decision again."""
    method, ratio, quantised = state
    return Decision(Method(method), ratio, quantised)
