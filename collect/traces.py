"""Traces of a job: those of PyTorch's profiler (Kineto), and dumps of NCCL's Inspector.

A communication kernel tells channels (blocks of its grid), threads and time. What it sent is in its
own arguments, those of the operation `record_param_comms` or, in older traces, of the annotation
`nccl:..` around its launch. What ran no kernel (a copy engine, another backend) is no call here.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import numpy as np
import polars as pl
import pyarrow as pa

from dynamiccl.collect.calls import RANK_RECORD, join_traces
from dynamiccl.collect.grid import DATATYPE_BYTES
from dynamiccl.collect.lines import opened, unwrapped
from dynamiccl.collect.nccl_log import Kind, named
from dynamiccl.collect.output import FileReport
from dynamiccl.datasets.schema import STEPS, CallSource
from dynamiccl.errors import CorruptFile, DataError, OutputError
from dynamiccl.nccl import Algorithm, Collective, Protocol

_Row = dict[str, Any]
_Rows = list[_Row]
#: Characters that tell the kind of a trace.
BEGINNING: Final = 1 << 16
SIGNS: Final = {
    CallSource.KINETO: r'(?s)\A\s*\{.*(?:"traceEvents"|"schemaVersion"\s*:\s*\d+.*"deviceProp)',
    CallSource.INSPECTOR: r'(?s)\A\s*\{.*"(?:coll_perf|p2p_perf|dump_stats|proxy_trace)"\s*:',
}

#: 2.19 on `ncclDevKernel_AllReduce_Sum_f32_RING_LL`, before `ncclKernel_..`. Symmetric memory asks
#: no tuner: 2.27 `ncclSymDevKernel_`, 2.28 on `ncclSymkDevKernel_` (symmetric/generate.py).
_NCCL: Final = re.compile(r"\bnccl(Symk?)?(?:Dev)?Kernel(?:Debug)?_([A-Za-z]+)(.*Symm)?")
#: vLLM, SGLang (custom_all_reduce.cuh, quickreduce), TensorRT-LLM, FlashInfer (allReduceFusion..),
#: PyTorch (intra_node_comm.cu, CUDASymmetricMemoryOps.cu), MSCCL++ (src/ext), DeepEP, NVSHMEM.
_OTHERS: Final = re.compile(
    r".*?(?:all_?(reduce|gather)|device_(reduce))|.*(?:mscclpp|deep_ep|nvshmem)", re.IGNORECASE
)
_LAUNCHES: Final = r"(?:cuda|cu|hip)(?:Ext)?(?:Module)?(?:Launch|GraphLaunch)"
#: PyTorch's types (c10/core/ScalarType.h) -> nccl-tests'; bool is sent as bytes (NCCLUtils.hpp).
_TYPES: Final = {
    "char": "int8", "signed char": "int8", "int": "int32", "long": "int64", "long int": "int64",
    "byte": "uint8", "unsigned char": "uint8", "bool": "uint8", "float16": "half",
    "float32": "float", "float64": "double", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
}  # fmt: skip
#: A pause up to this lies between the launches of two kernels, unless a call is as short.
_PAUSE_US: Final = 20.0
_BY_WIRE: Final = {each.wire: each for each in Collective}
_TORCH_NAMES: Final = {
    **{wire.lower(): name for wire, name in _BY_WIRE.items() if wire != "SendRecv"},
    **dict.fromkeys(("send", "recv"), Collective.SendRecv),
    "alltoallv": Collective.AlltoAll,
}
_VARIANT: Final = re.compile(r"_|base|into|tensor|coalesced|oop|sparse|uneven|\s*\d+(?:->|<-)\d+.*")


class Traces(NamedTuple):
    """Tables of schemas CALLS and STEPS, and a report of each trace."""

    calls: pa.Table
    steps: pa.Table
    reports: list[FileReport]
    #: Why calls have no time -> calls.
    untimed: Counter[str]


def read_traces(reports: list[FileReport], *, system: str, sweep: str, **known: Any) -> Traces:
    """Read the traces of all ranks of one job (formats of SIGNS), at least one; fills `reports`.

    `known` are columns of `calls`; `num_ranks` and `num_nodes` count where traces tell none.
    """
    base = {"system": system, "sweep": sweep, "run": sweep, **known}
    records, steps = _Rows(), _Rows()
    for report in reports:
        calls, rows = _read(report, base.get("num_ranks"))
        same = {"source": report.format, "source_file": report.path}
        records += [call | same for call in calls]
        steps += [base | row | same for row in rows]
    table, untimed, duplicates = join_traces(pl.DataFrame(records, schema=RANK_RECORD), base)
    reports[0].duplicates += duplicates
    steps.sort(key=itemgetter("source_file", "step"))
    of_steps = pa.Table.from_pylist(steps, schema=STEPS)
    return Traces(table, of_steps, reports, untimed)


def _read(report: FileReport, num_ranks: int | None) -> tuple[_Rows, _Rows]:
    """Records as RANK_RECORD, and rows of steps."""
    try:
        with opened(Path(report.path)) as file:
            if report.format == CallSource.KINETO:
                calls, steps = _read_kineto(file, report, num_ranks)
            else:
                calls, steps = _read_inspector(unwrapped(file), report), []
    except DataError as error:
        report.failure = error
        return [], []
    if not calls and report.failure is None:
        report.remark("no collective in it")
        if report.rejected and not steps:
            why = f"{report.path} holds no usable record; {report.rejected[0]}"
            report.failure = OutputError(why)
    return calls, steps


def _read_inspector(lines: Iterable[str], report: FileReport) -> _Rows:
    """The records of a dump of NCCL's Inspector (JSON lines, formats 4.0 to 4.3).

    From 4.0 on (NCCL 2.28.3) a line has a header and one record; from 4.1 on a line of `dump_stats`
    precedes a dump; in 4.3 it alone has a header, and as many bare records as it says follow.
    Source: NVIDIA/nccl plugins/profiler/inspector (inspector_json.cc, inspector_json_reader.py).
    """
    found: _Rows = []
    header: object = None
    left = 0
    # An empty dump ends the last one.
    for line, raw in enumerate(chain(lines, ['{"dump_stats": {}}']), 1):
        if raw.isspace():
            continue
        document: _Row = {}
        with suppress(ValueError, RecursionError):
            document = mapping(json.loads(raw))
        if "dump_stats" in document:
            if left:
                reason = f"the dump before is cut off, {left} records early"
                report.reject(line, reason, "")
                why = f"{report.path}:{line}: {reason}; copy the file again"
                report.failure = CorruptFile(why)
            header, stats = document.get("header"), mapping(document["dump_stats"])
            counts = ("coll_records", "p2p_records", "proxy_records")
            left = sum(whole(stats.get(name)) or 0 for name in counts)
            continue
        told = document.get("header", header if left else None)
        left = 0 if "header" in document else max(left - 1, 0)
        if not document.keys() & {"coll_perf", "p2p_perf", "proxy_trace"}:
            report.reject(line, "no record that is known", raw[:200])
        elif told is None:
            report.reject(line, "a record without header, outside of a dump", raw)
        elif "proxy_trace" not in document:
            found += _inspected(document, mapping(told), line, report)
    return found


def _inspected(document: _Row, comm: _Row, line: int, report: FileReport) -> _Rows:
    perf = mapping(document.get("coll_perf"))
    # Some releases count `Send` and `Recv` as collectives.
    if "p2p_perf" in document or perf.get("coll") in ("Send", "Recv"):
        report.drop("a message between two ranks")
        return []
    report.rows_read += 1
    rank, num_ranks = whole(comm.get("rank")), whole(comm.get("n_ranks")) or 0
    collective, sequence = _wire(perf.get("coll"), Collective, report), whole(perf.get("coll_sn"))
    # A record has one rank's count times the element, which of these two is a part of nBytes
    # (`inspectorComputeOpBw`, inspector.cc); the whole only where its own bandwidth is of that.
    told, time_us = whole(perf.get("coll_msg_size_bytes")), number(perf.get("coll_exec_time_us"))
    moved = (number(perf.get("coll_algobw_gbs")) or 0.0) * 1e3 * (time_us or 0.0)
    parts = max(num_ranks, 1) if collective in {"AllGather", "ReduceScatter"} else 1
    share = moved / (told or 1)
    if moved and all(not 0.7 < share / n < 1.4 for n in {1, parts}):
        others = "the sizes are taken as NCCL's sources say"
        report.remark(f"bandwidths are of neither one nor all parts of a size: {others}")
    size_bytes = whole((told or 0) * (1 if 0.95 < share < 1.05 else parts))
    if collective is None or not size_bytes or rank is None or rank >= num_ranks:
        why = "its collective, size or rank is missing, not known or out of range"
        report.reject(line, why, str(document))
        return []
    ident = re.fullmatch(r"(?:0x)?0*([1-9a-f][0-9a-f]{0,15})", str(comm.get("id")).lower())
    name = ident[1].zfill(16) if ident else None
    clock = "gpu" if "gpu" in str(perf.get("coll_timing_source")).lower() else "cpu"
    record = {
        "rank": rank,
        "key": f"{name} {collective} {sequence}" if name and sequence is not None else None,
        "comm": name,
        "group": text(comm.get("comm_name")),
        "sequence": sequence,
        "collective": collective,
        "size_bytes": size_bytes,
        "num_ranks": num_ranks,
        "num_nodes": whole(comm.get("nnodes")) or None,
        "asks_tuner": Collective.parse(collective).tunable and num_ranks > 1,
        "actual_algorithm": _wire(perf.get("coll_algo"), Algorithm, report),
        "actual_protocol": _wire(perf.get("coll_proto"), Protocol, report),
        "time_us": time_us or None,
        "timing_source": clock if time_us else None,
    }
    return [record]


def _wire(value: object, kind: type[Kind], report: FileReport) -> str | None:
    found = None if value is None else named(kind, str(value))
    if value is not None and found is None:
        report.remark(f"{kind.__name__.lower()} '{value}' is none of NCCL's: left open")
    return None if found is None else found.wire


def comm_kernel(name: str) -> tuple[Collective | None, bool | None] | None:
    """A communication kernel's collective, and whether NCCL asks a tuner; None for other kernels.

    RING_LL or TREE_LL in a name may run any (`best_kernel`, src/device/generate.py, v2.30.7).
    """
    if found := _NCCL.search(name):
        collective = _BY_WIRE.get(found[2])
        asks_tuner = None if collective is None else collective.tunable
        return collective, False if found[1] or found[3] else asks_tuner
    if other := _OTHERS.match(name):
        named = (other[1] or other[2] or "").lower()
        return _TORCH_NAMES.get(f"all{named}"), False
    return None


class _Span(NamedTuple):
    """A kernel, or what happened on a host's thread: launch, operation, annotation, step."""

    start_us: float
    end_us: float
    #: Beside the end: moments since 1970 leave a double too few digits.
    duration_us: float
    #: GPU of a kernel, else process and thread.
    where: object
    #: Joins a kernel and its launch.
    correlation: int | None
    #: Empty for compute kernels and launches, which are most of all.
    name: str
    arguments: Mapping[str, Any]


