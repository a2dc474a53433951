"""Dumps of NCCL's Inspector, JSON lines of formats 4.0 to 4.3, and RCCL's of the same plugin.

4.0    each line has header, metadata and one record (NCCL 2.28.3 on).
4.1    a line of `dump_stats` comes before the records of a dump.
4.2    a record has algorithm and protocol.
4.3    only `dump_stats` has header and metadata; exactly as many bare records as it says follow.
       What a header says never holds beyond its dump, and a dump that is cut off is not read on.

Sizes are one rank's count times the element: of AllGather and ReduceScatter the part of one rank,
not NCCL's nBytes. The record's own bandwidth, which is of the whole, shows which of the two it is.

Sources: NVIDIA/nccl plugins/profiler/inspector (inspector_json.cc, inspector_json_reader.py) and
ROCm/rocm-systems projects/rccl/plugins/profiler/inspector.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, Self

from dynamiccl.collect.reports import FileReport
from dynamiccl.collect.traces.files import TraceFile
from dynamiccl.collect.traces.rank_call import CPU, GPU, RankCall, RankTrace
from dynamiccl.collect.traces.values import mapping, number, text, whole
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.errors import CorruptFile, UnknownName
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.sizes import MAX_SIZE_BITS

_COUNTS: Final = ("coll_records", "p2p_records", "proxy_records")
_PAYLOADS: Final = ("coll_perf", "p2p_perf", "proxy_trace")
_DAY_US: Final = 86_400e6
#: The newest format that is known, and the first with bare records.
_KNOWN: Final = (4, 3)


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    #: Of header and metadata, those that hold for this record.
    header: Mapping[str, Any]
    metadata: Mapping[str, Any]
    payload: Mapping[str, Any]
    is_p2p: bool


@dataclass(slots=True)
class _Dump:
    """The dump of format 4.3 that is being read."""

    header: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: Records that are still to come.
    left: int = 0

    @classmethod
    def begun(cls, document: Mapping[str, Any]) -> Self:
        """The dump that this line begins; older formats do not announce a number of records."""
        header, metadata = document.get("header"), document.get("metadata")
        if not isinstance(header, dict) or not isinstance(metadata, dict):
            return cls()
        left = _announced(document["dump_stats"]) if _is_bare(metadata) else 0
        return cls(header, metadata, left)


@dataclass(frozen=True, slots=True)
class _CutOff:
    """Raised when a dump has fewer records than it announces."""

    number: int
    reason: str


def read_inspector(trace: TraceFile, report: FileReport) -> RankTrace:
    """The calls of a dump; lines that cannot be are rejected in `report`, by number."""
    found = RankTrace()
    with trace.open() as stream:
        for line in _lines(stream, report):
            if isinstance(line, _CutOff):
                report.reject(line.number, line.reason, "")
                found.cut_off = found.cut_off or CorruptFile(
                    f"{trace.name}:{line.number}: {line.reason}; what was read before and after is "
                    "kept: copy the file again, or let NCCL write it to the end"
                )
            elif (call := _call(line, trace.name, report)) is not None:
                found.calls.append(call)
    return found


def _lines(stream: BinaryIO, report: FileReport) -> Iterator["_Line | _CutOff"]:
    dump = _Dump()
    number = 0
    for number, raw in enumerate(stream, 1):
        document = _document(raw, number, report) if raw.strip() else {}
        if document is None:
            dump.left = max(dump.left - 1, 0)
        elif "dump_stats" in document:
            if dump.left:
                yield _CutOff(number, f"the dump before is cut off, {dump.left} records early")
            dump = _Dump.begun(document)
            _remark_version(dump.metadata, report)
        elif document:
            yield from _record(document, number, dump, report)
    if dump.left:
        yield _CutOff(number, f"the last dump is cut off, {dump.left} records early")


def _record(
    document: Mapping[str, Any], number: int, dump: "_Dump", report: FileReport
) -> Iterator[_Line]:
    name = next((each for each in _PAYLOADS if isinstance(document.get(each), dict)), None)
    header, metadata = document.get("header"), document.get("metadata")
    if name is None:
        report.reject(number, "no record that is known", str(dict(document)))
        return
    if isinstance(header, dict):
        metadata = mapping(metadata)
        _remark_version(metadata, report)
    elif dump.left:
        dump.left -= 1
        header, metadata = dump.header, dump.metadata
    else:
        report.reject(number, "a record without header, outside of a dump", str(dict(document)))
        return
    if name != "proxy_trace":
        yield _Line(number, header, metadata, document[name], is_p2p=name == "p2p_perf")


def _document(raw: bytes, number: int, report: FileReport) -> Mapping[str, Any] | None:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        reason = "cut off: no whole JSON line" if not raw.endswith(b"\n") else "no JSON"
        report.reject(number, reason, _text(raw))
        return None
    if not isinstance(document, dict):
        report.reject(number, "no JSON object", _text(raw))
        return None
    return document


def _announced(stats: object) -> int:
    return sum(whole(mapping(stats).get(name)) or 0 for name in _COUNTS)


def _version(metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    told = str(metadata.get("inspector_output_format_version", "")).lstrip("v").split(".")
    return (int(told[0]), int(told[1])) if len(told) == 2 and "".join(told).isdigit() else None


def _is_bare(metadata: Mapping[str, Any]) -> bool:
    """Whether records follow without headers of their own."""
    return (_version(metadata) or (0, 0)) >= _KNOWN


def _remark_version(metadata: Mapping[str, Any], report: FileReport) -> None:
    version = _version(metadata)
    if version is not None and version > _KNOWN:
        told = ".".join(map(str, version))
        report.remark(f"format {told} of the Inspector is newer than 4.3, the last that is known")


def _call(line: _Line, name: str, report: FileReport) -> RankCall | None:
    report.rows_read += 1
    prefix = "p2p" if line.is_p2p else "coll"
    told, header = line.payload, line.header
    size = whole(told.get(f"{prefix}_msg_size_bytes"))
    rank, num_ranks = whole(header.get("rank")), whole(header.get("n_ranks"))
    if not size or size >> MAX_SIZE_BITS:
        report.drop("size 0" if size == 0 else "size out of range or missing")
        return None
    if rank is None or not num_ranks or rank >= num_ranks:
        report.reject(line.number, "rank out of range, or missing", str(dict(header)))
        return None
    try:
        collective = Collective.SendRecv if line.is_p2p else Collective.parse(str(told.get("coll")))
    except UnknownName:
        # `Send` and `Recv` are collectives to some releases.
        if str(told.get("coll")) not in {"Send", "Recv"}:
            report.reject(line.number, "collective not known", str(told.get("coll")))
            return None
        collective = Collective.SendRecv
    size *= _parts(collective, told, size, num_ranks)
    comm = _comm(header.get("id"))
    number = whole(told.get(f"{prefix}_sn"))
    time_us = _time(told.get(f"{prefix}_exec_time_us"))
    can_join = comm is not None and number is not None and collective is not Collective.SendRecv
    return RankCall(
        source=CallSource.INSPECTOR,
        source_file=name,
        rank=rank,
        key=(comm, collective.wire, number) if can_join else None,
        comm=comm,
        group=text(header.get("comm_name")),
        sequence=None if line.is_p2p else number,
        timestamp_us=_begun(told, line.metadata),
        collective=collective.wire,
        size_bytes=size,
        num_ranks=num_ranks,
        num_nodes=whole(header.get("nnodes")) or None,
        asks_tuner=collective.tunable and num_ranks > 1,
        algorithm=_config(told.get("coll_algo"), Algorithm, report),
        protocol=_config(told.get("coll_proto"), Protocol, report),
        num_channels=_channels(told),
        time_us=time_us,
        timing_source=_timing_source(told.get(f"{prefix}_timing_source"), time_us),
        facts=_facts(line.metadata),
    )


def _parts(collective: Collective, told: Mapping[str, Any], size: int, num_ranks: int) -> int:
    """The factor from the recorded size to NCCL's nBytes: 1, or the number of ranks."""
    if collective not in {Collective.AllGather, Collective.ReduceScatter}:
        return 1
    time_us, gbytes_per_s = _time(told.get("coll_exec_time_us")), _time(told.get("coll_algobw_gbs"))
    if time_us is None or gbytes_per_s is None:
        return num_ranks
    parts = gbytes_per_s * 1e3 * time_us / size
    return 1 if parts < math.sqrt(num_ranks) else num_ranks


