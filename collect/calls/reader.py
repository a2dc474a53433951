"""Reads the calls files that the plugin writes (`.dcc`): header and records, with checksums.

The layout is `serve/plugin/profiler/calls_file.h`: 512 bytes of header, then entries of 80 bytes,
each with a checksum of its own. A process may be killed while it writes, so the end of a file may
be torn; that costs the torn entry and nothing else.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.reports import FileReport
from dynamiccl.errors import CorruptFile, UnknownName
from dynamiccl.nccl import NcclVersion

MAGIC: Final = b"DCCALLS\0"
VERSION: Final = 1
SUFFIX: Final = ".dcc"

#: `CallRecord` in serve/plugin/profiler/record.h.
RECORD: Final = np.dtype(
    [
        ("comm_id", "<u8"),
        ("sequence", "<u8"),
        ("size_bytes", "<u8"),
        ("enqueued_ns", "<u8"),
        ("start_ns", "<u8"),
        ("stop_ns", "<u8"),
        ("rank", "<i4"),
        ("num_ranks", "<i4"),
        ("num_nodes", "<i4"),
        ("table", "<u4"),
        ("collective", "u1"),
        ("algorithm", "u1"),
        ("protocol", "u1"),
        ("num_channels", "u1"),
        ("num_warps", "u1"),
        ("datatype", "u1"),
        ("decided", "u1"),
        ("flags", "u1"),
    ]
)
ENTRY: Final = np.dtype([("record", RECORD), ("dropped", "<u4"), ("checksum", "<u4")])
HEADER: Final = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("entry_bytes", "<u4"),
        ("number", "<u4"),
        ("pid", "<i4"),
        ("zero", "<u4"),
        ("created_ns", "<u8"),
        ("world_rank", "<i4"),
        ("world_size", "<i4"),
        ("nccl_version", "<i4"),
        ("sample_ppm", "<u4"),
        ("host", "S64"),
        ("plugin_version", "S32"),
        ("mode", "S16"),
        ("job", "S64"),
        ("fingerprint", "S208"),
        ("padding", "V64"),
        ("checksum", "<u8"),
    ]
)
FLAG_CAPTURED: Final = 1
FLAG_INCOMPLETE: Final = 2
FLAG_PROBE: Final = 4

_CHUNK_ENTRIES: Final = 65_536
_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsHeader:
    """Header of a calls file: the process that wrote it; empty or None where unknown."""

    number: int
    pid: int
    host: str
    plugin_version: str
    mode: str
    job: str
    fingerprint: str
    nccl_version: int

    def environment(self) -> dict[str, Any]:
        """The schema's environment columns that the header and its fingerprint tell."""
        facts = dict(part.split("=", 1) for part in self.fingerprint.split(";") if "=" in part)
        gpu, _, _ = facts.get("gpu", "").rpartition("*")
        kind, _, nics = facts.get("nic", "").rpartition("*")
        code = self.nccl_version or _whole(facts.get("nccl")) or 0
        return {
            "node_fingerprint": self.fingerprint.partition(";nccl=")[0] or None,
            "gpu": gpu if gpu not in {"", "none"} else None,
            "mig": {"0": False, "1": True}.get(facts.get("mig", "")),
            "nic_kind": kind or None,
            "nics_per_node": _whole(nics),
            "nccl_version": _release(code),
            "plugin_version": self.plugin_version or None,
            "plugin_mode": self.mode or None,
        }


def read_header(path: Path) -> CallsHeader:
    """The file's header. Raises CorruptFile when there is none that this release reads."""
    with path.open("rb") as file:
        raw = file.read(HEADER.itemsize)
    if raw[: len(MAGIC)] != MAGIC:
        raise CorruptFile(f"{path} is not a calls file: it does not begin with 'DCCALLS'")
    if len(raw) < HEADER.itemsize:
        raise CorruptFile(
            f"{path} ends at byte {len(raw)}, within its header of {HEADER.itemsize} bytes"
        )
    header = np.frombuffer(raw, dtype=HEADER)[0]
    checked = np.frombuffer(raw, dtype=np.uint8)[np.newaxis, : -HEADER["checksum"].itemsize]
    if int(_fnv1a(checked)[0]) != int(header["checksum"]):
        raise CorruptFile(f"{path} is damaged: the checksum of its header is wrong")
    layout = (int(header["version"]), int(header["header_bytes"]), int(header["entry_bytes"]))
    if layout != (VERSION, HEADER.itemsize, ENTRY.itemsize):
        raise CorruptFile(
            f"{path} is of another release: version {layout[0]} with entries of {layout[2]} bytes, "
            f"this one reads version {VERSION} with {ENTRY.itemsize}"
        )
    return CallsHeader(
        number=int(header["number"]),
        pid=int(header["pid"]),
        nccl_version=int(header["nccl_version"]),
        **{
            name: bytes(header[name]).decode("utf-8", errors="replace")
            for name in ("host", "plugin_version", "mode", "job", "fingerprint")
        },
    )


def read_records(path: Path, report: FileReport) -> Iterator[npt.NDArray[np.void]]:
    """The records of a file with a good header, a chunk at a time.

    Entries whose checksum is wrong, and a torn one at the end, are rejected in `report` with their
    number and their place in the file.
    """
    with path.open("rb") as file:
        file.seek(HEADER.itemsize)
        entries_before = dropped = 0
        while raw := file.read(_CHUNK_ENTRIES * ENTRY.itemsize):
            count, torn = divmod(len(raw), ENTRY.itemsize)
            entries = np.frombuffer(raw, dtype=ENTRY, count=count)
            octets = np.frombuffer(raw, dtype=np.uint8, count=count * ENTRY.itemsize)
            rows = octets.reshape(count, ENTRY.itemsize)
            sums = _fnv1a(rows[:, : -ENTRY["checksum"].itemsize]).astype(np.uint32)
            good = sums == entries["checksum"]
            for index in np.flatnonzero(~good):
                _reject(report, entries_before + int(index), rows[index].tobytes(), "is damaged")
            if torn:
                _reject(report, entries_before + count, raw[-torn:], f"is torn after {torn} bytes")
            report.rows_read += int(good.sum())
            dropped += int(entries["dropped"][good].sum())
            yield entries["record"][good]
            entries_before += count
    if dropped:
        report.remark(f"{dropped} calls were not recorded: the plugin's ring was full")


def _reject(report: FileReport, index: int, raw: bytes, reason: str) -> None:
    place = HEADER.itemsize + index * ENTRY.itemsize
    report.reject(index + 1, f"the entry at byte {place} {reason}", raw.hex(" ", 8))


def _fnv1a(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """64-bit FNV-1a of each row; whole columns at a time."""
    digests = np.full(len(rows), _FNV_OFFSET, dtype=np.uint64)
    for column in rows.T:
        digests = (digests ^ column) * np.uint64(_FNV_PRIME)
    return digests


def _whole(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,9}", text) else None


def _release(code: int) -> str | None:
    if not code:
        return None
    try:
        return str(NcclVersion.parse(code))
    except UnknownName:
        return None
