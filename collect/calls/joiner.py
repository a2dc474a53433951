"""Joins the records of a call from all of its ranks to one row.

Records of one call lie in the files of all ranks. They are first spilled into buckets on disk, all
of one call into the same, and then joined a bucket at a time: memory does not grow with the data.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from dynamiccl.collect.calls.reader import FLAG_CAPTURED, FLAG_INCOMPLETE, FLAG_PROBE, RECORD
from dynamiccl.collect.reports import FileReport
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.datasets.schema import CALLS
from dynamiccl.nccl import NUM_TUNED_COLLECTIVES, Algorithm, Collective, Protocol
from dynamiccl.sizes import MAX_SIZE_BITS

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


class Spill:
    """Records on their way from files to calls, in hash buckets under a temporary directory."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        """`total_bytes` is what the files hold together, about."""
        self._folder = folder
        self._buckets = min(_MAX_BUCKETS, total_bytes // _BUCKET_BYTES + 1)

    def add(self, records: npt.NDArray[np.void], source: int, report: FileReport) -> None:
        """Spill records of the file number `source`; what cannot be is counted in `report`."""
        good = _sound(records, report)
        spilled = np.empty(len(good), dtype=_SPILLED)
        spilled["record"] = good
        spilled["source"] = source
        buckets = _bucket_of(good, self._buckets)
        for bucket in np.unique(buckets):
            with self._path(int(bucket)).open("ab") as file:
                file.write(spilled[buckets == bucket].tobytes())

    def frames(self) -> Iterator[pl.DataFrame]:
        """Each bucket's records, in file order."""
        for bucket in range(self._buckets):
            path = self._path(bucket)
            if path.exists():
                yield _frame(np.fromfile(path, dtype=_SPILLED))

    def _path(self, bucket: int) -> Path:
        return self._folder / f"bucket-{bucket:04}"


def join(
    records: pl.DataFrame, environments: Sequence[dict[str, Any]], base: dict[str, Any]
) -> tuple[pa.Table, dict[int, int]]:
    """The calls of some records, and for each source how many records were duplicates.

    `environments` has the columns that each file tells, `base` those that hold for all.
    """
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
    return _table(calls, environments, base), dict(twice.iter_rows())


def _table(
    calls: pl.DataFrame, environments: Sequence[dict[str, Any]], base: dict[str, Any]
) -> pa.Table:
    told = pl.DataFrame(
        [{"source": index, **environment} for index, environment in enumerate(environments)],
        schema_overrides={"source": pl.UInt32, "mig": pl.Boolean, "nics_per_node": pl.Int64},
        infer_schema_length=None,
    )
    known_of_all = pl.col("ranks_timed") == pl.col("num_ranks")
    rows = calls.join(told, on="source", how="left", maintain_order="left").with_columns(
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
        **{name: pl.lit(value) for name, value in base.items()},
    )
    rows = rows.rename(
        {
            "num_channels": "actual_num_channels",
            "num_warps": "actual_num_warps",
            "captured": "graph_captured",
        }
    )
    arrow = rows.to_arrow()
    arrays = [
        arrow[field.name].cast(field.type)
        if field.name in arrow.column_names
        else pa.nulls(arrow.num_rows, field.type)
        for field in CALLS
    ]
    return pa.Table.from_arrays(arrays, schema=CALLS)


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


def _bucket_of(records: npt.NDArray[np.void], buckets: int) -> npt.NDArray[np.uint64]:
    run = (records["sequence"] >> _SEQUENCE_SHIFT) * np.uint64(8) + records["collective"]
    mixed: npt.NDArray[np.uint64] = (records["comm_id"] ^ (run * _MIX)) * _MIX
    return (mixed >> np.uint64(40)) % np.uint64(buckets)


def _frame(spilled: npt.NDArray[np.void]) -> pl.DataFrame:
    records = spilled["record"]
    columns = {name: np.ascontiguousarray(records[name]) for name in records.dtype.names or ()}
    frame = pl.DataFrame({**columns, "source": np.ascontiguousarray(spilled["source"])})
    return frame.with_columns(captured=pl.col("flags") & FLAG_CAPTURED > 0)


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
