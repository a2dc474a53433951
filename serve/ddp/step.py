"""The marks that a rank takes in one step, and the times that follow from them."""

from dataclasses import dataclass, field
from typing import Any

import torch

from dynamiccl.serve.ddp.agreement import Measured
from dynamiccl.serve.ddp.clocks import Clock
from dynamiccl.serve.ddp.wire import Decision


@dataclass(slots=True)
class BucketMarks:
    """One bucket's way: hook called, exchange launched, exchange done, result written."""

    called: Any
    launched: Any = None
    done: Any = None
    written: Any = None
    #: Squared L2 norm of its mean gradient, a tensor of one number.
    square: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that ended, as this rank saw it."""

    decision: Decision
    measured: Measured = field(default_factory=Measured)
    norm: torch.Tensor | None = None
    wire_bytes: float = 0.0


@dataclass(slots=True)
class Step:
    """What is done in one step, and its buckets in the order of their launch."""

    decision: Decision
    buckets: list[BucketMarks] = field(default_factory=list)
    wire_bytes: float = 0.0

    @property
    def end(self) -> Any:
        """When the last result was written; None before."""
        return self.buckets[-1].written if self.buckets else None

    def _norm(self) -> torch.Tensor | None:
        """L2 norm of the step's mean gradient; None where a bucket has none."""
        squares = [bucket.square for bucket in self.buckets]
        known = [square for square in squares if square is not None]
        return torch.stack(known).sum().sqrt() if known and len(known) == len(squares) else None

    def finished(self, clock: Clock, before: Any, latency_s: float | None) -> Finished:
        """All of it, once DDP has waited for the results."""
        measured = self._measured(clock, before, latency_s)
        return Finished(self.decision, measured, self._norm(), self.wire_bytes)

    def _measured(self, clock: Clock, before: Any, latency_s: float | None) -> Measured:
        """The times of a finished step; `before` is the end of the step before, or None.

        Transfer is the time in which at least one bucket was under way. Compute is all from the
        end of the step before to the last launch, less what the hook did itself.
        """
        marks = [m for b in self.buckets for m in (b.called, b.launched, b.done, b.written)]
        # The first step of a process pays for connections and memory: it says nothing.
        marks.append(before)
        if any(mark is None or not clock.ready(mark) for mark in marks):
            return Measured(latency_s=latency_s)
        first, last = self.buckets[0], self.buckets[-1]
        packing = [clock.seconds(b.called, b.launched) for b in self.buckets]
        packing_s = sum(packing)
        # Only backward counts as time to hide behind: packing keeps the same cores busy.
        overlap_s = max(0.0, clock.seconds(first.launched, last.launched) - sum(packing[1:]))
        # Adding up a bucket goes on beside the next one's exchange, but for the last.
        adding_s = clock.seconds(last.done, last.written)
        compute_s = max(0.0, clock.seconds(before, last.launched) - packing_s)
        transfer_s = self._under_way_s(clock)
        return Measured(
            # A clock that stands still, or too coarse a one, has measured nothing.
            transfer_s if transfer_s > 0.0 else None,
            latency_s,
            compute_s,
            overlap_s,
            packing_s + adding_s,
        )

    def _under_way_s(self, clock: Clock) -> float:
        zero = self.buckets[0].launched
        spans = [
            (clock.seconds(zero, b.launched), clock.seconds(zero, b.done)) for b in self.buckets
        ]
        total, reached = 0.0, 0.0
        for begin, end in sorted(spans):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total
