"""The events of a chrome trace of PyTorch's profiler (Kineto) that tell of communication.

A trace of gigabytes has millions of events: it is read event by event, kernels and launches are
kept as three numbers each, and only what communicates with its text.
"""

import codecs
import json
import re
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO, Final

from dynamiccl.collect.output import FileReport
from dynamiccl.collect.rank_calls import mapping, number, whole
from dynamiccl.nccl import Collective

#: From NCCL 2.19 `ncclDevKernel_AllReduce_Sum_f32_RING_LL`, before `ncclKernel_AllReduce_..`.
_NCCL: Final = re.compile(r"\bnccl(?:Dev)?Kernel(?:Debug)?_([A-Za-z]+)")
#: Kernels on symmetric memory: 2.27 `ncclSymDevKernel_`, 2.28 on `ncclSymkDevKernel_`
#: (src/device/symmetric/generate.py). NCCL takes them before it asks a tuner.
_SYMMETRIC: Final = re.compile(
    r"\bncclSymk?DevKernel_([A-Za-z]+)|\bncclDevKernel_([A-Za-z]+).*Symm"
)
#: Kernels of other libraries, with the source of the name and the collective where it is one.
_OTHERS: Final = tuple(
    (re.compile(pattern), collective)
    for pattern, collective in (
        # vLLM and SGLang csrc/custom_all_reduce.cuh.
        (r"\bcross_device_reduce_[12]stage", Collective.AllReduce),
        # vLLM csrc/quickreduce.
        (r"\ballreduce_prototype_(?:one|two)shot", Collective.AllReduce),
        # TensorRT-LLM cpp/tensorrt_llm/kernels/customAllReduceKernels.cu; PyTorch
        # torch/csrc/distributed/c10d/intra_node_comm.cu.
        (r"\b(?:lowPrecision)?(?:[oO]ne|[tT]wo)[sS]hotAll[rR]educe", Collective.AllReduce),
        # TensorRT-LLM and FlashInfer allReduceFusionKernels (trtllm_allreduce_fusion).
        (r"\ballreduce_fusion_kernel_(?:one|two)shot", Collective.AllReduce),
        # PyTorch torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu.
        (r"\b(?:one|two)_shot_all_reduce", Collective.AllReduce),
        (r"\bmultimem_(?:one_shot_)?all_reduce", Collective.AllReduce),
        (r"\bmultimem_all_gather", Collective.AllGather),
        # MSCCL++ src/ext/collectives: `mscclpp::collective::allreducePacket`.
        (r"\bmscclpp\w*::(?:\w+::)*all[rR]educe", Collective.AllReduce),
        (r"\bmscclpp\w*::(?:\w+::)*all[gG]ather", Collective.AllGather),
        (r"\bmscclpp", None),
        # DeepEP csrc/kernels: dispatch and combine of experts' tokens.
        (r"\bdeep_ep::", None),
        # NVSHMEM's own kernels, and PyTorch's over it (symm_mem/nvshmem_extension.cu).
        (r"\bnvshmemx?i?_", None),
    )
)
#: CUDA's and HIP's calls that start what runs on a GPU.
_LAUNCHES: Final = r"(?:cuda|cu|hip)(?:Ext)?(?:Module)?(?:Launch|GraphLaunch|Memcpy|MemcpyBatch)"
_IS_LAUNCH: Final = re.compile(_LAUNCHES)
#: Names of annotations: a collective of a backend, and a step.
_COLLECTIVE: Final = re.compile(r"(nccl|gloo|ucc|mpi|xccl|hccl):(.+)")
_STEP: Final = re.compile(r"ProfilerStep#(\d+)$")
_PARAM_COMMS: Final = "record_param_comms"
EXTERNAL: Final = "External id"
#: Arguments of events (torch/csrc/profiler/util.h in pytorch/pytorch, libkineto's output_json.cpp).
_LOOKED_AT: Final = (
    *(EXTERNAL, "grid", "block", "Input Dims", "Input type", "Collective name", "In msg nelems"),
    *("Out msg nelems", "Group size", "dtype", "Seq", "Process Group Name"),
    *("Process Group Description", "Process Group Ranks"),
)
#: PyTorch's profiler writes a fixed layout: a line break cannot be inside a JSON string, and only
#: an event's own closing brace follows a line break and two blanks. So events that are not wanted
#: are passed over without decoding them.
_WANTED: Final = (
    r'X",\s+"cat": "(?:kernel"|gpu_memcpy"|user_annotation",\s+"name": "(?:ProfilerStep|\w+:)'
    rf'|cpu_op",\s+"name": "{_PARAM_COMMS}|cuda_(?:runtime|driver)",\s+"name": "{_LAUNCHES})'
)
_NOT_WANTED: Final = re.compile(
    rf'(?:\{{\n    "ph": "(?!{_WANTED})[^\n]*+(?:\n(?!  \}})[^\n]*+)*+\n  \}},\n  )*+'
)
_CHUNK_BYTES: Final = 1 << 20
#: Characters of one value beyond which a file is taken for damaged.
_MAX_VALUE_CHARS: Final = 64 << 20
_DECODE: Final = json.JSONDecoder(strict=False).raw_decode
_NOT_BLANK: Final = re.compile(r"[^ \t\r\n,]")
#: Where the next event begins, after one that does not decode.
_NEXT_EVENT: Final = re.compile(r"\}\s*,\s*(?=\{\s*\")")


