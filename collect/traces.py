"""Import of traces that a job left: NCCL's Inspector and PyTorch's profiler (Kineto).

A trace is recognised by what it holds and never by its name; of an archive nothing is unpacked on
disk. The traces of all ranks of a job become the tables `calls` and `steps`; what they do not tell
is null, never guessed.
"""

import gzip
import logging
import re
import tarfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa

from dynamiccl.collect.inspector import read_inspector
from dynamiccl.collect.kineto import read_kineto
from dynamiccl.collect.output import FileReport
from dynamiccl.collect.rank_calls import RankTrace, join_ranks, moment
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.datasets.schema import STEPS
from dynamiccl.errors import CorruptFile, DataError, MissingPath, OutputError

_LOG: Final = logging.getLogger(__name__)
_SNIFF_BYTES: Final = 65_536
_GZIP: Final = b"\x1f\x8b"
_READERS: Final[Mapping[CallSource, Callable[[BinaryIO, str, FileReport], RankTrace]]] = {
    CallSource.KINETO: read_kineto,
    CallSource.INSPECTOR: read_inspector,
}
#: What the beginning of a trace of each kind holds.
_KINDS: Final = (
    (CallSource.KINETO, r'(?s)"traceEvents"|"schemaVersion"\s*:\s*\d+.*"deviceProperties"'),
    (CallSource.INSPECTOR, r'"(?:coll_perf|p2p_perf|dump_stats|proxy_trace)"\s*:'),
)
#: Traces that people have beside these, and that are not read.
_NOT_READ: Final = (
    (rb'^\s*\{(?s:.*)"schema"\s*:\s*"\d+\.\d+\.\d+', "an execution trace of PyTorch or Chakra"),
    (
        rb"^\x80[\x02-\x05](?s:.*)(?:pg_config|entries|comm_lib_version|nccl_version)"
        rb'|^\s*\{(?s:.*)"(?:pg_config|comm_lib_version|collective_seq_id)"',
        "a dump of PyTorch's Flight Recorder",
    ),
)
_READ: Final = "traces of PyTorch's profiler (Kineto) and dumps of NCCL's Inspector are read"
#: What a damaged compressed file or archive raises.
_DAMAGED: Final = (tarfile.TarError, EOFError, zlib.error, OSError)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One trace: a file, or a member of an archive."""

    path: Path
    #: None: the file itself.
    member: str | None
    source: CallSource

    @property
    def name(self) -> str:
        """`file`, or `archive:member`."""
        return str(self.path) if self.member is None else f"{self.path}:{self.member}"

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The trace's bytes, decompressed as they are read; raises OSError."""
        with self.path.open("rb") as file:
            if self.member is None:
                yield _decompressed(file)
                return
            with tarfile.open(fileobj=file, mode="r:*") as archive:
                yield _member(archive, self.member)


@dataclass(slots=True)
class Traces:
    """The tables, and what went wrong."""

    #: Of schema CALLS, one row a call.
    calls: pa.Table
    #: Of schema STEPS, one row a step and rank.
    steps: pa.Table
    #: One for each trace, members of archives too.
    reports: list[FileReport]
    #: Records of ranks that the calls are made of.
    records: int
    #: Why calls have no time of their own -> calls.
    untimed: Counter[str] = field(default_factory=Counter)
    #: Of traces that gave nothing.
    errors: list[DataError] = field(default_factory=list)


def trace_files(path: Path) -> list[TraceFile]:
    """The traces in a file or archive; empty when there is none.

    Raises CorruptFile for an archive that does not open, OutputError for traces of a format that is
    known and not read, and OSError where it cannot be read.
    """
    try:
        with path.open("rb") as file:
            if _decompressed(file).read(262)[257:] == b"ustar":
                heads = _heads_of_members(path)
            else:
                file.seek(0)
                heads = {None: _decompressed(file).read(_SNIFF_BYTES)}
    except gzip.BadGzipFile as error:
        raise _damaged(path, error) from error
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error
    kinds = {member: source_of(head) for member, head in heads.items()}
    found = [TraceFile(path, member, kind) for member, kind in kinds.items() if kind is not None]
    if not found:
        for member, head in heads.items():
            _refuse(path if member is None else f"{path}:{member}", head)
    return sorted(found, key=lambda each: each.name)


def source_of(head: bytes) -> CallSource | None:
    """The kind of trace by its first bytes; None for other files, and for traces not read.

    >>> source_of(b'{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [').value
    'kineto'
    """
    told = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if not told.startswith("{"):
        return None
    return next((source for source, pattern in _KINDS if re.search(pattern, told)), None)


