"""Chrome traces of PyTorch's profiler (Kineto), one rank each: calls, and overlap with compute.

A communication kernel tells channels (blocks of its grid), threads and time. What it sent stands in
its own arguments, or in those of the operation `record_param_comms` that launched it: the one in
which, on the same thread, the launch with the kernel's correlation lies. A kernel's time includes
waiting for the other ranks; only the least over all ranks is the call's.
"""

import ast
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.kineto_events import EXTERNAL, Events, Span, comm_kernel, read_events
from dynamiccl.collect.output import FileReport
from dynamiccl.collect.rank_calls import GPU, RankCall, RankTrace, mapping, number, text, whole
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Collective, NcclVersion

_FloatArray = npt.NDArray[np.float64]
#: A process group: name, ranks, and which of the job's they are.
_Group = tuple[str | None, int | None, tuple[int, ...] | None]
_NO_GROUP: Final = (None, None, None)
_TUNABLE: Final = frozenset(each.wire for each in Collective if each.tunable)

#: PyTorch's element types (c10/core/ScalarType.h and the C++ names that older traces hold) ->
#: nccl-tests' spelling and bytes. NCCL has no bool and no complex numbers: PyTorch sends bytes and
#: pairs of floats (torch/csrc/distributed/c10d/NCCLUtils.hpp).
_TYPES: Final[Mapping[str, tuple[str, int]]] = {
    **dict.fromkeys(("char", "signed char", "int8"), ("int8", 1)),
    **dict.fromkeys(("byte", "unsigned char", "uint8", "bool"), ("uint8", 1)),
    **dict.fromkeys(("int", "int32"), ("int32", 4)),
    **dict.fromkeys(("uint32",), ("uint32", 4)),
    **dict.fromkeys(("long", "long int", "int64"), ("int64", 8)),
    **dict.fromkeys(("uint64",), ("uint64", 8)),
    **dict.fromkeys(("half", "c10::half", "float16"), ("half", 2)),
    **dict.fromkeys(("float", "float32"), ("float", 4)),
    **dict.fromkeys(("double", "float64"), ("double", 8)),
    **dict.fromkeys(("bfloat16", "c10::bfloat16"), ("bfloat16", 2)),
    **dict.fromkeys(("float8_e4m3fn", "c10::float8_e4m3fn"), ("f8e4m3", 1)),
    **dict.fromkeys(("float8_e5m2", "c10::float8_e5m2"), ("f8e5m2", 1)),
}
#: Bytes of an element by nccl-tests' spelling.
_TYPE_BYTES: Final[Mapping[str, int]] = dict(_TYPES.values())
#: PyTorch's names without prefix, underscores and variants of the same call.
_COLLECTIVES: Final[Mapping[str, Collective]] = {
    **{name.wire.lower(): name for name in Collective if name is not Collective.SendRecv},
    "alltoallv": Collective.AlltoAll,
    "send": Collective.SendRecv,
    "recv": Collective.SendRecv,
}
#: `_allgather_base`, `all_gather_into_tensor_coalesced`, `broadcast_oop`, `all_reduce_barrier`, ...
_VARIANT: Final = re.compile(r"base|intotensor|tensor|coalesced|oop|sparse|uneven|barrier")
_DIRECTION: Final = re.compile(r"\s*\d+\s*(?:->|<-)\s*\d+.*")


def read_kineto(stream: BinaryIO, name: str, report: FileReport) -> RankTrace:
    """The calls and steps of a trace; what cannot be read is rejected in `report`, by line."""
    return _Calls(read_events(stream, report), name, report).read()


def torch_collective(name: str) -> Collective | None:
    """The collective of a PyTorch name; None for other operations (`wait`, `barrier`).

    >>> torch_collective("nccl:_all_gather_base").wire, torch_collective("wait")
    ('AllGather', None)
    """
    plain = _DIRECTION.sub("", name.rpartition(":")[2]).lower().replace("_", "")
    return _COLLECTIVES.get(_VARIANT.sub("", plain))


