"""Traces that a job left: PyTorch's profiler (`kineto.py`) and dumps of NCCL's Inspector.

A trace is recognised by what it holds and never by its name. The traces of all ranks of a job
become the tables `calls` and `steps`; what they do not tell is null, never guessed.

Ranks are joined by what names a call for all of them: the communicator's id and NCCL's number, or
the process group and PyTorch's number. Older traces have neither; their calls are joined by order
within a training step, and only where the ranks have the same collectives in the same order there.
"""

import gzip
import json
import logging
import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

import polars as pl
import pyarrow as pa

from dynamiccl.collect.calls import calls_table, join_ranks
from dynamiccl.collect.kineto import mapping, number, read_kineto, text, whole
from dynamiccl.collect.output import FileReport
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.datasets.schema import CALLS, STEPS
from dynamiccl.errors import CorruptFile, DataError, MissingPath, OutputError, UnknownName
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.sizes import MAX_SIZE_BITS

_LOG: Final = logging.getLogger(__name__)
_SNIFF_BYTES: Final = 65_536
#: What the beginning of a trace of each kind holds.
_KINDS: Final = (
    (CallSource.KINETO, r'(?s)"traceEvents"|"schemaVersion"\s*:\s*\d+.*"deviceProperties"'),
    (CallSource.INSPECTOR, r'"(?:coll_perf|p2p_perf|dump_stats|proxy_trace)"\s*:'),
)
#: Traces that people have beside these: execution traces have a schema's version.
_NOT_READ: Final = re.compile(
    rb'^\s*\{(?s:.*)"(?:schema"\s*:\s*"\d+\.\d+\.\d+|pg_config"|comm_lib_version")'
    rb"|^\x80[\x02-\x05](?s:.*)(?:pg_config|comm_lib_version|nccl_version)"
)
_READ: Final = "traces of PyTorch's profiler (Kineto) and dumps of NCCL's Inspector are read"
#: What a damaged compressed file raises.
_DAMAGED: Final = (gzip.BadGzipFile, EOFError, zlib.error)
#: A record of one rank: columns of `calls`, and what joins it to those of the others.
_RECORD: Final[dict[str, pl.DataType | type[pl.DataType]]] = {
    **dict(pl.DataFrame(CALLS.empty_table()).schema),
    **dict.fromkeys(("key", "stream"), pl.String),
    **dict.fromkeys(("rank", "world_size"), pl.Int64),
    "timestamp_us": pl.Float64,
}
_CONFIG: Final = (
    *("collective", "size_bytes", "datatype"),
    *("actual_algorithm", "actual_protocol", "actual_num_channels"),
)
#: What any rank of a call may tell; the rest is the join's, or the caller's.
_TOLD: Final = (
    *("source_file", "comm", "group", "group_ranks", "sequence", "group_sequence", "step"),
    *("collective", "datatype", "num_ranks", "num_nodes", "kernel", "asks_tuner", "num_threads"),
    *("actual_algorithm", "actual_protocol", "actual_num_channels"),
    *("gpu", "nccl_version", "compute_capability"),
)


class TraceFile(NamedTuple):
    """One trace, which is recognised."""

    path: Path
    source: CallSource


@dataclass(slots=True)
class Traces:
    """The tables, and what went wrong."""

    #: Of schemas CALLS and STEPS.
    calls: pa.Table
    steps: pa.Table
    #: One for each trace.
    reports: list[FileReport]
    #: Records of ranks that the calls are made of.
    records: int
    #: Why calls have no time of their own -> calls.
    untimed: Counter[str]
    #: Of traces that gave nothing.
    errors: list[DataError] = field(default_factory=list)


