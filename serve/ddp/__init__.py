"""Gradient exchange that adapts to the network, as a communication hook of PyTorch's DDP.

state = NetSense(model)  # model: a DistributedDataParallel, on gloo or NCCL
model.register_comm_hook(state, netsense_hook)

A step launches the agreement, then one exchange a bucket as DDP calls the hook, in the same order
on all ranks; no callback launches any, since gloo matches collectives by their order.

Of the agreement's nine numbers (docs/ddp-hook.md) one whose largest counts travels negated. The
last two are a mark of what a rank decides from, and its opposite: they differ where ranks have
other settings.
"""

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

# `dist.GradBucket`, which type checkers do not find there.
from torch._C._distributed_c10d import GradBucket
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from dynamiccl.errors import UserError
from dynamiccl.serve.ddp.compression import (
    HALF_MAX,
    Layout,
    Pruning,
    Residuals,
    add_up,
    largest,
    owe,
    propose,
    shared_places,
    take,
)
from dynamiccl.serve.ddp.laws import (
    DENSE,
    HALF_BYTES,
    SINGLE_BYTES,
    Decision,
    Gradient,
    Interval,
    Method,
    Settings,
    make_law,
)

__all__ = ["NetSense", "Settings", "netsense_hook"]

FORMAT: Final = 6
Report = Callable[[dict[str, float], int], None]
Result = torch.futures.Future[torch.Tensor]


class HostClock:
    """Takes marks by `now`, which returns seconds, and tells the time between two."""

    def __init__(self, now: Callable[[], Any] = time.monotonic) -> None:
        self.mark = now

    def ready(self, mark: Any) -> bool:  # noqa: ARG002
        """Whether the work before `mark` is done; on a host always."""
        return True

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two ready marks."""
        return float(end - begin)


class DeviceClock(HostClock):
    """Events on the current stream, for the host runs ahead of the GPU."""

    def __init__(self) -> None:
        super().__init__(self._event)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ready(self, mark: Any) -> bool:
        """Does not wait: a step whose times come too late is not measured."""
        return bool(mark.query())

    def seconds(self, begin: Any, end: Any) -> float:
        """See `HostClock`."""
        return float(begin.elapsed_time(end)) / 1e3


def sent_again() -> int | None:
    """TCP segments that this host, or its network namespace, has sent again; None: cannot tell."""
    try:
        text = Path("/proc/net/snmp").read_text(encoding="ascii")
    except OSError:
        return None
    names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


_UNKNOWN: Final = math.inf
#: Integers up to here are exact in 32-bit floats.
_MARKS: Final = 1 << 24
_NORM: Final = 6


def numbers_of(seen: Interval, state: Any) -> list[float]:
    """The nine numbers; `state`, plain values, is what a rank decides from."""
    compute = None if seen.compute_s is None else -seen.compute_s
    lost = None if seen.lost is None else -seen.lost
    times = (seen.transfer_s, seen.latency_s, seen.overlap_s, seen.codec_s, compute, lost)
    known = [_UNKNOWN if each is None else each for each in times]
    mark = float(zlib.crc32(repr(state).encode()) % _MARKS)
    return [*known, _UNKNOWN, mark, -mark]


def read(numbers: Sequence[float], told: Interval, step: int) -> Interval:
    """`told` as all ranks saw it; raises UserError where the ranks' marks differ."""
    *measured, least, largest = numbers
    if least != -largest:
        raise UserError(
            f"ranks disagree on the state of NetSense at step {step} (marks {least:.0f} to "
            f"{-largest:.0f}): every rank must have the same Settings and momentum"
        )
    known = [value if math.isfinite(value) else None for value in measured]
    transfer, latency, overlap, codec, turned, lost, norm = known
    return replace(
        told,
        transfer_s=transfer,
        latency_s=latency,
        compute_s=None if turned is None else -turned,
        overlap_s=overlap,
        codec_s=codec,
        lost=None if lost is None else -lost,
        norm=norm,
    )