_Spans = Mapping[str, list[_Span]]


@lru_cache(65_536)
def _kind_of(category: str, name: str) -> str:
    if category == "kernel":
        return "compute" if comm_kernel(name) is None else "kernel"
    if category in {"cuda_runtime", "cuda_driver"}:
        return "launch" if re.match(_LAUNCHES, name) else ""
    if category == "user_annotation" and re.match(r"ProfilerStep#\d{1,18}$", name):
        return "step"
    if category == "user_annotation" and name.startswith("nccl:"):
        return "operation"
    return "operation" if category == "cpu_op" and name == "record_param_comms" else ""


def _read_kineto(file: TextIO, report: FileReport, num_ranks: int | None) -> tuple[_Rows, _Rows]:
    """One rank's calls, in order of begin, and steps. Raises CorruptFile."""
    spans: dict[str, list[_Span]] = defaultdict(list)

    def taken(found: _Row) -> _Row | None:
        """Events are many: nothing is left of them but their spans."""
        if "ph" not in found:
            return found
        _keep(found, spans, report)
        return None

    try:
        head = mapping(json.load(file, strict=False, object_hook=taken))
    except (ValueError, RecursionError) as error:
        why = f"it does not decode: {error}"
        raise CorruptFile(f"{report.path} is damaged, {why}; copy it again") from error
    info = mapping(head.get("distributedInfo"))
    rank, base_us = whole(info.get("rank")), (whole(head.get("baseTimeNanoseconds")) or 0) / 1e3
    marks = sorted((s.start_us, s.end_us, int(s.name.rpartition("#")[2])) for s in spans["step"])
    kernels = sorted(spans["kernel"], key=itemgetter(0))
    gpus = {kernel.where for kernel in kernels}
    by_gpu = {
        gpu: [[each for each in spans[kind] if each.where == gpu] for kind in ("compute", "kernel")]
        for gpu in gpus
    }
    ends_us = [end for _, end, _ in marks]
    beside = {g: _compute_beside(ran[0], ran[1], ends_us) for g, ran in by_gpu.items()}
    launched = _launched(spans)
    found = [launched.get(kernel.correlation, (kernel.start_us, [])) for kernel in kernels]
    shares = Counter(id(around[0]) for _, around in found if around)
    calls = []
    for kernel, (moment_us, around) in zip(kernels, found, strict=True):
        call = _call(head, kernel, around, num_ranks)
        at = (number for begin_us, end_us, number in marks if begin_us <= moment_us <= end_us)
        call["step"] = next(at, None) if marks else 0
        is_placed = marks and call["step"] is not None and call["stream"]
        call["stream"] = f"{call['stream']} {call['step']}" if is_placed else None
        hidden_us, call["compute_ratio"] = beside[kernel.where][kernel.start_us, kernel.end_us]
        call["exposed_us"] = max(kernel.duration_us - hidden_us, 0.0)
        if around and shares[id(around[0])] > 1:
            call["size_bytes"] = call["key"] = None
            report.remark("several kernels of one operation: their sizes are not known")
        calls.append(call | {"rank": rank, "timestamp": round(base_us + kernel.start_us)})
    report.rows_read += len(calls)
    return calls, [step | {"rank": rank} for step in _steps(marks, spans, base_us)]


