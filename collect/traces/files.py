"""Trace files: plain, compressed, or several in an archive; their kind by content.

A file is recognised by what it holds and never by its name. Of an archive nothing is unpacked on
disk: its members are read where they are.
"""

import gzip
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.errors import CorruptFile

_SNIFF_BYTES: Final = 65_536
_GZIP: Final = b"\x1f\x8b"
_PICKLE: Final = re.compile(rb"\x80[\x02-\x05]")
_INSPECTOR: Final = re.compile(r'"(?:coll_perf|p2p_perf|dump_stats|proxy_trace)"\s*:')
_KINETO: Final = re.compile(r'"traceEvents"|"schemaVersion"\s*:\s*\d+.*"deviceProperties"', re.S)
_EXECUTION: Final = re.compile(r'"schema"\s*:\s*"\d+\.\d+\.\d+')
_RECORDER: Final = re.compile(r'"(?:pg_config|comm_lib_version|collective_seq_id)"')
_RECORDER_WORDS: Final = (b"pg_config", b"entries", b"comm_lib_version", b"nccl_version")
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
                yield _decompressed(_member(archive, self.member))


def trace_files(path: Path) -> list[TraceFile]:
    """The traces in a file or archive; empty when there is none.

    Raises CorruptFile for an archive that does not open and OSError where it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(262)
        is_archive = head[257:262] == b"ustar"
        if head.startswith(_GZIP):
            file.seek(0)
            try:
                is_archive = gzip.GzipFile(fileobj=file).read(262)[257:] == b"ustar"
            except _DAMAGED as error:
                raise _damaged(path, error) from error
    if is_archive:
        return _members(path)
    source = _source_of(TraceFile(path, None, CallSource.KINETO))
    return [] if source is None else [TraceFile(path, None, source)]


def is_recorder_pickle(head: bytes) -> bool:
    """Whether the first bytes are a pickle of the Flight Recorder."""
    return _PICKLE.match(head) is not None and any(word in head for word in _RECORDER_WORDS)


def source_of(head: bytes) -> CallSource | None:
    """The kind of trace by its first bytes, or None.

    >>> source_of(b'{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [').value
    'kineto'
    """
    if _PICKLE.match(head):
        return CallSource.FLIGHT_RECORDER
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if not text.startswith("{"):
        return None
    for pattern, source in (
        (_KINETO, CallSource.KINETO),
        (_INSPECTOR, CallSource.INSPECTOR),
        (_EXECUTION, CallSource.EXECUTION_TRACE),
        (_RECORDER, CallSource.FLIGHT_RECORDER),
    ):
        if pattern.search(text):
            return source
    return None


def _damaged(path: Path, error: Exception) -> CorruptFile:
    # tarfile says on further lines what each way to open the archive met.
    reason = str(error).partition("\n")[0].rstrip(":")
    return CorruptFile(f"{path} is damaged: {reason}; copy it again")


def _members(path: Path) -> list[TraceFile]:
    found = []
    try:
        with tarfile.open(path, mode="r:*") as archive:
            for member in archive:
                if member.isfile():
                    with _decompressed(_member(archive, member.name)) as stream:
                        source = source_of(stream.read(_SNIFF_BYTES))
                    if source is not None:
                        found.append(TraceFile(path, member.name, source))
    except _DAMAGED as error:
        raise _damaged(path, error) from error
    return sorted(found, key=lambda each: each.name)


def _member(archive: tarfile.TarFile, name: str) -> BinaryIO:
    stream = archive.extractfile(name)
    if stream is None:
        raise OSError(f"{name} is no file")
    return cast("BinaryIO", stream)


def _source_of(trace: TraceFile) -> CallSource | None:
    try:
        with trace.open() as stream:
            return source_of(stream.read(_SNIFF_BYTES))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(trace.path, error) from error


def _decompressed(stream: BinaryIO) -> BinaryIO:
    head = stream.read(2)
    stream.seek(0)
    return cast("BinaryIO", gzip.GzipFile(fileobj=stream)) if head == _GZIP else stream