def trace_file(path: Path) -> TraceFile | None:
    """The trace that a file is, or None.

    Raises CorruptFile for a damaged one, OutputError for archives and for traces of a format that
    is known and not read, and OSError where it cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = _decompressed(file).read(_SNIFF_BYTES)
    except _DAMAGED as error:
        raise CorruptFile(f"{path} is damaged: {error}; copy it again") from error
    if head[257:262] == b"ustar":
        raise OutputError(f"{path} is an archive, which is not read; unpack it (tar xf)")
    source = source_of(head)
    if source is None and _NOT_READ.search(head):
        what = "an execution trace, or a dump of PyTorch's Flight Recorder"
        raise OutputError(f"{path} is {what}, which is not read; {_READ}")
    return None if source is None else TraceFile(path, source)


def source_of(head: bytes) -> CallSource | None:
    """The kind of trace by its first bytes; None for other files, and for traces not read.

    >>> source_of(b'{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [').value
    'kineto'
    """
    told = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if not told.startswith("{"):
        return None
    return next((source for source, pattern in _KINDS if re.search(pattern, told)), None)


def _decompressed(stream: BinaryIO) -> BinaryIO:
    is_gzip = stream.read(2) == b"\x1f\x8b"
    stream.seek(0)
    return cast("BinaryIO", gzip.GzipFile(fileobj=stream)) if is_gzip else stream


def read_traces(paths: Sequence[Path], *, system: str, sweep: str, **known: Any) -> Traces:
    """Read the traces of one job; those of all ranks belong into one call.

    `paths` are trace files or directories, of which other files are left alone.
    `known` holds columns of `calls` that the caller knows, `num_ranks` and `num_nodes` where traces
    do not tell. What single traces do wrong stands in `errors` and in their reports; the first is
    raised where nothing was read. Raises MissingPath, and OutputError where none is a trace.
    """
    errors: list[DataError] = []
    found: list[TraceFile] = []
    for path in paths:
        if not path.exists():
            raise MissingPath("trace", path, "check the name")
        below = sorted(each for each in path.rglob("*") if each.is_file())
        for file in below if path.is_dir() else [path]:
            try:
                trace = trace_file(file)
                found += [] if trace is None else [trace]
            except DataError as error:
                errors.append(error)
    if not found and not errors:
        raise OutputError(f"{', '.join(map(str, paths))}: no trace that is known; {_READ}")
    traces = read_files(found, {"system": system, "sweep": sweep, "run": sweep, **known})
    traces.errors[:0] = errors
    if traces.errors and not traces.calls.num_rows and not traces.steps.num_rows:
        raise traces.errors[0]
    return traces


def read_files(files: Sequence[TraceFile], base: Mapping[str, Any]) -> Traces:
    """Read the traces of one job that are recognised already.

    `base` holds the columns of all rows: `system`, `sweep`, `run`, and known numbers of ranks and
    nodes.
    """
    reports = [FileReport(path=str(file.path), format=file.source.value) for file in files]
    records = [pl.DataFrame(schema=_RECORD)]
    steps: list[dict[str, Any]] = []
    for file, report in zip(files, reports, strict=True):
        read = read_kineto if file.source is CallSource.KINETO else read_inspector
        try:
            with file.path.open("rb") as stream:
                calls, rows = read(
                    _decompressed(stream), report.path, report, base.get("num_ranks")
                )
        except (CorruptFile, *_DAMAGED) as error:
            report.failure = f"{file.path} is damaged: {error}; copy it again"
            continue
        records.append(pl.DataFrame(calls, schema=_RECORD))
        steps += rows
        if report.rejected and not calls and not rows and report.failure is None:
            report.failure = f"{file.path} holds no usable record; {report.rejected[0]}"
        elif not calls:
            report.remark("no collective in it")
    errors: list[DataError] = [CorruptFile(each.failure) for each in reports if each.failure]
    made = pl.concat(records)
    # A part of the job may lie on fewer nodes than the job.
    world_size = pl.coalesce("world_size", pl.lit(base.get("num_ranks"), pl.Int64))
    is_world = pl.lit(base.get("num_nodes") == 1) | (pl.col("num_ranks") == world_size)
    nodes = pl.when(is_world).then(pl.lit(base.get("num_nodes"), pl.Int64))
    made = made.with_columns(num_nodes=pl.coalesce("num_nodes", nodes))
    single = _keyed(made).unique(["source", "key", "rank"], keep="first", maintain_order=True)
    if reports:
        reports[0].duplicates += made.height - single.height
    table, untimed = _calls(single, base)
    _LOG.info("%d traces: %d calls", len(files), table.num_rows)
    return Traces(table, _steps_table(steps, base), reports, single.height, untimed, errors)


def _keyed(records: pl.DataFrame) -> pl.DataFrame:
    """Give each record a `key` that the records of the same call have in common.

    The n-th call of a stream is that of each rank, where all ranks made the same calls in it.
    """
    stream = ["source", "stream"]
    made = pl.struct("collective", "datatype", "group_sequence")
    place = pl.int_range(pl.len()).over(*stream, "rank")
    numbered = records.with_columns(place=place).with_row_index("alone")
    is_same = (made.n_unique() == 1).over(*stream, "place")
    is_same &= pl.len().over(*stream, "place") == pl.col("rank").n_unique().over(stream)
    numbered = numbered.with_columns(is_same=is_same)
    alike = pl.col("is_same").all().over(stream)
    in_stream = pl.when(alike).then(pl.format("{} {}", "stream", "place"))
    shared = pl.when(pl.col("rank").is_not_null()).then(pl.coalesce("key", in_stream))
    return numbered.with_columns(key=pl.coalesce(shared, pl.format("record {}", "alone")))


def _calls(records: pl.DataFrame, base: Mapping[str, Any]) -> tuple[pa.Table, Counter[str]]:
    """The table `calls`, and why calls have no time; `base` wins over what traces tell."""
    fixed = {n: pl.lit(v) for n, v in base.items() if n not in {"num_ranks", "num_nodes"}}
    since_1970 = pl.col("timestamp_us").min().round().cast(pl.Int64)
    calls = join_ranks(
        records.sort("rank", maintain_order=True, nulls_last=True),
        ["source", "key"],
        told=_TOLD,
        agreed=_CONFIG,
        # Ranks send as much as they like in an all-to-all of unequal parts: the most of it.
        size_bytes=pl.col("size_bytes").max(),
        timestamp=since_1970.cast(pl.Datetime("us", "UTC")),
        exposed_us=pl.col("exposed_us").min(),
        # `cpu` comes before `gpu`.
        timing_source=pl.col("timing_source").min(),
    ).with_columns(**fixed)
    few = "the traces of other ranks are missing, or have other calls"
    is_open = pl.col("num_ranks").is_null()
    why = pl.when(is_open).then(pl.lit("their number of ranks is not known")).otherwise(pl.lit(few))
    calls = calls.sort("timestamp", maintain_order=True)
    untimed = Counter(calls.filter(pl.col("time_us").is_null()).select(why).to_series().to_list())
    return calls_table(calls), untimed


def _steps_table(steps: Sequence[Mapping[str, Any]], base: Mapping[str, Any]) -> pa.Table:
    schema = dict(pl.DataFrame(STEPS.empty_table()).schema)
    frame = pl.DataFrame(steps, schema={**schema, "timestamp_us": pl.Float64})
    begun = pl.col("timestamp_us").round().cast(pl.Int64).cast(pl.Datetime("us", "UTC"))
    fixed = {name: pl.lit(base[name]) for name in ("system", "sweep", "run")}
    frame = frame.with_columns(timestamp=begun, **fixed).sort("source_file", "step")
    return frame.select(STEPS.names).to_arrow().cast(STEPS)


def read_inspector(
    stream: BinaryIO, name: str, report: FileReport, _num_ranks: int | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records of a dump of NCCL's Inspector, as `read_kineto`'s, and no steps.

    JSON lines of formats 4.0 to 4.3; of messages between two ranks, which ask no tuner, the number
    is told. Lines that cannot be are rejected in `report`, by number, and a dump that is cut off is
    its failure.

    4.0    each line has header, metadata and one record (NCCL 2.28.3 on).
    4.1    a line of `dump_stats` comes before the records of a dump.
    4.2    a record has algorithm and protocol.
    4.3    only `dump_stats` has header and metadata; exactly as many bare records as it says
           follow. What a header says never holds beyond its dump.

    Source: NVIDIA/nccl plugins/profiler/inspector (inspector_json.cc, inspector_json_reader.py).
    """
    found: list[dict[str, Any]] = []
    dump: dict[str, Any] = {}
    left = 0
    # A last dump of nothing ends the one before.
    for line, raw in enumerate(chain(stream, [b'{"dump_stats": {}}']), 1):
        document = _object(raw)
        if "dump_stats" in document:
            if left:
                reason = f"the dump before is cut off, {left} records early"
                report.reject(line, reason, "")
                report.failure = f"{name}:{line}: {reason}; copy the file again"
            dump, left = document, _announced(document)
        elif document.keys() & {"coll_perf", "p2p_perf", "proxy_trace"}:
            told = document if "header" in document else dump if left else None
            left = max(left - 1, 0)
            if told is None:
                report.reject(line, "a record without header, outside of a dump", str(document))
            elif "proxy_trace" not in document:
                found += _inspected(document, told.get("header"), line, report)
        elif raw.strip():
            left = max(left - 1, 0)
            report.reject(line, "no record that is known", raw[:200].decode(errors="replace"))
    same = {"source": CallSource.INSPECTOR.value, "source_file": name}
    return [record | same for record in found], []