def _keep(event: _Row, spans: _Spans, report: FileReport) -> None:
    name = str(event.get("name", ""))
    kind = _kind_of(str(event.get("cat")), name) if event.get("ph") == "X" else ""
    if not kind:
        return
    start_us, duration_us = number(event.get("ts")), number(event.get("dur", 0.0))
    if start_us is None or duration_us is None or duration_us < 0:
        report.drop("an event without a time")
        return
    told = mapping(event.get("args"))
    thread, gpu = f"{event.get('pid')} {event.get('tid')}", whole(told.get("device")) or 0
    where = gpu if kind in {"compute", "kernel"} else thread
    correlation = whole(told.get("correlation"))
    if kind in {"compute", "launch"}:
        name, told = "", {}
    end_us = start_us + duration_us
    spans[kind].append(_Span(start_us, end_us, duration_us, where, correlation, name, told))


def _launched(spans: _Spans) -> dict[int | None, tuple[float, list[_Span]]]:
    """Each correlation's launch, us, and the operations and annotations around it, inner first."""
    wanted = {k.correlation for k in spans["kernel"]} - {None}
    launches = [each for each in spans["launch"] if each.correlation in wanted]
    inside: dict[object, list[_Span]] = defaultdict(list)
    launched: dict[int | None, tuple[float, list[_Span]]] = {}
    for span in sorted([*spans["operation"], *launches], key=itemgetter(0)):
        around = [each for each in inside[span.where] if each.end_us >= span.start_us]
        if span.name:
            around = [span, *around]
        else:
            launched.setdefault(span.correlation, (span.start_us, around))
        inside[span.where] = around
    return launched


