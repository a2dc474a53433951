"""The table of calls, from what ranks recorded in the plugin's calls files (`.dcc`) or traces.

A calls file (`serve/plugin/profiler/recorder.cpp`) has 512 bytes of header, then entries of 80
bytes with a checksum each: a killed process tears one. Ranks are joined by the communicator's id
and NCCL's number, or the process group and PyTorch's number. Older traces have neither: calls are
joined by order within a training step, if all ranks have the same collectives in the same order.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import polars.selectors as cs
import pyarrow as pa

from dynamiccl.collect.grid import DATATYPE_BYTES
from dynamiccl.collect.output import FileReport
from dynamiccl.datasets.schema import CALLS, CallSource
from dynamiccl.datasets.store import slug
from dynamiccl.errors import CorruptFile, DataError, OutputError, UnknownName
from dynamiccl.nccl import NUM_TUNED_COLLECTIVES, Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.schedule import FNV_OFFSET, FNV_PRIME
from dynamiccl.sizes import MAX_SIZE_BITS

MAGIC: Final = b"DCCALLS\0"
VERSION: Final = 1
SUFFIX: Final = ".dcc"

#: `CallRecord` in serve/plugin/profiler/profiler.h.
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

_CHECKS: Final = {
    "collective not known": pl.col("collective") < NUM_TUNED_COLLECTIVES,
    "size 0 or out of range": pl.col("size_bytes").is_between(1, (1 << MAX_SIZE_BITS) - 1),
    "rank out of range": pl.col("rank").is_between(0, pl.col("num_ranks"), closed="left")
    & (pl.col("num_nodes") > 0),
    # Both are 0 where no time was taken.
    "GPU times out of order": ((pl.col("start_ns") == 0) & (pl.col("stop_ns") == 0))
    | ((pl.col("start_ns") > 0) & (pl.col("start_ns") < pl.col("stop_ns"))),
}
_CALL: Final = ("comm_id", "collective", "sequence", "captured", "replay")
_CONFIG: Final = (
    *("size_bytes", "num_ranks", "num_nodes"),
    *("algorithm", "protocol", "num_channels", "datatype"),
)
_JOINED: Final = (
    *("time_at_most_us", "skew_us", "ranks_per_node"),
    *("ranks_seen", "ranks_timed", "ranks_agree"),
)
#: One rank's record in a trace. Records are joined by `key`, else by place within a `stream`.
RANK_RECORD: Final[dict[str, pl.DataType | type[pl.DataType]]] = {
    **{name: kind for name, kind in pl.Schema(CALLS).items() if name not in _JOINED},
    **dict.fromkeys(("key", "stream"), pl.String),
    **dict.fromkeys(("rank", "world_size"), pl.Int64),
}
_TRACE_CONFIG: Final = (
    *("collective", "size_bytes", "datatype"),
    *("actual_algorithm", "actual_protocol", "actual_num_channels"),
)
#: Of all ranks, which send what they like in an uneven all-to-all; `cpu` sorts before `gpu`.
_MOST: Final = ("size_bytes", "incomplete", "probe")
_LEAST: Final = ("timestamp", "exposed_us", "compute_ratio", "timing_source")


def join_ranks(records: pl.DataFrame, key: Sequence[str], agreed: Sequence[str]) -> pl.DataFrame:
    """One row for each call, from the ranks' records with equal `key` columns.

    Each `time_us` (null: unknown) includes waiting, so the least of all ranks is the call's. Of
    others the first rank that knows tells; `ranks_agree` compares `agreed`, null being a value.
    """
    time = pl.col("time_us")
    told = pl.exclude(*key, "time_us", *_MOST, *_LEAST)
    calls = records.group_by(key, maintain_order=True).agg(
        told.first(ignore_nulls=True),
        cs.by_name(_MOST, require_all=False).max(),
        cs.by_name(_LEAST, require_all=False).min(),
        ranks_seen=pl.len(),
        ranks_timed=time.count(),
        time_at_most_us=time.min(),
        slowest_us=time.max(),
        ranks_agree=pl.all_horizontal(pl.col(agreed).n_unique() == 1),
    )
    is_known = pl.col("ranks_timed") == pl.col("num_ranks")
    least, ranks, nodes = pl.col("time_at_most_us"), pl.col("num_ranks"), pl.col("num_nodes")
    return calls.with_columns(
        time_us=pl.when(is_known).then(least),
        skew_us=pl.when(is_known).then(pl.col("slowest_us") - least),
        ranks_per_node=pl.when(ranks % nodes == 0).then(ranks // nodes),
    )


def calls_table(calls: pl.DataFrame) -> pa.Table:
    """As schema CALLS: lacking columns are null, others go."""
    absent = [pl.lit(None).alias(name) for name in CALLS.names if name not in calls.columns]
    return calls.with_columns(absent).select(CALLS.names).to_arrow().cast(CALLS)


def join_traces(
    records: pl.DataFrame, base: Mapping[str, Any]
) -> tuple[pa.Table, Counter[str], int]:
    """The calls of a job's traces, why some lack a time, and how many records were duplicates.

    Columns of `base` win over traces; its `num_ranks` and `num_nodes` hold where they tell none.
    """
    # A part of the job may lie on fewer nodes than the job.
    world_size = pl.coalesce("world_size", pl.lit(base.get("num_ranks"), pl.Int64))
    is_world = pl.lit(base.get("num_nodes") == 1) | (pl.col("num_ranks") == world_size)
    nodes = pl.when(is_world).then(pl.lit(base.get("num_nodes"), pl.Int64))
    stream = ["source", "stream"]
    place = pl.int_range(pl.len()).over(*stream, "rank")
    numbered = records.with_row_index("alone").with_columns(place=place)
    made = pl.struct("collective", "datatype", "group_sequence")
    is_same = (made.n_unique() == 1).over(*stream, "place")
    is_same &= pl.len().over(*stream, "place") == pl.col("rank").n_unique().over(stream)
    numbered = numbered.with_columns(is_same=is_same, num_nodes=pl.coalesce("num_nodes", nodes))
    alike = pl.col("is_same").all().over(stream)
    in_stream = pl.when(alike).then(pl.format("{} {}", "stream", "place"))
    shared = pl.when(pl.col("rank").is_not_null()).then(pl.coalesce("key", in_stream))
    keyed = numbered.with_columns(key=pl.coalesce(shared, pl.format("record {}", "alone")))
    single = keyed.unique(["source", "key", "rank"], keep="first", maintain_order=True)
    fixed = {n: pl.lit(v) for n, v in base.items() if n not in {"num_ranks", "num_nodes"}}
    ordered = single.sort("rank", maintain_order=True, nulls_last=True)
    calls = join_ranks(ordered, ["source", "key"], _TRACE_CONFIG)
    few = "the traces of other ranks are missing, or have other calls"
    is_open = pl.col("num_ranks").is_null()
    why = pl.when(is_open).then(pl.lit("their number of ranks is not known")).otherwise(pl.lit(few))
    untimed = Counter(calls.filter(pl.col("time_us").is_null()).select(why).to_series().to_list())
    calls = calls.with_columns(**fixed).sort("timestamp", maintain_order=True)
    return calls_table(calls), untimed, records.height - single.height


def read_calls(files: Sequence[FileReport], base: Mapping[str, Any]) -> pa.Table:
    """The joined calls of all ranks' files, as schema CALLS; `base` has columns of all rows."""
    records: list[pl.DataFrame] = []
    environments: list[dict[str, Any]] = []
    for source, report in enumerate(files):
        try:
            told = _environment(read_header(Path(report.path)))
            found = pl.DataFrame(read_records(Path(report.path), report))
            if found.is_empty() and report.rejected:
                raise OutputError(f"{report.path} holds no usable entry; {report.rejected[0]}")
        except DataError as error:
            report.failure = error
            continue
        for reason, holds in _CHECKS.items():
            sound = found.filter(holds)
            if sound.height < found.height:
                report.drop(reason, found.height - sound.height)
            found = sound
        records.append(found.with_columns(source=pl.lit(source)))
        run = slug(told["run"]) if told["run"] else base["sweep"]
        # The plugin saw only one machine.
        environments.append({"source": source, **told, "run": run, **base})
    if not sum(map(len, records)):
        return CALLS.empty_table()
    calls, twice = _joined(pl.concat(records))
    for source, count in twice.iter_rows():
        files[source].duplicates += count
    known = pl.DataFrame(environments, infer_schema_length=None)
    calls = calls.join(known, on="source", how="left", maintain_order="left")
    return calls_table(calls.with_columns(source=pl.lit(CallSource.PLUGIN.value)))