def read_events(stream: BinaryIO, report: FileReport) -> "Events":
    """Read a trace; what does not decode is rejected in `report`, by line."""
    events = Events()
    events.read(_Json(stream), report)
    return events


@dataclass(frozen=True, slots=True)
class CommKernel:
    """A communication kernel, by its name.

    The name does not say algorithm and protocol. NCCL builds one kernel for each collective, type
    and family (`best_kernel` in src/device/generate.py, NVIDIA/nccl v2.30.7), always called RING_LL
    or TREE_LL, which runs all the others too.
    """

    #: None where the name does not tell.
    collective: Collective | None
    #: Whether NCCL asks a tuner before it starts it; None where the name does not tell.
    asks_tuner: bool | None
    is_nccl: bool


@cache
def comm_kernel(name: str) -> CommKernel | None:
    """The kernel's collective and library by its name; None for compute kernels.

    >>> comm_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    CommKernel(collective=<Collective.AllReduce: 4>, asks_tuner=True, is_nccl=True)
    """
    # Of `Generic`, which runs any, and of new ones the collective is not known.
    by_wire = {each.wire: each for each in Collective}
    if found := _SYMMETRIC.search(name):
        return CommKernel(by_wire.get(found[1] or found[2]), asks_tuner=False, is_nccl=True)
    if found := _NCCL.search(name):
        collective = by_wire.get(found[1])
        asks_tuner = None if collective is None else collective.tunable
        return CommKernel(collective, asks_tuner, is_nccl=True)
    for pattern, other in _OTHERS:
        if pattern.search(name):
            return CommKernel(other, asks_tuner=False, is_nccl=False)
    return None


class _UnreadableError(ValueError):
    """Raised when what follows is no JSON."""


class _Json:
    """The JSON text of a stream, read in chunks: memory does not grow with the file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text, self._at, self._line, self._ended = "", 0, 1, False

    @property
    def line(self) -> int:
        """The line of the place."""
        return self._line + self._text.count("\n", 0, self._at)

    @property
    def excerpt(self) -> str:
        """What follows."""
        return self._text[self._at : self._at + 80]

    def peek(self) -> str:
        """The next character that is neither blank nor a comma."""
        while not (found := _NOT_BLANK.search(self._text, self._at)):
            if not self._more():
                raise _UnreadableError("ends before its closing brace")
        self._at = found.start()
        return found.group()

    def take(self, char: str) -> None:
        """Pass this character."""
        if self.peek() != char:
            raise _UnreadableError(f"a '{char}' is expected")
        self._at += 1

    def value(self) -> Any:
        """The next value, of any layout."""
        self.peek()
        while True:
            try:
                value, end = _DECODE(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - 16
                if is_cut and self._more():
                    continue
                reason = "ends within a value" if is_cut else f"no JSON: {error.msg}"
                raise _UnreadableError(reason) from error
            # A number at the end of what was read may go on.
            if end < len(self._text) or not self._more():
                self._at = end
                return value

    def pass_over(self) -> bool:
        """Skip laid-out events that are not wanted, and say whether there were any."""
        found = _NOT_WANTED.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return bool(found.group())

    def to_next_event(self) -> bool:
        """Move behind an event that does not decode; False at the file's end."""
        while not (found := _NEXT_EVENT.search(self._text, self._at + 1)):
            if not self._more():
                return False
        self._at = found.end()
        return True

    def _more(self) -> bool:
        """Read more text and drop what was consumed; False at the end of the file."""
        if self._ended:
            return False
        if len(self._text) - self._at > _MAX_VALUE_CHARS:
            raise _UnreadableError(f"a value of more than {_MAX_VALUE_CHARS} characters")
        try:
            raw = self._stream.read(_CHUNK_BYTES)
        except (OSError, EOFError) as error:
            raise _UnreadableError(f"cannot be read on: {error}") from error
        self._line, self._ended = self.line, not raw
        self._text = self._text[self._at :] + self._decoder.decode(raw, final=self._ended)
        self._at = 0
        return not self._ended