def _begun(told: Mapping[str, Any], metadata: Mapping[str, Any]) -> float | None:
    """The begin time in a verbose record, if it is on the clock of its dump."""
    begun = _time(mapping(told.get("event_trace_ts")).get("coll_start_ts"))
    dumped = _time(metadata.get("dump_timestamp_us"))
    is_one_clock = begun is not None and dumped is not None and 0 <= dumped - begun < _DAY_US
    return begun if is_one_clock else None


def _comm(value: object) -> str | None:
    """The communicator id as 16 hexadecimal digits; None without one (RCCL)."""
    try:
        number = int(str(value), 16)
    except ValueError:
        return None
    return f"{number:016x}" if 0 < number < 1 << 64 else None


def _config(
    value: object, kind: type[Algorithm] | type[Protocol], report: FileReport
) -> str | None:
    """NCCL's spelling of a name; None when missing or unknown."""
    if value is None:
        return None
    try:
        return kind.parse(str(value)).wire
    except UnknownName:
        report.remark(f"{kind.__name__.lower()} '{value}' is none of NCCL's: left open")
        return None


def _channels(told: Mapping[str, Any]) -> int | None:
    """Number of channels: RCCL counts them, NCCL's verbose dumps list one event for each."""
    counted = whole(told.get("coll_n_channels"))
    if counted:
        return counted
    traces = told.get("event_trace_sn") or told.get("event_trace_ts")
    events = traces.get("kernel_events") if isinstance(traces, dict) else None
    if not isinstance(events, list):
        return None
    channels = {each.get("channel_id") for each in events if isinstance(each, dict)} - {None}
    return len(channels) or None


def _timing_source(value: object, time_us: float | None) -> str | None:
    """`kernel_gpu`, `gpu_globaltimer` -> gpu; `kernel_cpu`, `collective_cpu`, `cpu_wallclock`."""
    if value is None or time_us is None:
        return None
    return GPU if "gpu" in str(value).lower() else CPU


def _facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    version = metadata.get("nccl_version")
    try:
        return {} if version is None else {"nccl_version": str(NcclVersion.parse(version))}
    except UnknownName:
        return {}


def _time(value: object) -> float | None:
    """A time above 0, else None."""
    found = number(value)
    return found if found is not None and found > 0 else None


def _text(raw: bytes) -> str:
    return raw[:200].decode(errors="replace")
