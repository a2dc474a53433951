"""Chrome traces of PyTorch's profiler (Kineto), one rank each: calls, and overlap with compute.

A communication kernel tells channels (blocks of its grid), threads and time. What it sent stands in
its own arguments, or in those of the operation `record_param_comms` that launched it: the one in
which, on the same thread, the launch with the kernel's correlation lies. A kernel's time includes
waiting for the other ranks; only the least over all ranks is the call's.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dynamiccl.collect.reports import FileReport
from dynamiccl.collect.traces.files import TraceFile
from dynamiccl.collect.traces.kernels import CommKernel, comm_kernel
from dynamiccl.collect.traces.kineto_events import (
    Events,
    Kernel,
    Span,
    backend_of,
    read_events,
    step_number,
)
from dynamiccl.collect.traces.kineto_steps import Cover, steps_of
from dynamiccl.collect.traces.rank_call import GPU, RankCall, RankTrace
from dynamiccl.collect.traces.values import (
    elements,
    group_text,
    listed,
    mapping,
    number,
    ranks,
    text,
    whole,
)
from dynamiccl.collect.traces.vocabulary import message_bytes, torch_collective, torch_type
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Collective, NcclVersion

_COPY: Final = CommKernel(None, asks_tuner=False, is_nccl=True)
_EXTERNAL: Final = "External id"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as `distributedInfo` lists it."""

    name: str
    size: int
    ranks: tuple[int, ...] | None


