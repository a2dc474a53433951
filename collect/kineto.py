"""Chrome traces of PyTorch's profiler (Kineto), one rank each: calls, and overlap with compute.

A communication kernel tells channels (blocks of its grid), threads and time. What it sent stands in
its own arguments, or in those of what launched it: the operation `record_param_comms` or, in older
traces, the annotation `nccl:all_reduce` in which, on the same thread, the launch with the kernel's
correlation lies. What ran no kernel (a copy engine, another backend) is no call here.

Events are looked at while the JSON is decoded: kernels that compute and launches are kept as three
numbers each, only what communicates with its text. A trace takes about twice its size in memory.
"""

import json
import math
import re
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.collect.output import FileReport
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.errors import CorruptFile
from dynamiccl.nccl import Collective

_FloatArray = npt.NDArray[np.float64]
#: From NCCL 2.19 `ncclDevKernel_AllReduce_Sum_f32_RING_LL`, before `ncclKernel_AllReduce_..`; on
#: symmetric memory 2.27 `ncclSymDevKernel_`, 2.28 on `ncclSymkDevKernel_`
#: (src/device/symmetric/generate.py), which NCCL takes before it asks a tuner.
_NCCL: Final = re.compile(r"\bnccl(Symk?)?(?:Dev)?Kernel(?:Debug)?_([A-Za-z]+)(.*Symm)?")
#: Kernels of vLLM and SGLang (csrc/custom_all_reduce.cuh, csrc/quickreduce), TensorRT-LLM and
#: FlashInfer (customAllReduceKernels.cu, allReduceFusionKernels), PyTorch (intra_node_comm.cu,
#: symm_mem/CUDASymmetricMemoryOps.cu), MSCCL++ (src/ext/collectives), DeepEP and NVSHMEM.
_OTHERS: Final = re.compile(
    r".*?(?:all_?(reduce|gather)|device_(reduce))|.*(?:mscclpp|deep_ep|nvshmem)", re.IGNORECASE
)
#: CUDA's and HIP's calls that start a kernel.
_LAUNCHES: Final = r"(?:cuda|cu|hip)(?:Ext)?(?:Module)?(?:Launch|GraphLaunch)"
_STEP: Final = re.compile(r"ProfilerStep#(\d{1,18})$")
#: Arguments of events (torch/csrc/profiler/util.h in pytorch/pytorch, libkineto's output_json.cpp).
_LOOKED_AT: Final = (
    *("grid", "block", "Input Dims", "Input type", "Collective name", "In msg nelems"),
    *("Out msg nelems", "Group size", "dtype", "Seq", "Process Group Name"),
    *("Process Group Description", "Process Group Ranks"),
)
#: nccl-tests' element types and their bytes, by PyTorch's names (c10/core/ScalarType.h, and the C++
#: names of older traces). NCCL has no bool: PyTorch sends bytes (c10d/NCCLUtils.hpp).
_TYPES: Final = {
    **dict.fromkeys(("int8", "char", "signed char"), ("int8", 1)),
    **dict.fromkeys(("uint8", "byte", "unsigned char", "bool"), ("uint8", 1)),
    **dict.fromkeys(("int32", "int"), ("int32", 4)),
    **dict.fromkeys(("int64", "long", "long int"), ("int64", 8)),
    **dict.fromkeys(("half", "float16"), ("half", 2)),
    **dict.fromkeys(("float", "float32"), ("float", 4)),
    **dict.fromkeys(("double", "float64"), ("double", 8)),
    "bfloat16": ("bfloat16", 2),
    "float8_e4m3fn": ("f8e4m3", 1),
    "float8_e5m2": ("f8e5m2", 1),
}
_BY_WIRE: Final = {each.wire: each for each in Collective}
#: PyTorch's names without prefix, underscores and variants of the same call.
_TORCH_NAMES: Final = {
    **{wire.lower(): name for wire, name in _BY_WIRE.items() if wire != "SendRecv"},
    **dict.fromkeys(("send", "recv"), Collective.SendRecv),
    "alltoallv": Collective.AlltoAll,
}
_VARIANT: Final = re.compile(r"_|base|into|tensor|coalesced|oop|sparse|uneven|\s*\d+(?:->|<-)\d+.*")