def read_traces(
    paths: Sequence[Path],
    *,
    system: str,
    sweep: str,
    run: str | None = None,
    known: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Traces:
    """Read the traces of one job; those of all ranks belong into one call.

    `paths` are trace files, archives of them, or directories, of which other files are left alone.
    `known` holds columns of `calls` that the caller knows, `num_ranks` and `num_nodes` where traces
    do not tell; `progress` is told of traces done, and of all. What single traces do wrong stands
    in `errors` and in their reports; the first is raised where nothing was read. Raises
    MissingPath, and OutputError where none is a trace.
    """
    errors: list[DataError] = []
    found: list[TraceFile] = []
    for path, is_named in _files(paths):
        try:
            found += trace_files(path)
        except DataError as error:
            if is_named or isinstance(error, CorruptFile):
                errors.append(error)
    if not found and not errors:
        raise OutputError(f"{', '.join(map(str, paths))}: no trace that is known; {_READ}")
    base = {"system": system, "sweep": sweep, "run": run or sweep, **(known or {})}
    traces = read_files(found, base, progress)
    traces.errors[:0] = errors
    if traces.errors and not traces.calls.num_rows and not traces.steps.num_rows:
        raise traces.errors[0]
    return traces


def read_files(
    files: Sequence[TraceFile],
    base: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> Traces:
    """Read the traces of one job that are recognised already.

    `base` holds the columns of all rows: `system`, `sweep`, `run`, and known numbers of ranks and
    nodes.
    """
    reports = [FileReport(path=file.name, format=file.source.value) for file in files]
    errors: list[DataError] = []
    traces: dict[CallSource, list[RankTrace]] = {CallSource.INSPECTOR: [], CallSource.KINETO: []}
    for done, (file, report) in enumerate(zip(files, reports, strict=True), 1):
        try:
            with file.open() as stream:
                trace = _READERS[file.source](stream, file.name, report)
            problem = _problem(file, trace, report)
            traces[file.source].append(trace)
        except DataError as error:
            problem = error
        if problem is not None:
            report.failure = str(problem)
            errors.append(problem)
        if progress is not None:
            progress(done, len(files))
    everything = [trace for several in traces.values() for trace in several]
    for trace in everything:
        _complete(trace, base)
    fixed = {name: value for name, value in base.items() if name not in {"num_ranks", "num_nodes"}}
    joined = join_ranks([call for trace in everything for call in trace.calls], fixed)
    if reports:
        reports[0].duplicates += joined.duplicates
    _LOG.info("%d traces: %d calls", len(files), joined.table.num_rows)
    steps = _steps_table(everything, base)
    return Traces(joined.table, steps, reports, joined.records, joined.untimed, errors)


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Files, those below directories too, and whether each was named."""
    for path in paths:
        if path.is_dir():
            yield from ((each, False) for each in sorted(path.rglob("*")) if each.is_file())
        elif path.is_file():
            yield path, True
        else:
            raise MissingPath("trace", path, "check the name")


def _problem(file: TraceFile, trace: RankTrace, report: FileReport) -> DataError | None:
    """Where a trace is cut off, or that it holds nothing; that it has no calls is a remark."""
    if trace.cut_off is not None:
        return trace.cut_off
    if report.rejected and not trace.calls and not trace.steps:
        return OutputError(f"{file.name} holds no usable record; {report.rejected[0]}")
    if not trace.calls:
        report.remark("no collective in it")
    return None


def _complete(trace: RankTrace, base: Mapping[str, Any]) -> None:
    """Fill in the ranks and nodes that the caller knows; number calls that have no number."""
    ranks, nodes = base.get("num_ranks"), base.get("num_nodes")
    orders: dict[object, int] = defaultdict(int)
    for call in trace.calls:
        if call.num_ranks is None:
            call.num_ranks = ranks
        # A group that is a part of the job may lie on fewer nodes than the job.
        is_world = call.num_ranks is not None and call.num_ranks == (trace.world_size or ranks)
        if call.num_nodes is None and (nodes == 1 or is_world):
            call.num_nodes = nodes
        is_all = call.num_ranks is not None and call.num_ranks == trace.world_size
        group = call.group_ranks or ("all" if is_all else call.group)
        if trace.has_steps and call.key is None and group is not None and call.step is not None:
            call.stream = (group, call.step)
            call.order = orders[call.stream]
            orders[call.stream] += 1


def _steps_table(traces: Iterable[RankTrace], base: Mapping[str, Any]) -> pa.Table:
    rows = []
    steps = (step for trace in traces for step in trace.steps)
    for step in sorted(steps, key=lambda each: (each["source_file"], each["step"])):
        told = {"timestamp": moment(step["timestamp_us"]), "source": CallSource.KINETO.value}
        row = {**step, **told, **{name: base[name] for name in ("system", "sweep", "run")}}
        rows.append({name: row.get(name) for name in STEPS.names})
    return pa.Table.from_pylist(rows, schema=STEPS)


def _refuse(name: object, head: bytes) -> None:
    """Raise OutputError for a format that is known and not read."""
    for pattern, what in _NOT_READ:
        if re.search(pattern, head):
            raise OutputError(f"{name} is {what}, which is not read; {_READ}")


def _damaged(path: Path, error: Exception) -> CorruptFile:
    # tarfile says on further lines what each way to open the archive met.
    reason = str(error).partition("\n")[0].rstrip(":")
    return CorruptFile(f"{path} is damaged: {reason}; copy it again")


def _heads_of_members(path: Path) -> dict[str | None, bytes]:
    try:
        with tarfile.open(path, mode="r:*") as archive:
            return {
                member.name: _member(archive, member.name).read(_SNIFF_BYTES)
                for member in archive
                if member.isfile()
            }
    except _DAMAGED as error:
        raise _damaged(path, error) from error


def _member(archive: tarfile.TarFile, name: str) -> BinaryIO:
    stream = archive.extractfile(name)
    if stream is None:
        raise OSError(f"{name} is no file")
    return _decompressed(cast("BinaryIO", stream))


def _decompressed(stream: BinaryIO) -> BinaryIO:
    head = stream.read(2)
    stream.seek(0)
    return cast("BinaryIO", gzip.GzipFile(fileobj=stream)) if head == _GZIP else stream