class _Spans:
    """Host spans by thread, to find the span around a moment."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._by_thread: dict[int, list[Span]] = defaultdict(list)
        for span in sorted(spans, key=lambda each: each.start_us):
            self._by_thread[span.thread].append(span)
        self._starts = {t: [s.start_us for s in line] for t, line in self._by_thread.items()}

    def around(self, thread: int, moment_us: float) -> Span | None:
        """The innermost span of a thread around a moment."""
        line = self._by_thread.get(thread)
        if line is None:
            return None
        place = bisect_right(self._starts[thread], moment_us)
        # Spans of a thread nest: the last that began before, of those that did not end.
        for span in reversed(line[max(place - 8, 0) : place]):
            if span.end_us >= moment_us:
                return span
        return None


def read_kineto(trace: TraceFile, report: FileReport) -> RankTrace:
    """The calls and steps of a trace; what cannot be read is rejected in `report`, by line."""
    events = read_events(trace, report)
    return _Reader(trace, events, report).read()


class _Reader:
    def __init__(self, trace: TraceFile, events: Events, report: FileReport) -> None:
        self._trace, self._events, self._report = trace, events, report
        self._info = mapping(events.values.get("distributedInfo"))
        self._groups = _groups(self._info)
        self._base_us = (number(events.values.get("baseTimeNanoseconds")) or 0.0) / 1e3
        order = np.argsort(np.asarray(events.launch_correlation), kind="stable")
        self._launch_order = order
        self._launch_ids = np.asarray(events.launch_correlation)[order]
        self._operations = _Spans(events.operations)
        self._annotations = _Spans(events.annotations)
        self._by_external = {
            span.arguments[_EXTERNAL]: span
            for span in events.operations
            if isinstance(span.arguments.get(_EXTERNAL), int)
        }
        self._cover = Cover(events)
        self._steps = sorted(events.steps, key=lambda each: each.start_us)

    def read(self) -> RankTrace:
        """Calls in the order in which they began."""
        rank, world = whole(self._info.get("rank")), whole(self._info.get("world_size"))
        found = RankTrace(rank=rank, world_size=world, has_steps=bool(self._steps))
        found.process = self._events.process
        kernels = sorted(self._events.kernels, key=lambda each: each.start_us)
        launched = [(kernel, self._launch(kernel.correlation)) for kernel in kernels]
        told = [self._operation(kernel, launch) for kernel, launch in launched]
        of_operation = Counter(id(operation) for operation in told if operation is not None)
        exposed = self._cover.exposed_us(kernels)
        for (kernel, launch), operation, exposed_us in zip(launched, told, exposed, strict=True):
            kind = comm_kernel(kernel.name) or _COPY
            is_alone = operation is None or of_operation[id(operation)] == 1
            call = self._call(kernel, kind, operation, launch, is_alone)
            call.exposed_us = exposed_us
            found.calls.append(call)
        found.calls += self._without_kernel(of_operation)
        found.calls.sort(key=lambda each: each.timestamp_us or 0.0)
        self._report.rows_read += len(found.calls)
        found.steps = steps_of(self._events, self._cover, self._base_us)
        for step in found.steps:
            step |= {"rank": rank, "source_file": self._trace.name}
        return found

    def _launch(self, correlation: int) -> tuple[int, float] | None:
        """Thread and time of the launch with a correlation id; None if not in the trace."""
        place = int(np.searchsorted(self._launch_ids, correlation))
        if correlation < 0 or place >= len(self._launch_ids):
            return None
        if self._launch_ids[place] != correlation:
            return None
        row = int(self._launch_order[place])
        return self._events.launch_thread[row], self._events.launch_us[row]

    def _operation(self, kernel: Kernel, launch: tuple[int, float] | None) -> Span | None:
        """The operation that launched a kernel, where the trace proves it."""
        around = None if launch is None else self._operations.around(*launch)
        if around is not None:
            return around
        # Grouped calls are launched behind their operations, when the group ends.
        external = kernel.arguments.get(_EXTERNAL)
        # Old traces give the correlation as the external id: that is no operation's.
        if not isinstance(external, int) or external == kernel.correlation:
            return None
        return self._by_external.get(external)

    def _call(
        self,
        kernel: Kernel,
        kind: CommKernel,
        operation: Span | None,
        launch: tuple[int, float] | None,
        is_alone: bool,
    ) -> RankCall:
        arguments = dict(operation.arguments) if operation is not None else {}
        arguments |= kernel.arguments
        annotation = None if launch is None else self._annotations.around(*launch)
        call = self._described(arguments, annotation, kind.collective)
        grid, block = kernel.arguments.get("grid"), kernel.arguments.get("block")
        duration_us = kernel.duration_us
        call.kernel = kernel.name.partition("(")[0]
        call.asks_tuner = False if call.num_ranks == 1 else kind.asks_tuner
        if not is_alone:
            # Several kernels of one operation share what it sent: how, nobody tells.
            call.size_bytes = None
            call.key = None
            self._report.remark("several kernels of one operation: their sizes are not known")
        if kind.is_nccl and kind is not _COPY:
            call.num_channels = _first_of(grid)
        call.num_threads = _first_of(block)
        call.time_us = duration_us if duration_us > 0 else None
        call.timing_source = GPU if duration_us > 0 else None
        call.timestamp_us = self._base_us + kernel.start_us
        call.step = self._step(kernel.start_us if launch is None else launch[1])
        call.thread = None if launch is None else launch[0]
        call.facts = self._facts(kernel.device)
        return call

    def _described(
        self, arguments: Mapping[str, Any], annotation: Span | None, ran: Collective | None
    ) -> RankCall:
        """The call's arguments: from the operation, else from the annotation's tensors."""
        told = str(arguments.get("Collective name") or (annotation.name if annotation else ""))
        collective = torch_collective(told)
        datatype, sent, received = self._sizes(arguments, annotation)
        group = self._group(arguments)
        num_ranks = whole(arguments.get("Group size")) or (group.size if group else None)
        if collective is Collective.AllGather and received is None and sent and num_ranks:
            # Of an annotation: the input alone, one rank's part.
            received = sent * num_ranks
        if ran is None or ran is Collective.SendRecv:
            ran = ran if collective is None else collective
        is_the_same = collective is None or ran is collective
        sequence = whole(arguments.get("Seq"))
        name = text(arguments.get("Process Group Name")) or (group.name if group else None)
        members = ranks(arguments.get("Process Group Ranks")) or (group.ranks if group else None)
        is_whole = ran is not None and ran is not Collective.SendRecv
        return RankCall(
            source=CallSource.KINETO,
            source_file=self._trace.name,
            rank=whole(self._info.get("rank")),
            key=(name, members, sequence, ran) if name and sequence and is_whole else None,
            group=group_text(name, arguments.get("Process Group Description")),
            group_ranks=members,
            group_sequence=sequence,
            collective=None if ran is None else ran.wire,
            # A list of unequal parts is sent as other collectives: their sizes are not told.
            size_bytes=message_bytes(ran, datatype, sent, received) if is_the_same else None,
            datatype=datatype,
            num_ranks=num_ranks,
        )

    def _sizes(
        self, arguments: Mapping[str, Any], annotation: Span | None
    ) -> tuple[str | None, int | None, int | None]:
        """Element type, and number of elements of input and output."""
        if "In msg nelems" in arguments:
            return (
                torch_type(str(arguments.get("dtype", ""))),
                whole(arguments["In msg nelems"]),
                whole(arguments.get("Out msg nelems")),
            )
        shapes = annotation.arguments.get("Input Dims") if annotation else None
        types = annotation.arguments.get("Input type") if annotation else None
        if not isinstance(shapes, list) or not isinstance(types, list) or len(types) != 1:
            return None, None, None
        return torch_type(str(types[0])), elements(shapes), None

    def _group(self, arguments: Mapping[str, Any]) -> Group | None:
        """The process group by name, or the only one of the job."""
        name = arguments.get("Process Group Name")
        if name:
            return self._groups.get(str(name))
        is_only = len(self._groups) == 1 and self._info.get("pg_count") == 1
        return next(iter(self._groups.values())) if is_only else None

    def _without_kernel(self, of_operation: Counter[int]) -> list[RankCall]:
        """Operations without a communication kernel: copies, other backends, untraced."""
        copies: dict[int, list[int]] = defaultdict(list)
        for row, correlation in enumerate(self._events.copy_correlation):
            launch = self._launch(correlation)
            operation = None if launch is None else self._operations.around(*launch)
            if operation is not None and id(operation) not in of_operation:
                copies[id(operation)].append(row)
        found = []
        for operation in self._events.operations:
            collective = torch_collective(str(operation.arguments.get("Collective name", "")))
            if id(operation) in of_operation or collective is None:
                continue
            found.append(self._copied(operation, copies.get(id(operation), [])))
        others = [a for a in self._events.annotations if backend_of(a) != "nccl"]
        for annotation in others:
            if torch_collective(annotation.name) is not None:
                call = self._described({}, annotation, None)
                call.asks_tuner = False
                self._place(call, annotation)
                found.append(call)
        return found

    def _copied(self, operation: Span, rows: Sequence[int]) -> RankCall:
        call = self._described(operation.arguments, None, None)
        self._place(call, operation)
        if rows:
            begin = min(self._events.copy_start_us[row] for row in rows)
            end = max(self._events.copy_end_us[row] for row in rows)
            call.kernel, call.asks_tuner = "memcpy", False
            call.time_us, call.timing_source = end - begin or None, GPU
            call.timestamp_us = self._base_us + begin
        elif call.num_ranks == 1 or call.collective not in _TUNABLE:
            call.asks_tuner = False
        return call

    def _place(self, call: RankCall, span: Span) -> None:
        call.timestamp_us = self._base_us + span.start_us
        call.step = self._step(span.start_us)
        call.thread = span.thread
        call.facts = self._facts(0)

    def _step(self, moment_us: float) -> int | None:
        if not self._steps:
            return 0
        place = bisect_right(self._steps, moment_us, key=lambda each: each.start_us) - 1
        if place < 0 or moment_us > self._steps[place].end_us:
            return None
        return step_number(self._steps[place])

    def _facts(self, device: int) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        version = self._info.get("nccl_version")
        if version:
            try:
                facts["nccl_version"] = str(NcclVersion.parse(str(version)))
            except UnknownName:
                self._report.remark(f"NCCL release '{version}' is not known: left open")
        for each in map(mapping, listed(self._events.values.get("deviceProperties"))):
            if each.get("id") == device:
                facts["gpu"] = text(each.get("name"))
                major, minor = whole(each.get("computeMajor")), whole(each.get("computeMinor"))
                if major is not None and minor is not None:
                    facts["compute_capability"] = float(f"{major}.{minor}")
        return facts


_TUNABLE: Final = frozenset(each.wire for each in Collective if each.tunable)


def _groups(info: Mapping[str, Any]) -> dict[str, Group]:
    groups = {}
    for each in map(mapping, listed(info.get("pg_config"))):
        size = whole(each.get("pg_size"))
        if size:
            name = str(each.get("pg_name", ""))
            groups[name] = Group(name, size, ranks(each.get("ranks")))
    return groups


def _first_of(value: object) -> int | None:
    return whole(value[0]) if isinstance(value, list) and value else None