@cache
def comm_kernel(name: str) -> tuple[Collective | None, bool | None] | None:
    """A communication kernel's collective, and whether NCCL asks a tuner; None for others.

    None inside is what the name does not tell (`Generic` runs any). It never tells algorithm and
    protocol: NCCL builds one kernel for each collective, type and family (`best_kernel` in
    src/device/generate.py, NVIDIA/nccl v2.30.7), always called RING_LL or TREE_LL, which runs all.

    >>> comm_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    (<Collective.AllReduce: 4>, True)
    """
    if found := _NCCL.search(name):
        collective = _BY_WIRE.get(found[2])
        asks_tuner = None if collective is None else collective.tunable
        return collective, False if found[1] or found[3] else asks_tuner
    if other := _OTHERS.match(name):
        named = (other[1] or other[2] or "").lower()
        return _TORCH_NAMES.get(f"all{named}"), False
    return None


def torch_collective(name: str) -> Collective | None:
    """The collective of a PyTorch name; None for other operations (`wait`, `barrier`).

    >>> torch_collective("nccl:_all_gather_base").wire, torch_collective("wait")
    ('AllGather', None)
    """
    return _TORCH_NAMES.get(_VARIANT.sub("", name.rpartition(":")[2].lower()))


class _Span(NamedTuple):
    """A communication kernel, or what happened on a host's thread: operation, annotation, step."""

    start_us: float
    end_us: float
    #: Beside the end: moments since 1970 leave a double fewer digits than the trace has.
    duration_us: float
    name: str
    #: Our number of the thread; of a kernel that of its GPU.
    where: int
    arguments: Mapping[str, Any]
    #: Of a kernel, what its launch has too.
    correlation: int


@lru_cache(65_536)
def _kind_of(category: str, name: str) -> str:
    """What an event is to us: compute, kernel (of communication), launch, operation, step or ""."""
    if category == "kernel":
        return "compute" if comm_kernel(name) is None else "kernel"
    if category in {"cuda_runtime", "cuda_driver"}:
        return "launch" if re.match(_LAUNCHES, name) else ""
    if category == "user_annotation" and _STEP.match(name):
        return "step"
    is_ours = category == "user_annotation" and name.startswith("nccl:")
    is_ours |= category == "cpu_op" and name == "record_param_comms"
    return "operation" if is_ours else ""


