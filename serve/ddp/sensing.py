"""What a rank senses, and the 32 bytes by which ranks agree on it.

One all-reduce of eight numbers, the least of each over ranks, is launched before the step's first
bucket and read before the next step's first bucket, so that nobody waits for it; it carries what
the step before measured. What shall be the largest over ranks travels with its sign turned. The
last two numbers are a mark of the state a rank decides from, both ways: where least and largest
differ, a rank has loaded another checkpoint or has other settings.
"""

import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from dynamiccl.errors import UserError


class Clock(Protocol):
    """Takes marks, and tells the seconds between two of them."""

    def mark(self) -> Any:
        """Now."""

    def ready(self, mark: Any) -> bool:
        """Whether what was asked for before `mark` is done, so that its time is known."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another, both ready."""


class HostClock:
    """The monotonic clock, or another function that returns seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now

    def mark(self) -> float:
        """See `Clock`."""
        return self._now()

    def ready(self, mark: float) -> bool:  # noqa: ARG002
        """A host's mark is always known."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """See `Clock`."""
        return end - begin


class DeviceClock:
    """Events on the current stream: the host runs ahead of the GPU and knows no times."""

    def mark(self) -> torch.cuda.Event:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ready(self, mark: torch.cuda.Event) -> bool:
        """Asks and does not wait: a step whose times come too late is not measured."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See `Clock`."""
        return float(begin.elapsed_time(end)) / 1e3


_UNKNOWN: Final = math.inf
#: Integers up to here are exact in 32 bits.
_MARKS: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank has of a step; None where it could not be measured."""

    transfer_s: float | None = None
    latency_s: float | None = None
    compute_s: float | None = None
    overlap_s: float | None = None
    codec_s: float | None = None

    def numbers(self, mark: int) -> list[float]:
        """The eight numbers of the all-reduce; the norm's place is filled in by `Agreement`."""
        transfer, latency, compute, overlap, codec = (
            _UNKNOWN if each is None else each for each in astuple(self)
        )
        turned = compute if compute == _UNKNOWN else -compute
        return [transfer, latency, overlap, codec, turned, _UNKNOWN, float(mark), -float(mark)]


_NORM: Final = 5


@dataclass(frozen=True, slots=True)
class Agreed:
    """The same on all ranks: times least or largest over ranks, and the norm."""

    measured: Measured
    norm: float | None


def read(numbers: Sequence[float], step: int) -> Agreed:
    """What the eight numbers say; raises UserError where the ranks' marks differ."""
    transfer, latency, overlap, codec, turned, norm, least, largest = numbers
    if least != -largest:
        raise UserError(
            f"ranks disagree on the state of NetSense at step {step} (marks {least:.0f} to "
            f"{-largest:.0f}): every rank must have the same Settings, and load the state_dict "
            f"that it saved at the same step, or none"
        )

    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    compute = known(-turned)
    measured = Measured(known(transfer), known(latency), compute, known(overlap), known(codec))
    return Agreed(measured, known(norm))


def mark_of(state: Any) -> int:
    """A number for a state of plain values: equal states, equal numbers."""
    return zlib.crc32(repr(state).encode()) % _MARKS


class Agreement:
    """One all-reduce under way. All ranks launch it at the same place among their collectives."""

    def __init__(
        self,
        numbers: list[float],
        norm: torch.Tensor | None,
        group: dist.ProcessGroup,
        clock: Clock,
    ) -> None:
        device = torch.device("cpu") if norm is None else norm.device
        if dist.get_backend(group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        self._clock = clock
        self._vector = torch.tensor(numbers, dtype=torch.float32, device=device)
        if norm is not None:
            # A NaN would make the least of it depend on the order of ranks.
            self._vector[_NORM] = torch.nan_to_num(norm, nan=_UNKNOWN, posinf=_UNKNOWN)
        self._begin = clock.mark()
        self._end: Any = None
        work = dist.all_reduce(self._vector, dist.ReduceOp.MIN, group=group, async_op=True)
        self._done = work.get_future().then(self._finish)

    def _finish(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        future.value()
        self._end = self._clock.mark()

    def numbers(self) -> list[float]:
        """Wait for it, and read it."""
        self._done.wait()
        found: list[float] = self._vector.tolist()
        return found

    def latency_s(self) -> float | None:
        """What it took on this rank, or None where that is not known yet."""
        if self._end is None or not self._clock.ready(self._end):
            return None
        return self._clock.seconds(self._begin, self._end)