class _Calls:
    """Makes calls and steps of the events of a trace."""

    def __init__(self, events: Events, name: str, report: FileReport) -> None:
        self._events, self._name, self._report = events, name, report
        self._info = mapping(events.values.get("distributedInfo"))
        self._rank = whole(self._info.get("rank"))
        self._groups = _groups(self._info)
        self._base_us = (number(events.values.get("baseTimeNanoseconds")) or 0.0) / 1e3
        self._compute = np.asarray(events.compute).reshape(-1, 3)
        launches = np.asarray(events.launches).reshape(-1, 3)
        self._launches = launches[np.argsort(launches[:, 0], kind="stable")]
        self._operations = _Around(events.operations)
        self._annotations = _Around(events.annotations)
        self._by_external = {
            span.arguments[EXTERNAL]: span
            for span in events.operations
            if isinstance(span.arguments.get(EXTERNAL), int)
        }
        self._steps = sorted(events.steps, key=lambda each: each.start_us)

    def read(self) -> RankTrace:
        """Calls in the order in which they began."""
        world_size = whole(self._info.get("world_size"))
        found = RankTrace(world_size=world_size, has_steps=bool(self._steps))
        kernels = sorted(self._events.kernels, key=lambda each: each.start_us)
        launches = [self._launch(kernel.correlation) for kernel in kernels]
        told = [self._operation(*pair) for pair in zip(kernels, launches, strict=True)]
        of_operation = Counter(id(operation) for operation in told if operation is not None)
        exposed = _exposed_us(kernels, self._compute)
        for kernel, launch, operation, exposed_us in zip(
            kernels, launches, told, exposed, strict=True
        ):
            is_alone = operation is None or of_operation[id(operation)] == 1
            call = self._of_kernel(kernel, operation, launch, is_alone)
            call.exposed_us = float(exposed_us)
            found.calls.append(call)
        found.calls += self._without_kernel(of_operation)
        found.calls.sort(key=lambda each: each.timestamp_us or 0.0)
        self._report.rows_read += len(found.calls)
        told_of_all = {"rank": self._rank, "source_file": self._name}
        steps = _steps(self._steps, kernels, self._compute, self._base_us)
        found.steps = [step | told_of_all for step in steps]
        return found

    def _launch(self, correlation: float) -> tuple[int, float] | None:
        """Thread and time of the launch with a correlation id; None if not in the trace."""
        place = int(np.searchsorted(self._launches[:, 0], correlation))
        if correlation < 0 or place >= len(self._launches):
            return None
        ident, moment_us, thread = self._launches[place]
        return (int(thread), float(moment_us)) if ident == correlation else None

    def _operation(self, kernel: Span, launch: tuple[int, float] | None) -> Span | None:
        """The operation that launched a kernel, where the trace proves it."""
        around = None if launch is None else self._operations.find(*launch)
        if around is not None:
            return around
        # Grouped calls are launched behind their operations, when the group ends.
        external = kernel.arguments.get(EXTERNAL)
        # Old traces give the correlation as the external id: that is no operation's.
        if not isinstance(external, int) or external == kernel.correlation:
            return None
        return self._by_external.get(external)

    def _of_kernel(
        self,
        kernel: Span,
        operation: Span | None,
        launch: tuple[int, float] | None,
        is_alone: bool,
    ) -> RankCall:
        kind = comm_kernel(kernel.name)
        assert kind is not None
        arguments = dict(operation.arguments) if operation is not None else {}
        arguments |= kernel.arguments
        annotation = None if launch is None else self._annotations.find(*launch)
        call = self._described(arguments, annotation, kind.collective)
        call.kernel = kernel.name.partition("(")[0]
        call.asks_tuner = False if call.num_ranks == 1 else kind.asks_tuner
        if not is_alone:
            # Several kernels of one operation share what it sent: how, nobody tells.
            call.size_bytes = None
            call.key = None
            self._report.remark("several kernels of one operation: their sizes are not known")
        if kind.is_nccl:
            call.num_channels = _first_of(kernel.arguments.get("grid"))
        call.num_threads = _first_of(kernel.arguments.get("block"))
        call.time_us = kernel.duration_us if kernel.duration_us > 0 else None
        call.timing_source = GPU if kernel.duration_us > 0 else None
        call.timestamp_us = self._base_us + kernel.start_us
        call.step = self._step(kernel.start_us if launch is None else launch[1])
        call.facts = self._facts(kernel.where)
        return call

    def _described(
        self, arguments: Mapping[str, Any], annotation: Span | None, ran: Collective | None
    ) -> RankCall:
        """The call's arguments: from the operation, else from the annotation's tensors."""
        told = str(arguments.get("Collective name") or (annotation.name if annotation else ""))
        collective = torch_collective(told)
        datatype, sent, received = _sizes(arguments, annotation)
        name, size, members = self._group(arguments.get("Process Group Name"))
        num_ranks = whole(arguments.get("Group size")) or size
        if collective is Collective.AllGather and received is None and sent and num_ranks:
            # Of an annotation: the input alone, one rank's part.
            received = sent * num_ranks
        if ran is None or ran is Collective.SendRecv:
            ran = ran if collective is None else collective
        is_the_same = collective is None or ran is collective
        sequence = whole(arguments.get("Seq"))
        members = _ranks(arguments.get("Process Group Ranks")) or members
        described = (name, text(arguments.get("Process Group Description")))
        is_whole = ran is not None and ran is not Collective.SendRecv
        return RankCall(
            source=CallSource.KINETO,
            source_file=self._name,
            rank=self._rank,
            key=(name, members, sequence, ran) if name and sequence and is_whole else None,
            group=":".join(each for each in described if each) or None,
            group_ranks=members,
            group_sequence=sequence,
            collective=None if ran is None else ran.wire,
            # A list of unequal parts is sent as other collectives: their sizes are not told.
            size_bytes=_message_bytes(ran, datatype, sent, received) if is_the_same else None,
            datatype=datatype,
            num_ranks=num_ranks,
        )

    def _group(self, name: object) -> _Group:
        """The process group by name, or the only one of the job."""
        if name:
            told, size, members = self._groups.get(str(name), _NO_GROUP)
            return text(name) or told, size, members
        is_only = len(self._groups) == 1 and self._info.get("pg_count") == 1
        return next(iter(self._groups.values())) if is_only else _NO_GROUP

    def _without_kernel(self, of_operation: Counter[int]) -> list[RankCall]:
        """Operations without a communication kernel: copies, other backends, untraced."""
        copies: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for correlation, begin_us, end_us in np.asarray(self._events.copies).reshape(-1, 3):
            launch = self._launch(correlation)
            operation = None if launch is None else self._operations.find(*launch)
            if operation is not None:
                copies[id(operation)].append((begin_us, end_us))
        found = []
        for operation in self._events.operations:
            collective = torch_collective(str(operation.arguments.get("Collective name", "")))
            if id(operation) not in of_operation and collective is not None:
                found.append(self._copied(operation, copies.get(id(operation), [])))
        for annotation in self._events.annotations:
            is_nccl = annotation.name.startswith("nccl:")
            if not is_nccl and torch_collective(annotation.name) is not None:
                call = self._placed(self._described({}, annotation, None), annotation)
                call.asks_tuner = False
                found.append(call)
        return found

    def _copied(self, operation: Span, copies: Sequence[tuple[float, float]]) -> RankCall:
        call = self._placed(self._described(operation.arguments, None, None), operation)
        if copies:
            begin_us = float(min(begin for begin, _ in copies))
            end_us = float(max(end for _, end in copies))
            call.kernel, call.asks_tuner = "memcpy", False
            call.time_us, call.timing_source = end_us - begin_us or None, GPU
            call.timestamp_us = self._base_us + begin_us
        elif call.num_ranks == 1 or call.collective not in _TUNABLE:
            call.asks_tuner = False
        return call

    def _placed(self, call: RankCall, span: Span) -> RankCall:
        call.timestamp_us = self._base_us + span.start_us
        call.step = self._step(span.start_us)
        call.facts = self._facts(0)
        return call

    def _step(self, moment_us: float) -> int | None:
        """The training step of a moment; 0 where the trace marks none."""
        if not self._steps:
            return 0
        place = bisect_right(self._steps, moment_us, key=lambda each: each.start_us) - 1
        if place < 0 or moment_us > self._steps[place].end_us:
            return None
        return self._steps[place].step

    def _facts(self, gpu: int) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        version = self._info.get("nccl_version")
        if version:
            try:
                facts["nccl_version"] = str(NcclVersion.parse(str(version)))
            except UnknownName:
                self._report.remark(f"NCCL release '{version}' is not known: left open")
        for each in map(mapping, _listed(self._events.values.get("deviceProperties"))):
            if each.get("id") == gpu:
                facts["gpu"] = text(each.get("name"))
                major, minor = whole(each.get("computeMajor")), whole(each.get("computeMinor"))
                if major is not None and minor is not None:
                    facts["compute_capability"] = float(f"{major}.{minor}")
        return facts