def read_header(path: Path) -> np.void:
    """The file's header. Raises CorruptFile when there is none that this release reads."""
    with path.open("rb") as file:
        raw = file.read(HEADER.itemsize)
    if raw[: len(MAGIC)] != MAGIC:
        raise CorruptFile(f"{path} is not a calls file: it does not begin with 'DCCALLS'")
    if len(raw) < HEADER.itemsize:
        raise CorruptFile(f"{path} ends at byte {len(raw)}, within its header")
    header: np.void = np.frombuffer(raw, dtype=HEADER)[0]
    if int(_fnv1a(np.frombuffer(raw, np.uint8)[np.newaxis, :-8])[0]) != int(header["checksum"]):
        raise CorruptFile(f"{path} is damaged: the checksum of its header is wrong")
    layout = (int(header["version"]), int(header["header_bytes"]), int(header["entry_bytes"]))
    if layout != (VERSION, HEADER.itemsize, ENTRY.itemsize):
        raise CorruptFile(
            f"{path} is of another release: version {layout[0]} with entries of {layout[2]} bytes, "
            f"this one reads version {VERSION} with {ENTRY.itemsize}"
        )
    return header


def _environment(header: np.void) -> dict[str, Any]:
    texts = ("job", "fingerprint", "plugin_version", "mode")
    job, fingerprint, plugin, mode = (bytes(header[n]).decode(errors="replace") for n in texts)
    facts = dict(part.split("=", 1) for part in fingerprint.split(";") if "=" in part)
    gpu, _, _ = facts.get("gpu", "").rpartition("*")
    kind, _, nics = facts.get("nic", "").rpartition("*")
    try:
        code = int(header["nccl_version"]) or facts.get("nccl", "")
        nccl_version = str(NcclVersion.parse(code))
    except UnknownName:
        nccl_version = None
    return {
        "run": job,
        "node_fingerprint": fingerprint.partition(";nccl=")[0] or None,
        "gpu": gpu if gpu not in {"", "none"} else None,
        "mig": {"0": False, "1": True}.get(facts.get("mig", "")),
        "nic_kind": kind or None,
        "nics_per_node": int(nics) if re.fullmatch(r"[0-9]{1,9}", nics) else None,
        "nccl_version": nccl_version,
        "plugin_version": plugin or None,
        "plugin_mode": mode or None,
    }


