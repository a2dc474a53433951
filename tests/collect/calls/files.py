"""Writes calls files as the plugin does, with chosen content."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl.collect.calls import ENTRY, HEADER, MAGIC, RECORD, VERSION

MIB: Final = 1 << 20
FINGERPRINT: Final = "gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22907"
_PLAIN: Final[dict[str, Any]] = {
    "comm_id": 0xABC,
    "size_bytes": MIB,
    "enqueued_ns": 1_790_000_000_000_000_000,
    "num_ranks": 2,
    "num_nodes": 1,
    "collective": 4,
    "algorithm": 1,
    "protocol": 2,
    "num_channels": 8,
    "num_warps": 16,
    "datatype": 7,
}


def fnv1a(data: bytes) -> int:
    """64-bit FNV-1a, a byte at a time."""
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return digest


def record(sequence: int, rank: int, time_us: float | None = None, **columns: Any) -> np.void:
    """What one rank recorded of a call; `time_us` None = not sampled."""
    start = 10**9 * (rank + 1)  # GPUs have clocks of their own
    times = {"start_ns": start, "stop_ns": start + round(1000 * time_us)} if time_us else {}
    values = {**_PLAIN, "sequence": sequence, "rank": rank, **times, **columns}
    made: np.void = np.zeros(1, dtype=RECORD)[0]
    for name, value in values.items():
        made[name] = value
    return made


def header_bytes(*, rank: int = 0, **values: Any) -> bytes:
    """A header with a right checksum."""
    header = np.zeros((), dtype=HEADER)
    plain = {
        "version": VERSION,
        "header_bytes": HEADER.itemsize,
        "entry_bytes": ENTRY.itemsize,
        "pid": 100 + rank,
        "world_rank": rank,
        "host": b"node-1",
        "mode": b"observe",
        "job": b"4711",
        "fingerprint": FINGERPRINT.encode(),
    }
    for name, value in {**plain, **values}.items():
        header[name] = value
    header["magic"] = MAGIC
    raw = header.tobytes()[:-8]
    return raw + fnv1a(raw).to_bytes(8, "little")


def entry_bytes(made: np.void, dropped: int = 0) -> bytes:
    """One entry with a right checksum."""
    raw = made.tobytes() + dropped.to_bytes(4, "little")
    return raw + (fnv1a(raw) % 2**32).to_bytes(4, "little")


def write(
    folder: Path, records: Iterable[np.void], *, rank: int = 0, number: int = 0, **header: Any
) -> Path:
    """One file of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"calls-node-1-{100 + rank}-r{rank}-{number:04}.dcc"
    head = header_bytes(rank=rank, number=number, **header)
    path.write_bytes(head + b"".join(map(entry_bytes, records)))
    return path