def _object(raw: bytes) -> dict[str, Any]:
    try:
        return mapping(json.loads(raw))
    except (ValueError, RecursionError):
        return {}


def _announced(document: Mapping[str, Any]) -> int:
    """The bare records that follow; none before format 4.3, of which each has a header."""
    version = str(mapping(document.get("metadata")).get("inspector_output_format_version"))
    is_bare = re.fullmatch(r"v?(?:4\.[3-9]|4\.\d\d|[5-9]\.\d+)", version)
    stats = mapping(document["dump_stats"])
    counts = [whole(stats.get(f"{kind}_records")) or 0 for kind in ("coll", "p2p", "proxy")]
    return sum(counts) if is_bare else 0


def _inspected(
    document: Mapping[str, Any], header: object, line: int, report: FileReport
) -> list[dict[str, Any]]:
    """The record of one call, or none, with the reason in `report`."""
    perf, comm = mapping(document.get("coll_perf")), mapping(header)
    # `Send` and `Recv` are collectives to some releases.
    if "p2p_perf" in document or perf.get("coll") in ("Send", "Recv"):
        report.drop("a message between two ranks")
        return []
    report.rows_read += 1
    size, sequence = whole(perf.get("coll_msg_size_bytes")), whole(perf.get("coll_sn"))
    rank, num_ranks = whole(comm.get("rank")), whole(comm.get("n_ranks"))
    collective = _wire(perf.get("coll"), Collective, report)
    if not size or size >> MAX_SIZE_BITS:
        report.drop("size 0" if size == 0 else "size out of range or missing")
        return []
    if collective is None or rank is None or not num_ranks or rank >= num_ranks:
        what = "collective not known" if collective is None else "rank out of range, or missing"
        report.reject(line, what, str(document))
        return []
    time_us = number(perf.get("coll_exec_time_us")) or None
    ident = re.fullmatch(r"(?:0x)?0*([1-9a-f][0-9a-f]{0,15})", str(comm.get("id")).lower())
    has_key = ident and sequence is not None
    clock = "gpu" if "gpu" in str(perf.get("coll_timing_source")).lower() else "cpu"
    record = {
        "rank": rank,
        "key": f"{ident[1]} {collective} {sequence}" if ident and has_key else None,
        "comm": ident and ident[1].zfill(16),
        "group": text(comm.get("comm_name")),
        "sequence": sequence,
        "collective": collective,
        "size_bytes": size * _parts(collective, perf, size, num_ranks),
        "num_ranks": num_ranks,
        "num_nodes": whole(comm.get("nnodes")) or None,
        "asks_tuner": Collective.parse(collective).tunable and num_ranks > 1,
        "actual_algorithm": _wire(perf.get("coll_algo"), Algorithm, report),
        "actual_protocol": _wire(perf.get("coll_proto"), Protocol, report),
        "time_us": time_us,
        "timing_source": clock if time_us else None,
    }
    return [record]


def _wire(
    value: object, kind: type[Algorithm | Collective | Protocol], report: FileReport
) -> str | None:
    """NCCL's spelling of a name; None when missing or unknown."""
    try:
        return None if value is None else kind.parse(str(value)).wire
    except UnknownName:
        report.remark(f"{kind.__name__.lower()} '{value}' is none of NCCL's: left open")
        return None


def _parts(collective: str, perf: Mapping[str, Any], size: int, num_ranks: int) -> int:
    """The factor from the recorded size to NCCL's nBytes: 1, or the number of ranks.

    A record has one rank's count times the element: of AllGather and ReduceScatter one rank's part,
    unless its own bandwidth, which is of the whole, says otherwise.
    """
    time_us = number(perf.get("coll_exec_time_us")) or 0.0
    gbytes_per_s = number(perf.get("coll_algobw_gbs")) or 0.0
    if collective not in {"AllGather", "ReduceScatter"}:
        return 1
    parts = gbytes_per_s * 1e3 * time_us / size
    return 1 if 0.5 < parts < math.sqrt(num_ranks) else num_ranks
