"""Import of the calls files that the plugin writes (`.dcc`): one row a call of all its ranks.

The layout is `serve/plugin/profiler/calls_file.h`: 512 bytes of header, then entries of 80 bytes,
each with a checksum of its own. A process may be killed while it writes, so the end of a file may
be torn; that costs the torn entry and nothing else.

Records of one call lie in the files of all ranks. They are first spilled into buckets on disk, all
of one call into the same, and then joined a bucket at a time: memory does not grow with the data.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from dynamiccl.collect.output import FileReport
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.datasets.schema import CALLS
from dynamiccl.datasets.store import slug
from dynamiccl.errors import CorruptFile, DataError, OutputError, UnknownName
from dynamiccl.nccl import NUM_TUNED_COLLECTIVES, Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.sizes import MAX_SIZE_BITS

MAGIC: Final = b"DCCALLS\0"
VERSION: Final = 1
SUFFIX: Final = ".dcc"

#: `CallRecord` in serve/plugin/profiler/record.h.
RECORD: Final = np.dtype(
    [(n, "<u8") for n in ("comm_id", "sequence", "size_bytes")]
    + [(n, "<u8") for n in ("enqueued_ns", "start_ns", "stop_ns")]
    + [(n, "<i4") for n in ("rank", "num_ranks", "num_nodes")]
    + [("table", "<u4")]
    + [(n, "u1") for n in ("collective", "algorithm", "protocol", "num_channels")]
    + [(n, "u1") for n in ("num_warps", "datatype", "decided", "flags")]
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
#: `ncclDataType_t`, as nccl-tests prints it.
DATATYPES: Final = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("half", "float", "double", "bfloat16", "f8e4m3", "f8e5m2"),
)
_BUCKET_BYTES: Final = 24 << 20
_MAX_BUCKETS: Final = 512
#: Calls whose numbers agree but for these bits share a bucket, so that parts hold runs of calls.
_SEQUENCE_SHIFT: Final = np.uint64(12)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_SPILLED: Final = np.dtype([("record", RECORD), ("source", "<u4")])

_CALL: Final = ("comm_id", "collective", "sequence", "captured", "replay")
_CONFIG: Final = (
    *("size_bytes", "num_ranks", "num_nodes"),
    *("algorithm", "protocol", "num_channels", "datatype"),
)


def read_calls(
    files: Sequence[tuple[Path, FileReport]], base: Mapping[str, Any], errors: list[DataError]
) -> Iterator[pa.Table]:
    """Yield the calls of all ranks' files, joined, as tables of schema CALLS.

    `base` has the columns that hold for all rows, `system` and `sweep` among them. A file that
    gives nothing has its error in its report and in `errors`.
    """
    size = sum(path.stat().st_size for path, _ in files)
    with tempfile.TemporaryDirectory(prefix="dynamiccl-calls-") as folder:
        buckets = [
            Path(folder) / f"bucket-{number:04}"
            for number in range(min(_MAX_BUCKETS, size // _BUCKET_BYTES + 1))
        ]
        environments: list[dict[str, Any]] = []
        for source, (path, report) in enumerate(files):
            environments.append({})
            try:
                told = environment_of(read_header(path))
                job = told.pop("job")
                run = slug(job) if job else str(base["sweep"])
                # What the caller says of the system wins over what the plugin saw of one machine.
                environments[-1] = {"run": run, **told, **base}
                for records in read_records(path, report):
                    _spill(_sound(records, report), source, buckets)
                if not report.rows_read and report.rejected:
                    raise OutputError(f"{path} holds no usable entry; {report.rejected[0]}")
            except DataError as error:
                report.failure = str(error)
                errors.append(error)
        for bucket in filter(Path.exists, buckets):
            table, duplicates = _joined(np.fromfile(bucket, _SPILLED), environments)
            for source, count in duplicates.items():
                files[source][1].duplicates += count
            yield table


def read_header(path: Path) -> np.void:
    """The file's header. Raises CorruptFile when there is none that this release reads."""
    with path.open("rb") as file:
        raw = file.read(HEADER.itemsize)
    if raw[: len(MAGIC)] != MAGIC:
        raise CorruptFile(f"{path} is not a calls file: it does not begin with 'DCCALLS'")
    if len(raw) < HEADER.itemsize:
        raise CorruptFile(
            f"{path} ends at byte {len(raw)}, within its header of {HEADER.itemsize} bytes"
        )
    header: np.void = np.frombuffer(raw, dtype=HEADER)[0]
    checked = np.frombuffer(raw, dtype=np.uint8)[np.newaxis, : -HEADER["checksum"].itemsize]
    if int(_fnv1a(checked)[0]) != int(header["checksum"]):
        raise CorruptFile(f"{path} is damaged: the checksum of its header is wrong")
    layout = (int(header["version"]), int(header["header_bytes"]), int(header["entry_bytes"]))
    if layout != (VERSION, HEADER.itemsize, ENTRY.itemsize):
        raise CorruptFile(
            f"{path} is of another release: version {layout[0]} with entries of {layout[2]} bytes, "
            f"this one reads version {VERSION} with {ENTRY.itemsize}"
        )
    return header


