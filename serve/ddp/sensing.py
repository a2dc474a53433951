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
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist

from dynamiccl.errors import UserError
from dynamiccl.serve.ddp.laws import Interval


class HostClock:
    """Takes marks, and tells the seconds between two; of `now`, a function that returns seconds."""

    def __init__(self, now: Callable[[], Any] = time.monotonic) -> None:
        self.mark = now

    def ready(self, mark: Any) -> bool:  # noqa: ARG002
        """Whether what was asked for before `mark` is done: a host's mark is always known."""
        return True

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another, both ready."""
        return float(end - begin)


class DeviceClock(HostClock):
    """Events on the current stream: the host runs ahead of the GPU and knows no times."""

    def __init__(self) -> None:
        super().__init__(self._event)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ready(self, mark: Any) -> bool:
        """Asks and does not wait: a step whose times come too late is not measured."""
        return bool(mark.query())

    def seconds(self, begin: Any, end: Any) -> float:
        """See `HostClock`."""
        return float(begin.elapsed_time(end)) / 1e3


_UNKNOWN: Final = math.inf
#: Integers up to here are exact in 32 bits.
_MARKS: Final = 1 << 24
#: The norm's place among the eight numbers: `Agreement` fills it in.
_NORM: Final = 5


def numbers_of(seen: Interval, state: Any) -> list[float]:
    """The eight numbers of the all-reduce; `state`, plain values, is what a rank decides from."""
    times = (seen.transfer_s, seen.latency_s, seen.overlap_s, seen.codec_s)
    compute = _UNKNOWN if seen.compute_s is None else -seen.compute_s
    # Equal states, equal marks.
    mark = float(zlib.crc32(repr(state).encode()) % _MARKS)
    known = [_UNKNOWN if each is None else each for each in times]
    return [*known, compute, _UNKNOWN, mark, -mark]


def read(numbers: Sequence[float], told: Interval, step: int) -> Interval:
    """`told` as all ranks saw it; raises UserError where the ranks' marks differ."""
    *measured, least, largest = numbers
    if least != -largest:
        raise UserError(
            f"ranks disagree on the state of NetSense at step {step} (marks {least:.0f} to "
            f"{-largest:.0f}): every rank must have the same Settings, and load the state_dict "
            f"that it saved at the same step, or none"
        )
    known = [value if math.isfinite(value) else None for value in measured]
    transfer, latency, overlap, codec, turned, norm = known
    return replace(
        told,
        transfer_s=transfer,
        latency_s=latency,
        compute_s=None if turned is None else -turned,
        overlap_s=overlap,
        codec_s=codec,
        norm=norm,
    )


class Agreement:
    """One all-reduce under way. All ranks launch it at the same place among their collectives."""

    def __init__(
        self,
        numbers: list[float],
        norm: torch.Tensor | None,
        group: dist.ProcessGroup,
        clock: HostClock,
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