def _finite(gradient: torch.Tensor) -> bool:
    """Of 16 bits the values may be finite and their sum not."""
    return bool(torch.isfinite(gradient.sum(dtype=torch.float32)))


class Agreement:
    """One all-reduce under way, at the same place among all ranks' collectives."""

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
            # With a NaN the least would depend on the order of ranks.
            self._vector[_NORM] = torch.nan_to_num(norm, nan=_UNKNOWN, posinf=_UNKNOWN)
        self._begin = clock.mark()
        self._end: Any = None
        work = dist.all_reduce(self._vector, dist.ReduceOp.MIN, group=group, async_op=True)
        self._done = work.get_future().then(self._finish)

    def _finish(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        future.value()
        self._end = self._clock.mark()

    def numbers(self) -> list[float]:
        """Wait, and read."""
        self._done.wait()
        found: list[float] = self._vector.tolist()
        return found

    def latency_s(self) -> float | None:
        """What it took on this rank; None: not known yet."""
        if self._end is None or not self._clock.ready(self._end):
            return None
        return self._clock.seconds(self._begin, self._end)


@dataclass(slots=True)
class BucketMarks:
    """When the hook was called, its exchange launched and done, its result written."""

    called: Any
    launched: Any = None
    done: Any = None
    written: Any = None
    #: Squared L2 norm of its mean gradient.
    square: torch.Tensor | None = None
    #: What a callback's stream reads, kept until DDP has waited for it.
    places: torch.Tensor | None = None


@dataclass(slots=True)
class Step:
    """A step's decision, and its buckets in launch order."""

    decision: Decision
    buckets: list[BucketMarks] = field(default_factory=list)
    wire_bytes: float = 0.0
    #: The shared positions, -1 for none, that ranks agree on for the next step.
    chosen: dict[Layout, torch.Tensor] = field(default_factory=dict)

    @property
    def end(self) -> Any:
        """When the last result was written."""
        return self.buckets[-1].written if self.buckets else None

    def norm(self) -> torch.Tensor | None:
        """L2 norm of the step's mean gradient; None where a bucket has none."""
        squares = [bucket.square for bucket in self.buckets]
        known = [square for square in squares if square is not None]
        return torch.stack(known).sum().sqrt() if known and len(known) == len(squares) else None

    def seen(self, clock: HostClock, before: Any, latency_s: float | None) -> Interval:
        """What this rank measured, once DDP has waited; `before` ends the step before."""
        known = Interval(self.decision, self.wire_bytes, latency_s=latency_s)
        marks = [m for b in self.buckets for m in (b.called, b.launched, b.done, b.written)]
        # A process's first step pays for connections and memory: it says nothing.
        marks.append(before)
        if any(mark is None or not clock.ready(mark) for mark in marks):
            return known
        first, last = self.buckets[0], self.buckets[-1]
        packing = [clock.seconds(b.called, b.launched) for b in self.buckets]
        packing_s = sum(packing)
        # For other buckets it hides behind the next one's exchange.
        adding_s = clock.seconds(last.done, last.written)
        # Transfers hide behind backward only: packing uses the same cores.
        hidden_s = clock.seconds(first.launched, last.launched) - sum(packing[1:])
        return replace(
            known,
            # 0 where the clock is too coarse, which is no measurement.
            transfer_s=self._under_way_s(clock) or None,
            compute_s=max(0.0, clock.seconds(before, last.launched) - packing_s),
            overlap_s=max(0.0, hidden_s),
            codec_s=packing_s + adding_s,
        )

    def _under_way_s(self, clock: HostClock) -> float:
        zero = self.buckets[0].launched
        spans = [
            (clock.seconds(zero, b.launched), clock.seconds(zero, b.done)) for b in self.buckets
        ]
        total, reached = 0.0, 0.0
        for begin, end in sorted(spans):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total


class NetSense:
    """What a rank knows and decides; one for each DistributedDataParallel model.

    Args:
        model: the model whose gradients are exchanged; its process group is used.
        settings: every constant; by default mode "model".
        optimizer: where its rate falls, what is owed is sent at the rate of the step that computed
            it; the first parameter group's counts. See also `Settings.shared`.
        report: called as `report(stats, step)` after every step, on this rank's own thread;
            `mlflow.log_metrics` fits.
        clock: where times come from; by default the host's for gloo and the GPU's for NCCL.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        settings: Settings | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        report: Report | None = None,
        clock: HostClock | None = None,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise UserError(
                f"NetSense takes a DistributedDataParallel, not a {type(model).__name__}: "
                f"wrap the model in it first"
            )
        settings = settings or Settings()
        self._optimizer = optimizer
        plain_sgd = isinstance(optimizer, torch.optim.SGD) and not self._momentum()
        self._without_momentum = settings.shared is None and plain_sgd
        shared = plain_sgd if settings.shared is None else settings.shared
        self.settings = replace(settings, shared=shared)
        self._group: dist.ProcessGroup = model.process_group
        self._ranks = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)
        parameters = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        self._names = {id(parameter): name for name, parameter in parameters}
        self._sizes = {name: parameter.numel() for name, parameter in parameters}
        num_bytes = sum(p.numel() * p.element_size() for _, p in parameters)
        self._gradient = Gradient(sum(self._sizes.values()), num_bytes, self._ranks, shared)
        self._law = make_law(self.settings, self._gradient)
        self._clock = clock or (
            DeviceClock() if dist.get_backend(self._group) == "nccl" else HostClock()
        )
        self._report = report
        self._residuals = Residuals()
        #: The learning rate of the step before, 0 for none.
        self._rate = 0.0
        self._agreed: dict[Layout, torch.Tensor] = {}
        self._pruning: dict[Layout, Pruning] = {}
        self._steps = 0
        self._step = Step(DENSE if self._ranks == 1 else self._law.decision)
        self._before: Any = None
        self._sent_again = sent_again()
        #: The step before; the agreement under way tells of it.
        self._last = Interval(self._step.decision)
        self._norm: torch.Tensor | None = None
        self._agreement: Agreement | None = None

    def exchange(self, bucket: GradBucket) -> Result:
        """A bucket's mean gradient over ranks."""
        if bucket.index() == 0:
            self._begin()
        marks = BucketMarks(self._clock.mark())
        self._step.buckets.append(marks)
        gradient, decision = bucket.buffer(), self._step.decision
        layout = self._layout(bucket)
        if decision.method is Method.SPARSE:
            return self._sparse(bucket, layout, marks)
        self._step.wire_bytes += decision.wire_bytes(
            gradient.numel(), gradient.element_size(), self._ranks
        )
        if decision.method is Method.FP16 and gradient.element_size() > HALF_BYTES:
            owed = self._residuals.of(layout, gradient.device)
            return self._half(gradient.add_(owed), owed, marks)
        taken = self._residuals.take(layout, gradient.device)
        if taken is not None:
            gradient.add_(taken)
        # As DDP itself does: for three ranks a division differs.
        gradient.mul_(1.0 / self._ranks)
        return self._launch(gradient, marks, lambda: gradient)

    def _half(self, gradient: torch.Tensor, owed: torch.Tensor, marks: BucketMarks) -> Result:
        """All values in 16 bits, divided first so that the sum fits; rounding errors are kept."""
        gradient.mul_(1.0 / self._ranks)
        most = HALF_MAX / self._ranks
        sent = gradient.clamp(-most, most).half()
        if _finite(gradient):
            torch.sub(gradient, sent, out=owed).mul_(self._ranks)
        else:
            sent.fill_(torch.nan)
            owed.zero_()
        return self._launch(sent, marks, lambda: gradient.copy_(sent))

    def _launch(
        self, sent: torch.Tensor, marks: BucketMarks, write: Callable[[], torch.Tensor]
    ) -> Result:
        marks.launched = self._clock.mark()
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        return self._then(marks, write, work.get_future())

    def _sparse(self, bucket: GradBucket, layout: Layout, marks: BucketMarks) -> Result:
        gradient, decision, ranks = bucket.buffer(), self._step.decision, self._ranks
        numel, device, shared = gradient.numel(), gradient.device, bool(self.settings.shared)
        owed, count = self._residuals.of(layout, device), decision.count(numel)
        kept = None
        if self.settings.mode == "paper":
            pruning = self._pruning.setdefault(layout, Pruning())
            kept = pruning.kept(bucket.parameters(), decision, self._steps)
        finite = _finite(gradient)
        if finite:
            owe(gradient, owed, kept)
        if shared:
            places = shared_places(self._agreed.get(layout), numel, count, self._steps, device)
        elif finite:
            places = largest(owed, count, self._steps)
        else:
            places = torch.arange(count, device=device)
        # With NaN every rank sees it, as a GradScaler needs, and nothing is owed of it.
        found = owed if finite else torch.full_like(owed, torch.nan)
        sent = take(found, places, decision, ranks, gradient.dtype)
        self._step.wire_bytes += decision.wire_bytes(
            numel, SINGLE_BYTES, ranks, len(places) if shared else count, shared=shared
        )
        if not shared:
            return self._own(gradient, places, sent, count, marks)
        # Each rank has its say on each position.
        share = (self._rank + self._steps) % ranks
        told = propose(owed, layout, decision, share, ranks, self._steps)
        chosen = told.new_empty(ranks * len(told))
        self._step.chosen[layout] = chosen
        marks.places, marks.launched = places, self._clock.mark()
        first = dist.all_reduce(sent, group=self._group, async_op=True)
        kind = gradient.dtype
        write = lambda: gradient.zero_().index_copy_(0, places, sent.to(kind))  # noqa: E731
        second = dist.all_gather_single(chosen, told, group=self._group, async_op=True)
        return self._then(marks, write, first.get_future(), second.get_future())

    def _own(
        self, gradient: torch.Tensor, at: torch.Tensor, sent: torch.Tensor, count: int, marks: Any
    ) -> Result:
        places, sent = (pad(each, (0, count - len(at))) for each in (at.int(), sent))
        values, chosen = (each.new_empty(self._ranks * count) for each in (sent, places))
        marks.launched = self._clock.mark()
        first = dist.all_gather_single(values, sent, group=self._group, async_op=True)
        write = partial(add_up, gradient, chosen, values, self._ranks)
        second = dist.all_gather_single(chosen, places, group=self._group, async_op=True)
        return self._then(marks, write, first.get_future(), second.get_future())

    def _then(
        self,
        marks: BucketMarks,
        write: Callable[[], torch.Tensor],
        *exchanged: torch.futures.Future[Any],
    ) -> Result:
        """The callback must not hold self or the group: a group freed by its own thread aborts."""
        clock = self._clock
        # Not `collect_all`: on NCCL its callbacks would run on the compute stream, which waits.
        *before, last = exchanged

        def finish(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()
            for each in before:
                each.wait()
            marks.done = clock.mark()
            result = write()
            values = result.float()
            marks.square = torch.dot(values, values)
            marks.written = clock.mark()
            return result

        result: Result = last.then(finish)
        return result

    def _layout(self, bucket: GradBucket) -> Layout:
        try:
            return tuple((self._names[id(each)], each.numel()) for each in bucket.parameters())
        except KeyError:
            raise UserError(
                "a bucket holds a parameter that the model of this NetSense has not: "
                "make one NetSense for each model, after the last change of its parameters"
            ) from None

    def _begin(self) -> None:
        ended, decision = self._step, self._step.decision
        self._follow_rate()
        if self._ranks > 1:
            first, latency_s = self._agreement is None, None
            if self._agreement is not None:
                numbers = self._agreement.numbers()
                latency_s = self._agreement.latency_s()
                self._law.update(read(numbers, self._last, self._steps - 1))
                decision = self._law.decision
            if ended.buckets:
                self._end_step(latency_s)
            momentum = self._momentum() if self._without_momentum else 0.0
            state = self._steps, asdict(self.settings), decision, momentum
            numbers = numbers_of(self._last, state)
            self._agreement = Agreement(numbers, self._norm, self._group, self._clock)
            if first:
                # Before sizes depend on a rank's settings.
                read(self._agreement.numbers(), self._last, self._steps)
            if momentum:
                raise UserError(
                    f"the optimizer has momentum {momentum:g}, and had none when NetSense chose "
                    f"shared positions: make NetSense after the scheduler, or choose "
                    f"Settings(shared=False) or Settings(shared=True)"
                )
        if ended.buckets and self._report:
            self._report(self.stats(), self._steps)
        self._before, self._agreed = ended.end, ended.chosen
        self._step, self._steps = Step(decision), self._steps + 1

    def _momentum(self) -> float:
        groups = self._optimizer.param_groups if self._optimizer else []
        return max((float(group.get("momentum", 0.0)) for group in groups), default=0.0)

    def _follow_rate(self) -> None:
        """Keep what is owed in steps of the optimizer: it multiplies by its rate of now."""
        rate = float(self._optimizer.param_groups[0]["lr"]) if self._optimizer else 0.0
        if rate and self._rate and rate != self._rate:
            self._residuals.scale(self._rate / rate)
        self._rate = rate or self._rate

    def _end_step(self, latency_s: float | None) -> None:
        """Measure the step that ended."""
        seen, before = self._step.seen(self._clock, self._before, latency_s), self._sent_again
        self._sent_again = sent_again()
        lost = None if before is None else float((self._sent_again or before) - before)
        self._last, self._norm = replace(seen, lost=lost), self._step.norm()

    def stats(self) -> dict[str, float]:
        """The last finished step and the filters; `wire_ratio`: bytes over a plain all-reduce's."""
        last = self._last
        if self._step.end is not None:
            last = self._step.seen(self._clock, self._before, None)
        times = ("transfer_s", "latency_s", "compute_s", "overlap_s", "codec_s")
        sense = self._law.sense
        dense_bytes = max(1.0, self._gradient.wire_bytes(DENSE))
        known = {
            "steps": self._steps,
            "ratio": last.decision.ratio,
            "wire_ratio": last.wire_bytes / dense_bytes,
            "wire_bytes": last.wire_bytes,
            "quantised": last.decision.quantised,
            **{str(method): last.decision.method is method for method in Method},
            **{f"own_{name}": getattr(last, name) for name in times},
            "own_lost": self._last.lost,
            "ebb_gbytes_per_s": sense.ebb_gbytes_per_s,
            "btlbw_gbytes_per_s": sense.btlbw.value,
            "rtprop_us": sense.rtprop.value,
            "bdp_bytes": sense.bdp_bytes,
        }
        return {name: float(value) for name, value in known.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of every rank: what it owes. The network after a restart is sensed."""
        return {
            "format": FORMAT,
            "rank": self._rank,
            "ranks": self._ranks,
            "error_feedback": self._residuals.state(),
            "rate": self._rate,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Owe what `state_dict` tells; raises UserError for a state that is not this rank's."""
        expected = {"format": FORMAT, "rank": self._rank, "ranks": self._ranks}
        for name, value in expected.items():
            if state.get(name) != value:
                raise UserError(
                    f"the NetSense state has {name} {state.get(name)}, this process has {value}: "
                    f"load on each rank what the same rank of as many saved, with this release"
                )
        self._residuals.restore(state["error_feedback"], self._sizes)
        self._rate = state["rate"]


def netsense_hook(state: NetSense, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook for `register_comm_hook`."""
    return state.exchange(bucket)