class _Around:
    """Spans of the host's threads, to find the one around a moment."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._by_thread: dict[int, list[Span]] = defaultdict(list)
        for span in sorted(spans, key=lambda each: each.start_us):
            self._by_thread[span.where].append(span)

    def find(self, thread: int, moment_us: float) -> Span | None:
        """The innermost span of a thread around a moment."""
        line = self._by_thread.get(thread, [])
        place = bisect_right(line, moment_us, key=lambda each: each.start_us)
        # Spans of a thread nest: the last that began before, of those that did not end.
        for span in reversed(line[max(place - 8, 0) : place]):
            if span.end_us >= moment_us:
                return span
        return None


def _groups(info: Mapping[str, Any]) -> dict[str, _Group]:
    """The process groups that `distributedInfo` lists, by name."""
    groups: dict[str, _Group] = {}
    for each in map(mapping, _listed(info.get("pg_config"))):
        size = whole(each.get("pg_size"))
        if size:
            name = str(each.get("pg_name", ""))
            groups[name] = (text(name), size, _ranks(each.get("ranks")))
    return groups


def _sizes(
    arguments: Mapping[str, Any], annotation: Span | None
) -> tuple[str | None, int | None, int | None]:
    """Element type by nccl-tests' name, and number of elements of input and output."""
    if "In msg nelems" in arguments:
        sent, received = arguments["In msg nelems"], arguments.get("Out msg nelems")
        return _type(str(arguments.get("dtype", ""))), whole(sent), whole(received)
    shapes = annotation.arguments.get("Input Dims") if annotation else None
    types = annotation.arguments.get("Input type") if annotation else None
    if not isinstance(shapes, list) or not isinstance(types, list) or len(types) != 1:
        return None, None, None
    lengths = [[whole(n) for n in shape] if isinstance(shape, list) else [None] for shape in shapes]
    known = [[n for n in shape if n is not None] for shape in lengths]
    return (
        _type(str(types[0])),
        whole(sum(map(math.prod, known))) if known == lengths else None,
        None,
    )


