"""The table of calls, made of what ranks recorded; and the calls files of the plugin (`.dcc`).

A calls file (`serve/plugin/profiler/calls_file.h`) has 512 bytes of header, then entries of 80
bytes, each with a checksum of its own: where a process was killed, one torn entry is lost. The
records of all ranks are joined in memory.
"""

import re
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
    [("magic", "S8")]
    + [(n, "<u4") for n in ("version", "header_bytes", "entry_bytes", "number")]
    + [("pid", "<i4"), ("zero", "<u4"), ("created_ns", "<u8")]
    + [(n, "<i4") for n in ("world_rank", "world_size", "nccl_version")]
    + [("sample_ppm", "<u4"), ("host", "S64"), ("plugin_version", "S32"), ("mode", "S16")]
    + [("job", "S64"), ("fingerprint", "S208"), ("padding", "V64"), ("checksum", "<u8")]
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
_SOURCED: Final = np.dtype([("record", RECORD), ("source", "<u4")])
_CALL: Final = ("comm_id", "collective", "sequence", "captured", "replay")
_CONFIG: Final = (
    *("size_bytes", "num_ranks", "num_nodes"),
    *("algorithm", "protocol", "num_channels", "datatype"),
)


def join_ranks(
    records: pl.DataFrame,
    key: Sequence[str],
    *,
    told: Sequence[str],
    agreed: Sequence[str],
    **more: pl.Expr,
) -> pl.DataFrame:
    """One row a call, of the records that its ranks made: those whose columns `key` are equal.

    `records` has `time_us` (of this rank, null where unknown), `num_ranks` and `num_nodes`. A
    call's columns are `told` by the first rank that knows, and `more` aggregates; `ranks_agree`
    where those of `agreed` are equal. A rank's time includes waiting for the others, so the least
    is the call's, once all ranks are known.
    """
    time = pl.col("time_us")
    calls = records.group_by(key, maintain_order=True).agg(
        pl.col(told).first(ignore_nulls=True),
        ranks_seen=pl.len(),
        ranks_timed=time.count(),
        time_at_most_us=time.min(),
        slowest_us=time.max(),
        ranks_agree=pl.all_horizontal(map(_is_one, agreed)),
        **more,
    )
    is_known = pl.col("ranks_timed") == pl.col("num_ranks")
    least, ranks, nodes = pl.col("time_at_most_us"), pl.col("num_ranks"), pl.col("num_nodes")
    return calls.with_columns(
        time_us=pl.when(is_known).then(least),
        skew_us=pl.when(is_known).then(pl.col("slowest_us") - least),
        ranks_per_node=pl.when(ranks % nodes == 0).then(ranks // nodes),
    )


def _is_one(column: str) -> pl.Expr:
    """Whether all values are equal; null is a value too."""
    value = pl.col(column)
    return (value.null_count() == pl.len()) | (
        (value.null_count() == 0) & (value.min() == value.max())
    )


def calls_table(calls: pl.DataFrame) -> pa.Table:
    """The frame as a table of schema CALLS; columns that it lacks are null, others go."""
    absent = [pl.lit(None).alias(name) for name in CALLS.names if name not in calls.columns]
    return calls.with_columns(absent).select(CALLS.names).to_arrow().cast(CALLS)


def read_calls(
    files: Sequence[tuple[Path, FileReport]], base: Mapping[str, Any], errors: list[DataError]
) -> pa.Table:
    """The calls of all ranks' files, joined, as a table of schema CALLS.

    `base` has the columns that hold for all rows, `system` and `sweep` among them. A file that
    gives nothing has its error in its report and in `errors`.
    """
    found = [np.empty(0, _SOURCED)]
    environments: list[dict[str, Any]] = []
    for source, (path, report) in enumerate(files):
        environments.append({})
        try:
            told = _environment(read_header(path))
            job = told.pop("job")
            run = slug(job) if job else str(base["sweep"])
            # What the caller says of the system wins over what the plugin saw of one machine.
            environments[-1] = {"run": run, **told, **base}
            for records in read_records(path, report):
                sound = _sound(records, report)
                found.append(np.empty(len(sound), _SOURCED))
                found[-1]["record"], found[-1]["source"] = sound, source
            if not report.rows_read and report.rejected:
                raise OutputError(f"{path} holds no usable entry; {report.rejected[0]}")
        except DataError as error:
            report.failure = str(error)
            errors.append(error)
    records = np.concatenate(found)
    if not len(records):
        return CALLS.empty_table()
    table, duplicates = _joined(records, environments)
    for source, count in duplicates.items():
        files[source][1].duplicates += count
    return table


def read_header(path: Path) -> np.void:
    """The file's header. Raises CorruptFile when there is none that this release reads."""
    with path.open("rb") as file:
        raw = file.read(HEADER.itemsize)
    if raw[: len(MAGIC)] != MAGIC:
        raise CorruptFile(f"{path} is not a calls file: it does not begin with 'DCCALLS'")
    if len(raw) < HEADER.itemsize:
        raise CorruptFile(f"{path} ends at byte {len(raw)}, within its header")
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


def _environment(header: np.void) -> dict[str, Any]:
    """The schema's environment columns that a header and its fingerprint tell, and the `job`."""
    job, fingerprint, plugin, mode = (
        bytes(header[name]).decode("utf-8", errors="replace")
        for name in ("job", "fingerprint", "plugin_version", "mode")
    )
    facts = dict(part.split("=", 1) for part in fingerprint.split(";") if "=" in part)
    gpu, _, _ = facts.get("gpu", "").rpartition("*")
    kind, _, nics = facts.get("nic", "").rpartition("*")
    code = int(header["nccl_version"]) or facts.get("nccl", "")
    try:
        nccl_version = str(NcclVersion.parse(code))
    except UnknownName:
        nccl_version = None
    return {
        "job": job,
        "node_fingerprint": fingerprint.partition(";nccl=")[0] or None,
        "gpu": gpu if gpu not in {"", "none"} else None,
        "mig": {"0": False, "1": True}.get(facts.get("mig", "")),
        "nic_kind": kind or None,
        "nics_per_node": int(nics) if re.fullmatch(r"[0-9]{1,9}", nics) else None,
        "nccl_version": nccl_version,
        "plugin_version": plugin or None,
        "plugin_mode": mode or None,
    }


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
    sizes = records["size_bytes"]
    checks = {
        "collective not known": records["collective"] < NUM_TUNED_COLLECTIVES,
        "size 0 or out of range": (sizes > 0) & (sizes >> np.uint64(MAX_SIZE_BITS) == 0),
        "rank out of range": ranks & (records["num_nodes"] > 0),
        "GPU times out of order": times,
    }
    good = np.ones(len(records), dtype=np.bool_)
    for reason, holds in checks.items():
        if failed := int((good & ~holds).sum()):
            report.drop(reason, failed)
        good &= holds
    return records[good]


def _joined(
    sourced: npt.NDArray[np.void], environments: Sequence[Mapping[str, Any]]
) -> tuple[pa.Table, dict[int, int]]:
    """The calls of some records, and for each source how many records were duplicates.

    `environments` has the columns that all rows of each file share.
    """
    columns = {name: np.ascontiguousarray(sourced["record"][name]) for name in RECORD.names or ()}
    duration_us = (pl.col("stop_ns") - pl.col("start_ns")) / 1e3
    records = pl.DataFrame({**columns, "source": sourced["source"]}).with_columns(
        captured=pl.col("flags") & FLAG_CAPTURED > 0,
        time_us=pl.when(pl.col("stop_ns") > 0).then(duration_us),
    )
    key = ("comm_id", "collective", "sequence", "captured", "rank")
    # A replay does not move NCCL's number: the n-th of one rank is the n-th of the others.
    numbered = records.with_columns(replay=pl.int_range(pl.len(), dtype=pl.UInt32).over(key))
    is_first = pl.col("captured") | (pl.col("replay") == 0)
    twice = numbered.filter(~is_first).group_by("source").len()
    told = pl.DataFrame(
        [{"number": index, **environment} for index, environment in enumerate(environments)],
        schema_overrides={"number": pl.UInt32, "mig": pl.Boolean, "nics_per_node": pl.Int64},
        infer_schema_length=None,
    )
    flags, at = pl.col("flags"), pl.col("enqueued_ns").min() // 1000
    calls = join_ranks(
        numbered.filter(is_first).sort(*_CALL, "rank"),
        _CALL,
        told=(*_CONFIG, "num_warps", "table", "decided", "source"),
        agreed=_CONFIG,
        timestamp=pl.from_epoch(at, time_unit="us").dt.replace_time_zone("UTC"),
        incomplete=(flags & FLAG_INCOMPLETE > 0).any(),
        probe=(flags & FLAG_PROBE > 0).any(),
    ).join(told, left_on="source", right_on="number", how="left", maintain_order="left")
    rows = calls.with_columns(
        comm=pl.col("comm_id").map_batches(_hexadecimal, return_dtype=pl.String),
        collective=_named("collective", [c.wire for c in Collective if c.tunable]),
        datatype=_named("datatype", DATATYPES),
        actual_algorithm=_named("algorithm", [a.wire for a in Algorithm]),
        actual_protocol=_named("protocol", [p.wire for p in Protocol]),
        decided=pl.col("decided") != 0,
        sampled=(pl.col("ranks_timed") > 0) | pl.col("incomplete"),
        source=pl.lit(CallSource.PLUGIN.value),
        asks_tuner=pl.lit(value=True),
        timing_source=pl.when(pl.col("ranks_timed") > 0).then(pl.lit("gpu")),
        actual_num_channels="num_channels",
        actual_num_warps="num_warps",
        graph_captured="captured",
    )
    return calls_table(rows), dict(twice.iter_rows())


def _named(column: str, names: Sequence[str]) -> pl.Expr:
    """The name of each code; null for codes without one."""
    codes = dict(enumerate(names))
    return pl.col(column).replace_strict(codes, default=None, return_dtype=pl.String)


def _hexadecimal(ids: pl.Series) -> pl.Series:
    # By way of the few distinct ones: Polars cannot format hexadecimal numbers.
    texts = {value: f"{value:016x}" for value in ids.unique()}
    return ids.replace_strict(texts, return_dtype=pl.String)