def environment_of(header: np.void) -> dict[str, Any]:
    """The schema's environment columns that a header and its fingerprint tell, and the `job`."""
    job, fingerprint, plugin, mode = (
        bytes(header[name]).decode("utf-8", errors="replace")
        for name in ("job", "fingerprint", "plugin_version", "mode")
    )
    facts = dict(part.split("=", 1) for part in fingerprint.split(";") if "=" in part)
    gpu, _, _ = facts.get("gpu", "").rpartition("*")
    kind, _, nics = facts.get("nic", "").rpartition("*")
    code = int(header["nccl_version"]) or _whole(facts.get("nccl")) or 0
    return {
        "job": job,
        "node_fingerprint": fingerprint.partition(";nccl=")[0] or None,
        "gpu": gpu if gpu not in {"", "none"} else None,
        "mig": {"0": False, "1": True}.get(facts.get("mig", "")),
        "nic_kind": kind or None,
        "nics_per_node": _whole(nics),
        "nccl_version": _release(code),
        "plugin_version": plugin or None,
        "plugin_mode": mode or None,
    }


def _whole(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,9}", text) else None


def _release(code: int) -> str | None:
    try:
        return str(NcclVersion.parse(code)) if code else None
    except UnknownName:
        return None


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


def _sound(records: npt.NDArray[np.void], report: FileReport) -> npt.NDArray[np.void]:
    """The records that pass the checks; others are dropped with the reason."""
    times = (records["start_ns"] == 0) & (records["stop_ns"] == 0)
    times |= (records["start_ns"] > 0) & (records["start_ns"] < records["stop_ns"])
    ranks = (records["rank"] >= 0) & (records["rank"] < records["num_ranks"])
    checks = {
        "collective not known": records["collective"] < NUM_TUNED_COLLECTIVES,
        "size 0": records["size_bytes"] > 0,
        "size out of range": records["size_bytes"] >> np.uint64(MAX_SIZE_BITS) == 0,
        "rank out of range": ranks & (records["num_nodes"] > 0),
        "GPU times out of order": times,
    }
    good = np.ones(len(records), dtype=np.bool_)
    for reason, holds in checks.items():
        failed = int((good & ~holds).sum())
        if failed:
            report.drop(reason, failed)
        good &= holds
    return records[good]


def _spill(records: npt.NDArray[np.void], source: int, buckets: Sequence[Path]) -> None:
    """Append the records of a file to the buckets, all of one call to the same."""
    spilled = np.empty(len(records), dtype=_SPILLED)
    spilled["record"], spilled["source"] = records, source
    run = (records["sequence"] >> _SEQUENCE_SHIFT) * np.uint64(8) + records["collective"]
    mixed = (records["comm_id"] ^ (run * _MIX)) * _MIX
    numbers = (mixed >> np.uint64(40)) % np.uint64(len(buckets))
    for number in np.unique(numbers):
        with buckets[int(number)].open("ab") as file:
            file.write(spilled[numbers == number].tobytes())