def _call(head: _Row, kernel: _Span, spans: list[_Span], num_ranks: int | None) -> _Row:
    info = mapping(head.get("distributedInfo"))
    told: _Row = {}
    for each in (*reversed(spans), kernel):
        told |= {"Collective name": each.name} if each.name.startswith("nccl:") else {}
        told |= each.arguments
    ran, asks_tuner = comm_kernel(kernel.name) or (None, None)
    named = str(told.get("Collective name", "")).rpartition(":")[2].lower()
    asked = _TORCH_NAMES.get(_VARIANT.sub("", named))
    if asked is not None and ran in {None, Collective.SendRecv}:
        ran = asked
    name, sequence = text(told.get("Process Group Name")), whole(told.get("Seq"))
    group = _one_of(info.get("pg_config"), "pg_name", name)
    members = _ranks(told.get("Process Group Ranks")) or _ranks(group.get("ranks"))
    num_ranks = whole(told.get("Group size")) or whole(group.get("pg_size")) or num_ranks
    world_size = whole(info.get("world_size"))
    lane = members or ("all" if num_ranks and num_ranks == world_size else name)
    labels = filter(None, (name, text(told.get("Process Group Description"))))
    # Sends and receives are counted differently at the two ends.
    has_key = name and sequence and ran not in {None, Collective.SendRecv}
    datatype, size_bytes = _message(told, ran, num_ranks)
    gpu = _one_of(head.get("deviceProperties"), "id", kernel.where)
    major, minor = whole(gpu.get("computeMajor")), whole(gpu.get("computeMinor"))
    version = re.match(r"\d+\.\d+\.\d+", str(info.get("nccl_version")))
    return {
        "nccl_version": version and version[0],
        "key": f"{name} {members} {sequence} {ran}" if has_key else None,
        "stream": lane and str(lane),
        "group": ":".join(labels) or None,
        "group_ranks": members,
        "group_sequence": sequence,
        "gpu": text(gpu.get("name")),
        "compute_capability": None if major is None else float(f"{major}.{minor or 0}"),
        "collective": None if ran is None else ran.wire,
        # Lists of unequal parts are sent as other collectives, of unknown sizes.
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


def _steps(marks: Sequence[tuple[float, float, int]], spans: _Spans, base_us: float) -> _Rows:
    """One row for each ProfilerStep, else for the whole trace; kernels count where they ran."""
    compute, kernels = spans["compute"], spans["kernel"]
    ran = [*compute, *kernels]
    if ran and not marks:
        marks = [(min(each.start_us for each in ran), max(each.end_us for each in ran), 0)]
    before = [_running(each) for each in (compute, kernels, ran)]
    rows: _Rows = []
    for begin, end, number in marks:
        row = {"step": number, "timestamp": round(base_us + begin), "step_us": end - begin}
        if ran:
            compute_us, communication_us, busy_us = (each(end) - each(begin) for each in before)
            row |= {"compute_us": compute_us, "communication_us": communication_us}
            row |= {"exposed_us": busy_us - compute_us, "idle_us": max(end - begin - busy_us, 0.0)}
        rows.append(row)
    return rows


def _compute_beside(
    compute: Sequence[_Span], kernels: Sequence[_Span], ends_us: Sequence[float]
) -> dict[tuple[float, float], tuple[float, float]]:
    """Begin and end of each call, us -> its hidden us, and how long compute goes on over its time.

    Compute *waits* for a call where it pauses for a tenth of it, or when the call ends: the ratio
    is then the hidden share at most. Calls without a pause between them count together, until
    compute waits or the next begin. Behind the last of a step (`ends_us`) nothing shows a wait, so
    the compute beside them counts.
    """
    ordered = np.array(sorted(span[:2] for span in compute)).reshape(-1, 2)
    begins = np.append(-math.inf, np.maximum.accumulate(ordered[:, 1]))
    stops = np.append(ordered[:, 0], math.inf)
    hidden, called = _running(compute), _running(kernels)
    waits, found = {len(stops) - 1}, dict[tuple[float, float], tuple[float, float]]()
    runs = list[list[_Span]]()
    for call in sorted(kernels, key=itemgetter(0)):
        first = np.searchsorted(stops, call.start_us, "right")
        at = slice(first, np.searchsorted(begins, call.end_us))
        paused = np.minimum(stops[at], call.end_us) - np.maximum(begins[at], call.start_us)
        is_long = paused > min(_PAUSE_US, call.duration_us / 10)
        is_long |= (begins[at] < call.end_us) & (stops[at] > call.end_us)
        long = np.flatnonzero(is_long) + first
        waits |= set(long.tolist())
        hidden_us = hidden(call.end_us) - hidden(call.start_us)
        share = hidden_us / call.duration_us if len(long) and call.duration_us else math.inf
        found[call.start_us, call.end_us] = hidden_us, share
        if not runs or call.start_us - max(c.end_us for c in runs[-1][-9:]) > _PAUSE_US:
            runs.append([])
        runs[-1].append(call)
    waited = np.array(sorted(waits))
    for run, after in zip_longest(runs, runs[1:]):
        first_us, last_us = run[0].start_us, max(call.end_us for call in run)
        wait = waited[np.searchsorted(stops[waited], first_us, "right")]
        step_end_us = min((end for end in ends_us if end >= first_us), default=math.inf)
        is_last = after is None or after[0].start_us > step_end_us
        until_us = min(begins[wait], last_us if is_last else after[0].start_us)
        busy_us = called(last_us) - called(first_us)
        ratio = max(until_us - first_us, 0.0) / busy_us if busy_us > 0.0 else 0.0
        for call in run:
            hidden_us, share = found[call.start_us, call.end_us]
            found[call.start_us, call.end_us] = hidden_us, min(share, ratio)
    return found


def _running(spans: Sequence[_Span]) -> Callable[[float], float]:
    """A function of a moment, us: how long before it at least one span ran."""
    pairs = np.array(sorted(span[:2] for span in spans) or [(0.0, 0.0)])
    starts, ends = pairs[:, 0], np.maximum.accumulate(pairs[:, 1])
    is_first = np.append(True, starts[1:] > ends[:-1])
    starts, ends = starts[is_first], ends[np.append(is_first[1:], True)]
    bounds = np.column_stack([starts, ends]).ravel()
    before = np.repeat(np.append(0.0, np.cumsum(ends - starts)), 2)[1:-1]
    return lambda moment_us: float(np.interp(moment_us, bounds, before))


def _message(
    told: Mapping[str, Any], ran: Collective | None, num_ranks: int | None
) -> tuple[str | None, int | None]:
    """Element type as in nccl-tests, and nBytes, the larger buffer (src/include/info.h, v2.19)."""
    name, sent = told.get("dtype"), whole(told.get("In msg nelems"))
    received = whole(told.get("Out msg nelems"))
    shapes, types = told.get("Input Dims"), told.get("Input type")
    if "In msg nelems" not in told and isinstance(types, list) and len(types) == 1:
        # An annotation lists the input's shapes, one rank's part.
        try:
            name, sent = types[0], whole(sum(math.prod(shape) for shape in shapes or []))
        except (TypeError, OverflowError, MemoryError):
            sent = None
        received = sent * num_ranks if sent and num_ranks else None
    plain = re.sub(r"^.*\(|\).*$|c10::", "", str(name)).strip().lower()
    datatype = _TYPES.get(plain, plain)
    elements = None if ran is None else received if ran is Collective.AllGather else sent
    size_bytes = whole((elements or 0) * DATATYPE_BYTES.get(datatype, 0)) or None
    return datatype if datatype in DATATYPE_BYTES else None, size_bytes


def _ranks(value: object) -> tuple[int, ...] | None:
    """`[0, 1]`, as list or text; None where shortened (`[0, 1, ..., 63]`) or empty."""
    told = str(value).strip("[]()")
    is_whole = re.fullmatch(r"\d{1,9}(?:, ?\d{1,9})*", told)
    return tuple(map(int, told.split(","))) if is_whole else None


def _one_of(objects: object, name: str, value: object) -> _Row:
    listed = map(mapping, objects if isinstance(objects, list) else [])
    return next((each for each in listed if each.get(name) == value), {})


def whole(value: object) -> int | None:
    """A count that a column holds, else None."""
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def number(value: object) -> float | None:
    """A finite number below 10^17 (us until year 5138), else None."""
    told = value if isinstance(value, int | float) and not isinstance(value, bool) else math.inf
    return float(told) if abs(told) < 1e17 else None


def text(value: object) -> str | None:
    """Text that says something, else None."""
    return value if isinstance(value, str) and value not in {"", "undefined"} else None


def mapping(value: object) -> _Row:
    """A JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _first(value: object) -> int | None:
    return whole(value[0]) if isinstance(value, list) and value else None