def read_kineto(
    stream: BinaryIO, name: str, report: FileReport, num_ranks: int | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records of one rank's calls in the order in which they began, and rows of its steps.

    A record has columns of `calls`, of this rank alone, and `rank`, `world_size`, `timestamp_us`,
    `key` (which the records of all ranks have in common) and `stream` (instead: what the call is
    the n-th of). `num_ranks` holds where the trace tells none. Raises CorruptFile where the trace
    does not decode.
    """
    trace = _Trace(stream, name, report, num_ranks)
    launched = [trace.launch(kernel) for kernel in trace.kernels]
    count = Counter(id(spans[0]) for _, spans in launched if spans)
    exposed = _exposed_us(trace.kernels, trace.compute).tolist()
    calls = []
    for kernel, (moment_us, spans), exposed_us in zip(
        trace.kernels, launched, exposed, strict=True
    ):
        call = trace.call(kernel, spans, moment_us) | {"exposed_us": exposed_us}
        if spans and count[id(spans[0])] > 1:
            # Several kernels of one operation share what it sent: how, nobody tells.
            call["size_bytes"] = call["key"] = None
            report.remark("several kernels of one operation: their sizes are not known")
        calls.append(call)
    report.rows_read += len(calls)
    return calls, trace.step_rows()


class _Trace:
    """The events of one trace that matter, and what they say of a kernel."""

    def __init__(
        self, stream: BinaryIO, name: str, report: FileReport, num_ranks: int | None
    ) -> None:
        self._spans: dict[str, list[_Span]] = defaultdict(list)
        self._threads: dict[tuple[str, str], int] = {}
        # Kernels that compute: begin and end in us, GPU. Calls that start something on a GPU:
        # correlation, us, thread.
        self._numbers = {"compute": array("d"), "launch": array("d")}
        self._report = report
        data = stream.read().decode("utf-8", errors="replace")
        try:
            head = mapping(json.loads(data, strict=False, object_hook=self._seen))
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"it does not decode, and nothing of it is read: {error}") from error
        self._head, self._num_ranks = head, num_ranks
        self._info = mapping(head.get("distributedInfo"))
        self._base_us = (whole(head.get("baseTimeNanoseconds")) or 0) / 1e3
        version = re.match(r"\d+\.\d+\.\d+", str(self._info.get("nccl_version")))
        told = {"rank": whole(self._info.get("rank")), "nccl_version": version and version[0]}
        self._same = {"source": CallSource.KINETO.value, "source_file": name, **told}
        self.kernels = sorted(self._spans["kernel"], key=itemgetter(0))
        self.compute = np.asarray(self._numbers["compute"]).reshape(-1, 3)
        # Those of compute kernels are most of them, and of no use.
        launches = np.asarray(self._numbers.pop("launch")).reshape(-1, 3)
        launches = launches[np.isin(launches[:, 0], [each.correlation for each in self.kernels])]
        self._launches = launches[np.argsort(launches[:, 0], kind="stable")]
        self._by_thread: dict[int, list[_Span]] = defaultdict(list)
        for span in sorted(self._spans["operation"], key=itemgetter(0)):
            self._by_thread[span.where].append(span)
        self._steps = sorted(
            (span.start_us, span.end_us, int(span.name.rpartition("#")[2]))
            for span in self._spans["step"]
        )

    def _seen(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Keep of an event what matters; an object that is none stays as it is."""
        if "ph" not in event:
            return event
        name = str(event.get("name", ""))
        kind = _kind_of(str(event.get("cat")), name)
        if not kind or event["ph"] != "X":
            return None
        start_us, duration_us = number(event.get("ts")), number(event.get("dur", 0.0))
        if start_us is None or duration_us is None or duration_us < 0:
            self._report.drop("an event without a time")
            return None
        told = mapping(event.get("args"))
        end_us, gpu = start_us + duration_us, whole(told.get("device")) or 0
        thread = (str(event.get("pid")), str(event.get("tid")))
        where = self._threads.setdefault(thread, len(self._threads))
        correlation = whole(told.get("correlation"))
        correlation = -1 if correlation is None else correlation
        if kind == "compute":
            self._numbers[kind].extend((start_us, end_us, gpu))
        elif kind == "launch":
            self._numbers[kind].extend((correlation, start_us, where))
        else:
            where = gpu if kind == "kernel" else where
            kept: dict[str, Any] = {n: told[n] for n in _LOOKED_AT if n in told}
            if name.startswith("nccl:"):
                kept.setdefault("Collective name", name)
            span = _Span(start_us, end_us, duration_us, name, where, kept, correlation)
            self._spans[kind].append(span)
        return None

    def launch(self, kernel: _Span) -> tuple[float, list[_Span]]:
        """When a kernel was launched, in which operation and annotation, the inner one first.

        Its own beginning, and none, where the trace has no launch.
        """
        place = int(np.searchsorted(self._launches[:, 0], kernel.correlation))
        found = self._launches[place : place + 1].tolist()
        if kernel.correlation < 0 or not found or found[0][0] != kernel.correlation:
            return kernel.start_us, []
        _, moment_us, thread = found[0]
        line = self._by_thread[int(thread)]
        last = bisect_right(line, moment_us, key=itemgetter(0))
        # Spans of a thread nest: the last that began before, of those that did not end.
        recent = reversed(line[max(last - 8, 0) : last])
        return moment_us, [span for span in recent if span.end_us >= moment_us]

    def call(self, kernel: _Span, spans: Sequence[_Span], moment_us: float) -> dict[str, Any]:
        """The record of a communication kernel, which `spans` launched at a moment."""
        step = self._step_at(moment_us)
        told = {n: v for each in (*reversed(spans), kernel) for n, v in each.arguments.items()}
        ran, asks_tuner = comm_kernel(kernel.name) or (None, None)
        asked = torch_collective(str(told.get("Collective name", "")))
        if asked is not None and ran in {None, Collective.SendRecv}:
            ran = asked
        name, sequence = text(told.get("Process Group Name")), whole(told.get("Seq"))
        group = _one_of(self._info.get("pg_config"), "pg_name", name)
        members = _ranks(told.get("Process Group Ranks")) or _ranks(group.get("ranks"))
        size = whole(told.get("Group size")) or whole(group.get("pg_size"))
        num_ranks = size or self._num_ranks
        world_size = whole(self._info.get("world_size"))
        lane = members or ("all" if num_ranks and num_ranks == world_size else name)
        labels = [each for each in (name, text(told.get("Process Group Description"))) if each]
        # Sends and receives count otherwise on either end.
        has_key = name and sequence and ran not in {None, Collective.SendRecv}
        datatype, size_bytes = _message(told, ran, num_ranks)
        gpu = _one_of(self._head.get("deviceProperties"), "id", kernel.where)
        major, minor = whole(gpu.get("computeMajor")), whole(gpu.get("computeMinor"))
        return self._same | {
            "key": f"{name} {members} {sequence} {ran}" if has_key else None,
            "stream": f"{lane} {step}" if self._steps and lane and step is not None else None,
            "group": ":".join(labels) or None,
            "group_ranks": members,
            "group_sequence": sequence,
            "step": step,
            "timestamp_us": self._base_us + kernel.start_us,
            "gpu": text(gpu.get("name")),
            "compute_capability": None if major is None else float(f"{major}.{minor or 0}"),
            "collective": None if ran is None else ran.wire,
            # A list of unequal parts is sent as other collectives: their sizes are not told.
            "size_bytes": size_bytes if asked in {None, ran} else None,
            "datatype": datatype,
            "num_ranks": num_ranks,
            "world_size": world_size,
            "kernel": kernel.name.partition("(")[0],
            "asks_tuner": False if num_ranks == 1 else asks_tuner,
            "actual_num_channels": _first(told.get("grid")) if "nccl" in kernel.name else None,
            "num_threads": _first(told.get("block")),
            "time_us": kernel.duration_us or None,
            "timing_source": "gpu" if kernel.duration_us else None,
        }

    def _step_at(self, moment_us: float) -> int | None:
        """The training step of a moment; 0 where the trace marks none."""
        place = bisect_right(self._steps, moment_us, key=itemgetter(0)) - 1
        if not self._steps:
            return 0
        return self._steps[place][2] if place >= 0 and moment_us <= self._steps[place][1] else None

    def step_rows(self) -> list[dict[str, Any]]:
        """Rows of `steps`: one for each ProfilerStep, else one for the whole trace.

        Kernels count where they ran, not where they were launched: what runs on into the next step
        is that one's. Without any kernel (the GPU was not traced) only the step's length is known.
        """
        compute = self.compute[:, :2]
        communicates = np.array([(k.start_us, k.end_us) for k in self.kernels]).reshape(-1, 2)
        busy = _union(np.concatenate([compute, communicates]))
        steps = self._steps
        if not steps and len(busy):
            steps = [(float(busy[0, 0]), float(busy[-1, 1]), 0)]
        begin, end, numbers = np.array(steps).reshape(-1, 3).T
        rows = pl.DataFrame(
            {
                "step": numbers.astype(np.int64),
                "timestamp_us": self._base_us + begin,
                "step_us": end - begin,
            }
        )
        if len(busy):
            compute_us, busy_us = _within(_union(compute), begin, end), _within(busy, begin, end)
            rows = rows.with_columns(
                compute_us=compute_us,
                communication_us=_within(_union(communicates), begin, end),
                exposed_us=busy_us - compute_us,
                idle_us=np.maximum(end - begin - busy_us, 0.0),
            )
        return [self._same | row for row in rows.to_dicts()]


def _message(
    told: Mapping[str, Any], ran: Collective | None, num_ranks: int | None
) -> tuple[str | None, int | None]:
    """Element type by nccl-tests' name, and NCCL's nBytes; None where not known.

    nBytes is the larger of both buffers: the whole output of AllGather, the whole input of
    ReduceScatter (`ncclInfoSetDerived` in src/include/info.h, NVIDIA/nccl v2.19).
    """
    name, sent = told.get("dtype"), whole(told.get("In msg nelems"))
    received = whole(told.get("Out msg nelems"))
    shapes, types = told.get("Input Dims"), told.get("Input type")
    if "In msg nelems" not in told and isinstance(types, list) and len(types) == 1:
        # An annotation lists the shapes of the input, one rank's part.
        try:
            name, sent = types[0], whole(sum(math.prod(shape) for shape in shapes or []))
        except (TypeError, OverflowError, MemoryError):
            sent = None
        received = sent * num_ranks if sent and num_ranks else None
    plain = re.sub(r"^.*\(|\).*$|c10::", "", str(name)).strip().lower()
    datatype, bytes_each = _TYPES.get(plain, (None, 0))
    elements = received if ran is Collective.AllGather else sent
    return datatype, whole((elements or 0) * bytes_each) or None if ran is not None else None


def _exposed_us(kernels: Sequence[_Span], compute: _FloatArray) -> _FloatArray:
    """(N,) us of each of N communication kernels in which its GPU computed nothing."""
    begin, end, exposed, gpus = (
        np.array([(k.start_us, k.end_us, k.duration_us, k.where) for k in kernels]).reshape(-1, 4).T
    )
    for gpu in np.unique(gpus):
        rows, others = gpus == gpu, compute[compute[:, 2] == gpu]
        exposed[rows] -= _within(_union(others[:, :2]), begin[rows], end[rows])
    return exposed.clip(min=0.0)


def _union(intervals: _FloatArray) -> _FloatArray:
    """(M, 2) us: the union of (N, 2) intervals, which come in any order."""
    starts, ends = intervals[np.argsort(intervals[:, 0], kind="stable")].T
    ends = np.maximum.accumulate(ends)
    is_first = np.append(True, starts[1:] > ends[:-1])[: len(starts)]
    is_last = np.append(is_first[1:], True)[: len(starts)]
    return np.column_stack([starts[is_first], ends[is_last]])


def _within(union: _FloatArray, begin: _FloatArray, end: _FloatArray) -> _FloatArray:
    """(N,) us of a union of intervals that lie between each `begin` and `end`."""
    if not len(union):
        return np.zeros(len(begin))
    # What of the union lies before each of its bounds, and between these in proportion.
    before = np.repeat(np.append(0.0, np.cumsum(union[:, 1] - union[:, 0])), 2)[1:-1]
    bounds = union.ravel()
    found: _FloatArray = np.interp(end, bounds, before) - np.interp(begin, bounds, before)
    return found


def _ranks(value: object) -> tuple[int, ...] | None:
    """`[0, 1]`, as a list or as text; None where it is shortened (`[0, 1, ..., 63]`) or empty."""
    told = str(value).strip("[]()")
    is_whole = re.fullmatch(r"\d{1,9}(?:, ?\d{1,9})*", told)
    return tuple(map(int, told.split(","))) if is_whole else None


def _one_of(objects: object, name: str, value: object) -> dict[str, Any]:
    """The object of a list whose `name` is `value`; an empty one without."""
    listed = map(mapping, objects if isinstance(objects, list) else [])
    return next((each for each in listed if each.get(name) == value), {})


def whole(value: object) -> int | None:
    """A JSON value if it is a non-negative integer that a column holds, else None."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return int(str(value)) if is_whole and 0 <= int(str(value)) < 1 << 62 else None


def number(value: object) -> float | None:
    """A JSON value if it is a finite number of less than 10^17 (us until year 5138), else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < 1e17 and math.isfinite(value) else None


def text(value: object) -> str | None:
    """A JSON value if it is text that says something, else None."""
    return value if isinstance(value, str) and value not in {"", "undefined"} else None


def mapping(value: object) -> dict[str, Any]:
    """A JSON value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _first(value: object) -> int | None:
    return whole(value[0]) if isinstance(value, list) and value else None