def _joined(
    spilled: npt.NDArray[np.void], environments: Sequence[Mapping[str, Any]]
) -> tuple[pa.Table, dict[int, int]]:
    """The calls of some records, and for each source how many records were duplicates.

    `environments` has the columns that all rows of each file share.
    """
    columns = {name: spilled["record"][name] for name in RECORD.names or ()}
    columns["source"] = spilled["source"]
    records = pl.DataFrame({name: np.ascontiguousarray(each) for name, each in columns.items()})
    records = records.with_columns(captured=pl.col("flags") & FLAG_CAPTURED > 0)
    key = ("comm_id", "collective", "sequence", "captured", "rank")
    # A replay does not move NCCL's number: the n-th of one rank is the n-th of the others.
    numbered = records.with_columns(replay=pl.int_range(pl.len(), dtype=pl.UInt32).over(key))
    is_first = pl.col("captured") | (pl.col("replay") == 0)
    kept = numbered.filter(is_first).sort(*_CALL, "rank")
    duration_us = (pl.col("stop_ns") - pl.col("start_ns")).filter(pl.col("stop_ns") > 0) / 1e3
    flags = pl.col("flags")
    calls = kept.group_by(_CALL, maintain_order=True).agg(
        *(pl.col(name).first() for name in (*_CONFIG, "num_warps", "table", "decided", "source")),
        enqueued_ns=pl.col("enqueued_ns").min(),
        ranks_seen=pl.col("rank").len(),
        ranks_timed=(pl.col("stop_ns") > 0).sum(),
        fastest_us=duration_us.min(),
        slowest_us=duration_us.max(),
        ranks_agree=pl.all_horizontal(pl.col(name).min() == pl.col(name).max() for name in _CONFIG),
        incomplete=(flags & FLAG_INCOMPLETE > 0).any(),
        probe=(flags & FLAG_PROBE > 0).any(),
    )
    twice = numbered.filter(~is_first).group_by("source").len()
    return _table(calls, environments), dict(twice.iter_rows())


def _table(calls: pl.DataFrame, environments: Sequence[Mapping[str, Any]]) -> pa.Table:
    told = pl.DataFrame(
        [{"number": index, **environment} for index, environment in enumerate(environments)],
        schema_overrides={"number": pl.UInt32, "mig": pl.Boolean, "nics_per_node": pl.Int64},
        infer_schema_length=None,
    )
    known_of_all = pl.col("ranks_timed") == pl.col("num_ranks")
    rows = calls.join(
        told, left_on="source", right_on="number", how="left", maintain_order="left"
    ).with_columns(
        comm=_hexadecimal("comm_id"),
        timestamp=pl.from_epoch(pl.col("enqueued_ns") // 1000, time_unit="us").dt.replace_time_zone(
            "UTC"
        ),
        collective=_named("collective", [c.wire for c in Collective if c.tunable]),
        datatype=_named("datatype", DATATYPES),
        actual_algorithm=_named("algorithm", [a.wire for a in Algorithm]),
        actual_protocol=_named("protocol", [p.wire for p in Protocol]),
        ranks_per_node=pl.when(pl.col("num_ranks") % pl.col("num_nodes") == 0).then(
            pl.col("num_ranks") // pl.col("num_nodes")
        ),
        decided=pl.col("decided") != 0,
        time_us=pl.when(known_of_all).then(pl.col("fastest_us")),
        skew_us=pl.when(known_of_all).then(pl.col("slowest_us") - pl.col("fastest_us")),
        sampled=(pl.col("ranks_timed") > 0) | pl.col("incomplete"),
        source=pl.lit(CallSource.PLUGIN.value),
        asks_tuner=pl.lit(value=True),
        time_at_most_us=pl.col("fastest_us"),
        timing_source=pl.when(pl.col("ranks_timed") > 0).then(pl.lit("gpu")),
    )
    rows = rows.rename(
        {
            "num_channels": "actual_num_channels",
            "num_warps": "actual_num_warps",
            "captured": "graph_captured",
        }
    )
    absent = [pl.lit(None).alias(name) for name in CALLS.names if name not in rows.columns]
    return rows.with_columns(absent).select(CALLS.names).to_arrow().cast(CALLS)


def _named(column: str, names: Sequence[str]) -> pl.Expr:
    """The name of each code; null for codes without one."""
    return pl.col(column).replace_strict(
        dict(enumerate(names)), default=None, return_dtype=pl.String
    )


def _hexadecimal(column: str) -> pl.Expr:
    # By way of the few distinct ones: Polars cannot format hexadecimal numbers.
    return pl.col(column).map_batches(
        lambda ids: ids.replace_strict(
            {value: f"{value:016x}" for value in ids.unique()}, return_dtype=pl.String
        ),
        return_dtype=pl.String,
    )
