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
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

from dynamiccl.collect.output import FileReport
from dynamiccl.collect.rank_calls import CPU, GPU, RankCall, RankTrace, mapping, number, text, whole
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.errors import CorruptFile, UnknownName
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.sizes import MAX_SIZE_BITS

_COUNTS: Final = ("coll_records", "p2p_records", "proxy_records")
_PAYLOADS: Final = ("coll_perf", "p2p_perf", "proxy_trace")
_DAY_US: Final = 86_400e6
#: The newest format that is known, and the first with bare records.
_KNOWN: Final = (4, 3)


def read_inspector(stream: BinaryIO, name: str, report: FileReport) -> RankTrace:
    """The calls of a dump; lines that cannot be are rejected in `report`, by number."""
    return _Reader(name, report).read(stream)


class _Reader:
    def __init__(self, name: str, report: FileReport) -> None:
        self._name, self._report = name, report
        self._found = RankTrace()
        # Of the dump of format 4.3 that is being read, and the records of it still to come.
        self._header: Mapping[str, Any] = {}
        self._metadata: Mapping[str, Any] = {}
        self._left = 0

    def read(self, stream: BinaryIO) -> RankTrace:
        line = 0
        for line, raw in enumerate(stream, 1):
            if raw.strip():
                self._read_line(line, raw)
        if self._left:
            self._cut_off(line, f"the last dump is cut off, {self._left} records early")
        return self._found

    def _read_line(self, line: int, raw: bytes) -> None:
        try:
            document, reason = json.loads(raw), "no JSON object"
        except (ValueError, RecursionError):
            document = None
            reason = "no JSON" if raw.endswith(b"\n") else "cut off: no whole JSON line"
        if not isinstance(document, dict):
            self._report.reject(line, reason, raw[:200].decode(errors="replace"))
            self._left = max(self._left - 1, 0)
        elif "dump_stats" in document:
            if self._left:
                self._cut_off(line, f"the dump before is cut off, {self._left} records early")
            self._begin_dump(document)
        elif document:
            self._read_record(line, document)

    def _begin_dump(self, document: Mapping[str, Any]) -> None:
        header, metadata = document.get("header"), document.get("metadata")
        if not isinstance(header, dict) or not isinstance(metadata, dict):
            header, metadata = {}, {}
        self._header, self._metadata = header, metadata
        stats = mapping(document["dump_stats"])
        # Older formats do not announce a number of records: each has a header of its own.
        is_bare = (_version(metadata) or (0, 0)) >= _KNOWN
        self._left = sum(whole(stats.get(name)) or 0 for name in _COUNTS) if is_bare else 0
        self._remark_version(metadata)

    def _read_record(self, line: int, document: Mapping[str, Any]) -> None:
        kind = next((each for each in _PAYLOADS if isinstance(document.get(each), dict)), None)
        header, metadata = document.get("header"), mapping(document.get("metadata"))
        if kind is None:
            self._report.reject(line, "no record that is known", str(dict(document)))
            return
        if isinstance(header, dict):
            self._remark_version(metadata)
        elif self._left:
            self._left -= 1
            header, metadata = dict(self._header), dict(self._metadata)
        else:
            reason = "a record without header, outside of a dump"
            self._report.reject(line, reason, str(dict(document)))
            return
        if kind != "proxy_trace":
            prefix = "p2p" if kind == "p2p_perf" else "coll"
            call = self._call(line, prefix, document[kind], header, metadata)
            if call is not None:
                self._found.calls.append(call)

    def _call(
        self,
        line: int,
        prefix: str,
        told: Mapping[str, Any],
        header: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> RankCall | None:
        report = self._report
        report.rows_read += 1
        size = whole(told.get(f"{prefix}_msg_size_bytes"))
        rank, num_ranks = whole(header.get("rank")), whole(header.get("n_ranks"))
        if not size or size >> MAX_SIZE_BITS:
            report.drop("size 0" if size == 0 else "size out of range or missing")
            return None
        if rank is None or not num_ranks or rank >= num_ranks:
            report.reject(line, "rank out of range, or missing", str(dict(header)))
            return None
        collective = _collective(prefix, told)
        if collective is None:
            report.reject(line, "collective not known", str(told.get("coll")))
            return None
        comm, place = _comm(header.get("id")), whole(told.get(f"{prefix}_sn"))
        time_us = _time(told.get(f"{prefix}_exec_time_us"))
        can_join = comm is not None and place is not None and collective is not Collective.SendRecv
        return RankCall(
            source=CallSource.INSPECTOR,
            source_file=self._name,
            rank=rank,
            key=(comm, collective.wire, place) if can_join else None,
            comm=comm,
            group=text(header.get("comm_name")),
            sequence=place if prefix == "coll" else None,
            timestamp_us=_begun(told, metadata),
            collective=collective.wire,
            size_bytes=size * _parts(collective, told, size, num_ranks),
            num_ranks=num_ranks,
            num_nodes=whole(header.get("nnodes")) or None,
            asks_tuner=collective.tunable and num_ranks > 1,
            algorithm=_config(told.get("coll_algo"), Algorithm, report),
            protocol=_config(told.get("coll_proto"), Protocol, report),
            num_channels=_channels(told),
            time_us=time_us,
            timing_source=_timing_source(told.get(f"{prefix}_timing_source"), time_us),
            facts=_facts(metadata),
        )

    def _cut_off(self, line: int, reason: str) -> None:
        self._report.reject(line, reason, "")
        self._found.cut_off = self._found.cut_off or CorruptFile(
            f"{self._name}:{line}: {reason}; what was read before and after is kept: copy the file "
            "again, or let NCCL write it to the end"
        )

    def _remark_version(self, metadata: Mapping[str, Any]) -> None:
        version = _version(metadata)
        if version is not None and version > _KNOWN:
            told = ".".join(map(str, version))
            self._report.remark(
                f"format {told} of the Inspector is newer than 4.3, the last that is known"
            )


def _collective(prefix: str, told: Mapping[str, Any]) -> Collective | None:
    # `Send` and `Recv` are collectives to some releases.
    if prefix == "p2p" or told.get("coll") in ("Send", "Recv"):
        return Collective.SendRecv
    try:
        return Collective.parse(str(told.get("coll")))
    except UnknownName:
        return None


def _version(metadata: Mapping[str, Any]) -> tuple[int, int] | None:
    told = str(metadata.get("inspector_output_format_version", "")).lstrip("v").split(".")
    return (int(told[0]), int(told[1])) if len(told) == 2 and "".join(told).isdigit() else None


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