def _type(name: str) -> str | None:
    inner = re.sub(r"^.*\(|\).*$", "", name).strip().lower()
    return _TYPES[inner][0] if inner in _TYPES else None


def _message_bytes(
    collective: Collective | None, datatype: str | None, sent: int | None, received: int | None
) -> int | None:
    """NCCL's nBytes of a call, from one rank's elements; None where they are not known, or 0.

    It is the larger of both buffers: the whole output of AllGather, the whole input of
    ReduceScatter (`ncclInfoSetDerived` in src/include/info.h, NVIDIA/nccl v2.19).
    """
    elements = received if collective is Collective.AllGather else sent
    if collective is None or datatype is None or not elements:
        return None
    return elements * _TYPE_BYTES[datatype]


def _exposed_us(kernels: Sequence[Span], compute: _FloatArray) -> _FloatArray:
    """(N,) us of each of N communication kernels in which its GPU computed nothing."""
    begin = np.array([kernel.start_us for kernel in kernels])
    end = np.array([kernel.end_us for kernel in kernels])
    gpus = np.array([kernel.where for kernel in kernels])
    exposed = np.array([kernel.duration_us for kernel in kernels])
    for gpu in set(gpus.tolist()):
        rows, others = gpus == gpu, compute[compute[:, 2] == gpu]
        exposed[rows] -= _within(_union(others[:, 0], others[:, 1]), begin[rows], end[rows])
    return exposed.clip(min=0.0)


