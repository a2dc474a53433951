"""The part of a Kineto trace that is kept while it is read: columns of numbers, not events.

A trace of gigabytes has millions of events. Kernels and launches are kept as three or four numbers
each, and only what communicates with its text.
"""

import re
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dynamiccl.collect.reports import FileReport
from dynamiccl.collect.traces.files import TraceFile
from dynamiccl.collect.traces.json_stream import Damage, JsonStream
from dynamiccl.collect.traces.kernels import comm_kernel
from dynamiccl.collect.traces.values import mapping, number, whole

#: CUDA's and HIP's calls that start what runs on a GPU.
_LAUNCHES: Final = r"(?:cuda|cu|hip)(?:Ext)?(?:Module)?(?:Launch|GraphLaunch|Memcpy|MemcpyBatch)"
_IS_LAUNCH: Final = re.compile(_LAUNCHES)
#: Names of annotations: a collective of a backend, and a step.
_COLLECTIVE: Final = re.compile(r"(nccl|gloo|ucc|mpi|xccl|hccl):(.+)")
_STEP: Final = re.compile(r"ProfilerStep#(\d+)$")
_PARAM_COMMS: Final = "record_param_comms"
#: Laid-out events that are not passed over (json_stream.py).
_WANTED: Final = re.compile(
    r'\{\n    "ph": "X",\s+"cat": "(?:'
    r'kernel"|gpu_memcpy"|user_annotation",\s+"name": "(?:ProfilerStep|\w+:)'
    rf'|cpu_op",\s+"name": "{_PARAM_COMMS}'
    rf'|cuda_(?:runtime|driver)",\s+"name": "{_LAUNCHES})'
)


#: Arguments of events (torch/csrc/profiler/util.h in pytorch/pytorch, libkineto's output_json.cpp).
_LOOKED_AT: Final = (
    *("External id", "correlation", "device", "grid", "block", "Input Dims", "Input type"),
    *("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Seq"),
    *("Process Group Name", "Process Group Description", "Process Group Ranks"),
)


@dataclass(slots=True)
class Span:
    """An event on a host thread: an operation, or an annotation."""

    name: str
    start_us: float
    end_us: float
    thread: int
    arguments: Mapping[str, Any]


@dataclass(slots=True)
class Kernel:
    """A communication kernel."""

    name: str
    start_us: float
    #: Not the end: moments since 1970 leave a double fewer digits than the trace has.
    duration_us: float
    device: int
    correlation: int
    arguments: Mapping[str, Any]

    @property
    def end_us(self) -> float:
        """End time in us."""
        return self.start_us + self.duration_us


@dataclass(slots=True)
class Events:
    """The relevant events of one trace, and its top-level values."""

    values: dict[str, Any] = field(default_factory=dict)
    operations: list[Span] = field(default_factory=list)
    annotations: list[Span] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    #: Of kernels that compute.
    compute_start_us: "array[float]" = field(default_factory=lambda: array("d"))
    compute_end_us: "array[float]" = field(default_factory=lambda: array("d"))
    compute_device: "array[int]" = field(default_factory=lambda: array("q"))
    #: Of calls that start something on a GPU.
    launch_correlation: "array[int]" = field(default_factory=lambda: array("q"))
    launch_us: "array[float]" = field(default_factory=lambda: array("d"))
    launch_thread: "array[int]" = field(default_factory=lambda: array("q"))
    #: Of copies on the GPU.
    copy_correlation: "array[int]" = field(default_factory=lambda: array("q"))
    copy_start_us: "array[float]" = field(default_factory=lambda: array("d"))
    copy_end_us: "array[float]" = field(default_factory=lambda: array("d"))
    _threads: dict[tuple[int | None, str], int] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep an event if it is relevant; raises ValueError for a damaged one."""
        if event.get("ph") != "X":
            return
        kind, name = event.get("cat"), str(event.get("name", ""))
        start_us, duration_us = number(event.get("ts")), number(event.get("dur", 0.0))
        if start_us is None or duration_us is None or duration_us < 0:
            raise ValueError(f"ts {event.get('ts')}, dur {event.get('dur')}")
        end_us = start_us + duration_us
        arguments = mapping(event.get("args"))
        if kind == "kernel":
            self._add_kernel(name, start_us, duration_us, arguments)
        elif kind in {"cuda_runtime", "cuda_driver"}:
            if _IS_LAUNCH.match(name):
                self.launch_correlation.append(_id(arguments, "correlation"))
                self.launch_us.append(start_us)
                self.launch_thread.append(self._thread(event))
        elif kind == "gpu_memcpy":
            self.copy_correlation.append(_id(arguments, "correlation"))
            self.copy_start_us.append(start_us)
            self.copy_end_us.append(end_us)
        else:
            told = Span(name, start_us, end_us, self._thread(event), _kept(arguments))
            self._add_span(kind, told)

    def _add_kernel(
        self, name: str, start_us: float, duration_us: float, arguments: Mapping[str, Any]
    ) -> None:
        device = whole(arguments.get("device")) or 0
        if comm_kernel(name) is None:
            self.compute_start_us.append(start_us)
            self.compute_end_us.append(start_us + duration_us)
            self.compute_device.append(device)
            return
        correlation, told = _id(arguments, "correlation"), _kept(arguments)
        self.kernels.append(
            Kernel(sys.intern(name), start_us, duration_us, device, correlation, told)
        )

    def _add_span(self, kind: object, span: Span) -> None:
        if kind == "cpu_op" and span.name == _PARAM_COMMS:
            self.operations.append(span)
        elif kind == "user_annotation" and _STEP.match(span.name):
            self.steps.append(span)
        elif kind == "user_annotation" and _COLLECTIVE.match(span.name):
            self.annotations.append(span)

    @property
    def process(self) -> int | None:
        """The number of the one process whose events these are; None where there are several."""
        found = {process for process, _ in self._threads}
        return found.pop() if len(found) == 1 else None

    def _thread(self, event: Mapping[str, Any]) -> int:
        """Thread ids, numbers or text, as numbers of our own."""
        name = (whole(event.get("pid")), str(event.get("tid")))
        return self._threads.setdefault(name, len(self._threads))


def read_events(trace: TraceFile, report: FileReport) -> Events:
    """Read a trace; events that do not decode are rejected in `report`, by line."""
    found = Events()
    with trace.open() as stream:
        stream_of = JsonStream(stream, frozenset({"traceEvents"}), _WANTED)
        for item in stream_of:
            if isinstance(item, Damage):
                report.reject(item.line, item.reason, item.text)
            elif not item.is_item:
                found.values[item.key] = item.value
            elif isinstance(item.value, dict):
                try:
                    found.add(item.value)
                except ValueError as error:
                    line, told = stream_of.line, str(item.value)
                    report.reject(line, f"an event that is damaged: {error}", told)
    return found


def step_number(span: Span) -> int:
    """The number in `ProfilerStep#12`."""
    found = _STEP.match(span.name)
    return int(found[1]) if found else 0


def backend_of(span: Span) -> str:
    """The backend in `gloo:all_reduce`."""
    return span.name.partition(":")[0]


def _kept(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The event arguments that are used later; equal strings are shared."""
    found = {name: arguments[name] for name in _LOOKED_AT if name in arguments}
    return {n: sys.intern(v) if isinstance(v, str) else v for n, v in found.items()}


def _id(arguments: Mapping[str, Any], name: str) -> int:
    value = whole(arguments.get(name))
    return -1 if value is None else value