def read_records(path: Path, report: FileReport) -> npt.NDArray[np.void]:
    """(N,) records of a file with a good header; damaged and torn entries are rejected."""
    raw = path.read_bytes()
    count, torn = divmod(len(raw) - HEADER.itemsize, ENTRY.itemsize)
    entries = np.frombuffer(raw, dtype=ENTRY, count=count, offset=HEADER.itemsize)
    rows = entries.view(np.uint8).reshape(-1, ENTRY.itemsize)
    good = _fnv1a(rows[:, :-4]).astype(np.uint32) == entries["checksum"]
    wrong = [(int(index), "is damaged") for index in np.flatnonzero(~good)]
    if torn:
        wrong.append((count, f"is torn after {torn} bytes"))
    for index, reason in wrong:
        place = HEADER.itemsize + index * ENTRY.itemsize
        excerpt = raw[place : place + ENTRY.itemsize].hex(" ", 8)
        report.reject(index + 1, f"the entry at byte {place} {reason}", excerpt)
    report.rows_read += int(good.sum())
    if dropped := int(entries["dropped"][good].sum()):
        report.remark(f"{dropped} calls were not recorded: the plugin's ring was full")
    records: npt.NDArray[np.void] = entries["record"][good]
    return records


def _fnv1a(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    digests = np.full(len(rows), FNV_OFFSET, dtype=np.uint64)
    for column in rows.T:
        digests = (digests ^ column) * np.uint64(FNV_PRIME)
    return digests


def _joined(records: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The calls of all ranks' records, and the number of duplicates by `source`."""
    flags, duration_us = pl.col("flags"), (pl.col("stop_ns") - pl.col("start_ns")) / 1e3
    at = pl.from_epoch(pl.col("enqueued_ns") // 1000, time_unit="us")
    records = records.with_columns(
        captured=flags & FLAG_CAPTURED > 0,
        incomplete=flags & FLAG_INCOMPLETE > 0,
        probe=flags & FLAG_PROBE > 0,
        time_us=pl.when(pl.col("stop_ns") > 0).then(duration_us),
        timestamp=at.dt.replace_time_zone("UTC"),
    )
    key = ("comm_id", "collective", "sequence", "captured", "rank")
    # A replay keeps NCCL's number: the n-th of one rank is the n-th of the others.
    numbered = records.with_columns(replay=pl.int_range(pl.len(), dtype=pl.UInt32).over(key))
    is_first = pl.col("captured") | (pl.col("replay") == 0)
    calls = join_ranks(numbered.filter(is_first).sort(*_CALL, "rank"), _CALL, _CONFIG)
    named = calls.with_columns(
        comm=pl.col("comm_id").map_elements("{:016x}".format, return_dtype=pl.String),
        collective=_named("collective", [c.wire for c in Collective if c.tunable]),
        datatype=_named("datatype", [*DATATYPE_BYTES]),
        actual_algorithm=_named("algorithm", [a.wire for a in Algorithm]),
        actual_protocol=_named("protocol", [p.wire for p in Protocol]),
        decided=pl.col("decided") != 0,
        sampled=(pl.col("ranks_timed") > 0) | pl.col("incomplete"),
        asks_tuner=pl.lit(value=True),
        timing_source=pl.when(pl.col("ranks_timed") > 0).then(pl.lit("gpu")),
        # 0 of a Broadcast from NCCL 2.29 on, which tells no profiler how it ran.
        actual_num_channels=pl.col("num_channels").replace(0, None),
        actual_num_warps=pl.col("num_warps").replace(0, None),
        graph_captured="captured",
    )
    return named, numbered.filter(~is_first).group_by("source").len()


def _named(column: str, names: Sequence[str]) -> pl.Expr:
    codes = dict(enumerate(names))
    return pl.col(column).replace_strict(codes, default=None, return_dtype=pl.String)
