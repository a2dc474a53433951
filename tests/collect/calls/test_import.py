"""Calls files of all ranks become one row a call; what is missing, twice or damaged is said."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.collect.calls import ENTRY, HEADER, MAGIC, RECORD, VERSION
from dynamiccl.collect.imports import ImportOptions, ImportSummary, import_files
from dynamiccl.datasets import store
from dynamiccl.schedule import fnv1a


def take(
    source: Path | list[Path], out: Path, **options: Any
) -> tuple[pl.DataFrame, ImportSummary]:
    paths = source if isinstance(source, list) else [source]
    summary = import_files(paths, out, options=ImportOptions(**{"system": "box", **options}))
    return store.read(out, "calls").sort("comm", "collective", "sequence", "replay"), summary


def row_of(tmp_path: Path, *records: np.void, **options: Any) -> dict[str, Any]:
    """The one call that these records, each of its own rank's file, make."""
    for made in records:
        write(tmp_path / "in", [made], rank=int(made["rank"]))
    calls, _ = take(tmp_path / "in", tmp_path / "out", **options)
    assert calls.height == 1
    return calls.row(0, named=True)


def test_time_and_skew_by_hand_and_what_the_caller_knows(tmp_path: Path) -> None:
    """The rest of a call: tests/golden/data/logs-recorder.json."""
    facts = tmp_path / "systems.toml"
    facts.write_text('[systems.box]\nnic_kind = "roce"\n')
    known = {"systems_file": facts, "nccl_version": "2.30.7"}
    row = row_of(tmp_path, record(5, 0, 120.0), record(5, 1, 90.5), **known)
    assert (row["time_us"], row["skew_us"]) == (90.5, 29.5)
    assert (row["nccl_version"], row["nic_kind"], row["nics_per_node"]) == ("2.30.7", "roce", 8)
    assert (row["system"], row["sweep"], row["run"]) == ("box", "in", "4711")


def test_time_is_known_where_all_ranks_know_theirs(tmp_path: Path) -> None:
    names = ("time_us", "skew_us", "ranks_seen", "ranks_timed", "sampled")
    row = row_of(tmp_path / "a", record(0, 0, 100.0), record(0, 1))
    assert [row[name] for name in names] == [None, None, 2, 1, True]
    row = row_of(tmp_path / "b", record(0, 1, 100.0))
    assert [row[name] for name in names] == [None, None, 1, 1, True]
    # What one rank says by a flag holds for the call.
    shown = {
        1: (True, False, False),
        2: (False, True, False),
        4: (False, False, True),
        3: (True, True, False),
    }
    told = {"table": 7, "decided": 1}
    write(tmp_path / "in", [record(f, 0, flags=f & 1, **told) for f in shown])
    write(tmp_path / "in", [record(f, 1, flags=f, **told) for f in shown], rank=1)
    calls, _ = take(tmp_path / "in", tmp_path / "out")
    for row in calls.to_dicts():
        flags = shown[row["sequence"]]
        assert (row["graph_captured"], row["incomplete"], row["probe"]) == flags
        # Without a time the call was sampled only where a rank began to take one.
        assert (row["table"], row["decided"], row["sampled"]) == (7, True, flags[1])
    assert calls.height == len(shown)


def test_names_that_nccl_gets_later_are_null(tmp_path: Path) -> None:
    odd = record(0, 0, algorithm=255, protocol=9, datatype=255, num_ranks=3, num_nodes=2)
    write(tmp_path / "in", [odd], fingerprint=b"gpu=none*0;mig=?;nic=*;nccl=x", job=b"")
    write(tmp_path / "in", [record(0, 1, num_ranks=3)], rank=1, fingerprint=b"=;;gpu;nccl=7")
    calls, _ = take(tmp_path / "in", tmp_path / "out")
    row = calls.row(0, named=True)
    told = ("actual_algorithm", "actual_protocol", "datatype", "ranks_per_node")
    more = ("gpu", "mig", "nic_kind", "nccl_version")
    assert [row[name] for name in (*told, *more)] == [None] * 8
    assert row["run"] == "in"
    assert not row["ranks_agree"]


def test_communicators_and_collectives_stay_apart(tmp_path: Path) -> None:
    for rank in (0, 1):
        for number, sequences in enumerate(((2, 0), (1, 3))):
            records = [
                record(sequence, rank, 10.0 + sequence, comm_id=comm, collective=collective)
                for sequence in sequences
                for comm in (1, 2**64 - 1)
                for collective in (2, 4)
            ]
            records += records[:1] if rank == number == 0 else []  # one is there twice
            write(tmp_path / "in", records, rank=rank, number=number)
    calls, summary = take(tmp_path / "in", tmp_path / "out")
    assert calls.height == summary.calls_written == summary.calls_timed == 16
    assert (summary.sums["rows_read"], summary.sums["duplicates"]) == (33, 1)
    assert calls["comm"].unique().sort().to_list() == ["0" * 15 + "1", "f" * 16]
    assert (calls["time_us"] == 10.0 + calls["sequence"]).all()


def test_replays_are_matched_by_their_number(tmp_path: Path) -> None:
    for rank in (0, 1):
        replays = [
            record(4, rank, flags=1, enqueued_ns=1000 * (10 * i + rank)) for i in range(1, 4)
        ]
        write(tmp_path / "in", [*replays, record(4, rank)], rank=rank)
    calls, summary = take(tmp_path / "in", tmp_path / "out")
    captured = calls.filter("graph_captured").sort("replay")
    assert captured["replay"].to_list() == [0, 1, 2]
    assert captured["ranks_seen"].to_list() == [2, 2, 2]
    assert captured["timestamp"].dt.epoch("us").to_list() == [10, 20, 30]
    assert (calls.height, summary.sums["duplicates"]) == (4, 0)


def test_impossible_records_are_dropped_with_a_reason(tmp_path: Path) -> None:
    wrong = [
        record(0, 0, collective=255),
        record(1, 0, size_bytes=0),
        record(2, 0, size_bytes=2**63),
        record(3, 2),
        record(4, -1),
        record(5, 0, num_nodes=0),
        record(6, 0, start_ns=9, stop_ns=9),
        record(7, 0, start_ns=9),
    ]
    write(tmp_path / "in", [*wrong, record(8, 0)])
    calls, summary = take(tmp_path / "in", tmp_path / "out")
    assert calls["sequence"].to_list() == [8]
    assert summary.files[0].dropped == {
        "collective not known": 1,
        "size 0 or out of range": 2,
        "rank out of range": 3,
        "GPU times out of order": 2,
    }


def test_torn_damaged_and_lost_entries_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [record(i, 0) for i in range(5)])
    data = bytearray(path.read_bytes()[:-30])
    places = [HEADER.itemsize + number * ENTRY.itemsize for number in (1, 4)]
    data[places[0] + 17] ^= 4
    path.write_bytes(data)
    calls, summary = take(path, tmp_path / "out")
    assert calls["sequence"].to_list() == [0, 2, 3]
    assert {(reject.path, reject.reason) for reject in summary.rejected} == {
        (str(path), f"the entry at byte {places[0]} is damaged"),
        (str(path), f"the entry at byte {places[1]} is torn after 50 bytes"),
    }
    path = tmp_path / "calls.dcc"  # of a ring that was full
    path.write_bytes(header_bytes() + entry_bytes(record(0, 0), 3) + entry_bytes(record(5, 0), 1))
    _, summary = take(path, tmp_path / "lost")
    assert summary.files[0].remarks == ["4 calls were not recorded: the plugin's ring was full"]


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