def _steps(
    steps: Sequence[Span], kernels: Sequence[Span], compute: _FloatArray, base_us: float
) -> list[dict[str, Any]]:
    """Rows of `steps`: one for each ProfilerStep, else one for the whole trace.

    `base_us` is the moment that the trace counts from. Kernels count where they ran, not where they
    were launched: what runs on into the next step is that one's. Without any kernel (the GPU was
    not traced) only the step's length is known.
    """
    communicates = np.array([(k.start_us, k.end_us) for k in kernels]).reshape(-1, 2)
    computing = _union(compute[:, 0], compute[:, 1])
    communicating = _union(communicates[:, 0], communicates[:, 1])
    busy = _union(*(np.concatenate(both) for both in zip(computing, communicating, strict=True)))
    has_kernels = len(busy[0]) > 0
    spans = [(step.step, step.start_us, step.end_us) for step in steps]
    if not spans and has_kernels:
        spans = [(0, float(busy[0][0]), float(busy[1][-1]))]
    begin, end = np.array([bounds for _, *bounds in spans]).reshape(-1, 2).T
    parts: dict[str, _FloatArray] = {}
    if has_kernels:
        compute_us, busy_us = _within(computing, begin, end), _within(busy, begin, end)
        parts = {
            "compute_us": compute_us,
            "communication_us": _within(communicating, begin, end),
            "exposed_us": busy_us - compute_us,
            "idle_us": np.maximum(end - begin - busy_us, 0.0),
        }
    return [
        {
            "step": step,
            "timestamp_us": base_us + start_us,
            "step_us": end_us - start_us,
            **{name: float(values[row]) for name, values in parts.items()},
        }
        for row, (step, start_us, end_us) in enumerate(spans)
    ]


def _union(starts: _FloatArray, ends: _FloatArray) -> tuple[_FloatArray, _FloatArray]:
    """Begins and ends of the union of intervals, (N,) us each and in any order."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    is_first = np.append(True, starts[1:] > ends[:-1])[: len(starts)]
    is_last = np.append(is_first[1:], True)[: len(starts)]
    return starts[is_first], ends[is_last]


def _within(
    union: tuple[_FloatArray, _FloatArray], begin: _FloatArray, end: _FloatArray
) -> _FloatArray:
    """(N,) us of a union of intervals that lie between each `begin` and `end`."""
    starts, ends = union
    if not len(starts):
        return np.zeros(len(begin))
    before = np.append(0.0, np.cumsum(ends - starts))

    def until(moment: _FloatArray) -> _FloatArray:
        place = np.searchsorted(starts, moment, side="right")
        last = np.maximum(place - 1, 0)
        within = np.clip(moment - starts[last], 0.0, ends[last] - starts[last])
        found: _FloatArray = np.where(place > 0, before[last] + within, 0.0)
        return found

    return until(end) - until(begin)


def _ranks(value: object) -> tuple[int, ...] | None:
    """`[0, 1]`, as a list or as text; None where it is shortened (`[0, 1, ..., 63]`) or empty."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    if not isinstance(value, list | tuple):
        return None
    found = tuple(rank for each in value if (rank := whole(each)) is not None)
    return found if found and len(found) == len(value) else None


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _first_of(value: object) -> int | None:
    return whole(value[0]) if isinstance(value, list) and value else None