@dataclass(slots=True)
class Span:
    """A communication kernel, or an event of a host's thread: an operation, an annotation."""

    name: str
    start_us: float
    #: Kept beside the end: moments since 1970 leave a double fewer digits than the trace has.
    duration_us: float
    #: Our number of the thread; of a kernel that of its GPU.
    where: int
    arguments: Mapping[str, Any]
    #: Of a kernel, what its launch has too.
    correlation: int = -1

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us

    @property
    def step(self) -> int:
        """The number in `ProfilerStep#12`."""
        found = _STEP.match(self.name)
        return int(found[1]) if found else 0


class Events:
    """The events of one trace that matter, and its top-level values."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.operations: list[Span] = []
        self.annotations: list[Span] = []
        self.steps: list[Span] = []
        self.kernels: list[Span] = []
        # Three numbers each. Kernels that compute: begin and end in us, GPU.
        self.compute = array("d")
        # Calls that start something on a GPU: correlation, us, thread.
        self.launches = array("d")
        # Copies on the GPU: correlation, begin and end in us.
        self.copies = array("d")
        self._threads: dict[tuple[int | None, str], int] = {}

    def read(self, told: _Json, report: FileReport) -> None:
        """Read a trace; what does not decode is rejected in `report`, by line."""
        try:
            told.take("{")
            while told.peek() != "}":
                name = str(told.value())
                told.take(":")
                if name != "traceEvents" or told.peek() != "[":
                    self.values[name] = told.value()
                elif not self._read_events(told, report):
                    return
        except _UnreadableError as error:
            report.reject(told.line, str(error), told.excerpt)

    def _read_events(self, told: _Json, report: FileReport) -> bool:
        """Read the array; False where its end is missing, which is rejected too."""
        told.take("[")
        while told.peek() != "]":
            if told.pass_over():
                continue
            event = None
            try:
                event = told.value()
                self._add(mapping(event))
            except _UnreadableError as error:
                report.reject(told.line, str(error), told.excerpt)
                if not told.to_next_event():
                    return False
            except ValueError as error:
                report.reject(told.line, f"an event that is damaged: {error}", str(event))
        told.take("]")
        return True

    def _add(self, event: Mapping[str, Any]) -> None:
        """Keep an event if it matters; raises ValueError for a damaged one."""
        if event.get("ph") != "X":
            return
        kind, name = str(event.get("cat", "")), str(event.get("name", ""))
        start_us, duration_us = number(event.get("ts")), number(event.get("dur", 0.0))
        if start_us is None or duration_us is None or duration_us < 0:
            raise ValueError(f"ts {event.get('ts')}, dur {event.get('dur')}")
        told = mapping(event.get("args"))
        correlation = whole(told.get("correlation"))
        correlation = -1 if correlation is None else correlation
        span = Span(sys.intern(name), start_us, duration_us, 0, told, correlation)
        if kind == "kernel":
            self._add_kernel(span)
        elif kind in {"cuda_runtime", "cuda_driver"} and _IS_LAUNCH.match(name):
            self.launches.extend((correlation, start_us, self._thread(event)))
        elif kind == "gpu_memcpy":
            self.copies.extend((correlation, start_us, span.end_us))
        elif kind in {"cpu_op", "user_annotation"}:
            self._add_of_host(kind, span, self._thread(event))

    def _add_kernel(self, span: Span) -> None:
        span.where = whole(span.arguments.get("device")) or 0
        if comm_kernel(span.name) is None:
            self.compute.extend((span.start_us, span.end_us, span.where))
        else:
            span.arguments = _kept(span.arguments)
            self.kernels.append(span)

    def _add_of_host(self, kind: object, span: Span, thread: int) -> None:
        span.where, span.arguments = thread, _kept(span.arguments)
        if kind == "cpu_op" and span.name == _PARAM_COMMS:
            self.operations.append(span)
        elif kind == "user_annotation" and _STEP.match(span.name):
            self.steps.append(span)
        elif kind == "user_annotation" and _COLLECTIVE.match(span.name):
            self.annotations.append(span)

    def _thread(self, event: Mapping[str, Any]) -> int:
        """Thread ids, numbers or text, as numbers of our own."""
        name = (whole(event.get("pid")), str(event.get("tid")))
        return self._threads.setdefault(name, len(self._threads))


def _kept(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The event arguments that are used later; equal strings are shared."""
    found = {name: arguments[name] for name in _LOOKED_AT if name in arguments}
    return {n: sys.intern(v) if isinstance(v, str) else v for n, v in found.items()}
