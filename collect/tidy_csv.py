"""Tidy CSV sweeps: one measurement a row, one column a fact, as published sweeps are tidied.

A file needs `size_bytes`, `collective`, a time or a bus bandwidth, and `system` unless the import
names it. Where another column is missing, all rows have its plain value (`_PLAIN`); rows alike then
are repeats of one measurement, in their order. Decisions that the columns leave open:

* A channel count in a default row was read back, unless its note says `requested`: then it was
  forced and algorithm and protocol were left to NCCL, which is a requested config of its own and
  not NCCL's default (the definition in the schema: nothing was requested).
* `channels = upper limit` in a note is a limit of the launch profile, not a requested count.
* A mode other than `isolated` is what ran beside the collective; how strong it was is not known.
* Time is computed from the bus bandwidth where only that is given (`time_derived`). A bandwidth
  that is printed as 0 has no time, and stays a row without one.

Records are split by Python's `csv`, which knows their lines, and checked by pydantic; all else is
done a column at a time.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import polars as pl
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from dynamiccl.collect.nccl_tests import (
    CHUNK_ROWS,
    PART_ROWS,
    ImportOptions,
    Part,
    as_measurements,
    first_problem,
    ranks_per_node,
    with_trials,
)
from dynamiccl.collect.output import FileReport
from dynamiccl.datasets.rows import TRIAL_COLUMNS
from dynamiccl.datasets.schema import (
    DEFAULT_PROFILE,
    MEASUREMENTS,
    QUIET,
    DefaultScope,
    Source,
    Statistic,
    Status,
)
from dynamiccl.datasets.store import slug
from dynamiccl.errors import OutputError, UnknownName
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.sizes import MAX_SIZE_BITS


def _parsed(read: Callable[[str], str]) -> AfterValidator:
    """What reads a cell's text; a name that is not known rejects its row."""

    @cache
    def checked(text: str) -> str:
        try:
            return read(text)
        except UnknownName as error:
            raise ValueError(error) from error

    return AfterValidator(checked)


def _statistic(text: str) -> str:
    if re.fullmatch(r"mean_of_\d+_runs", text):
        return Statistic.MEAN_OF_RUNS.value
    names = [each.value for each in Statistic if each is not Statistic.TARGET]
    if text not in names:
        raise ValueError(f"'{text}' is none of {', '.join(names)}: no measurement")
    return text


_Count = Annotated[int | None, Field(ge=1, lt=1 << MAX_SIZE_BITS)]
_Figure = Annotated[float | None, Field(ge=0.0, allow_inf_nan=False)]


class _Record(BaseModel):
    """The cells of one record; an empty one, or one of a column that is not there, is the default.

    The defaults are one quiet run in the untouched environment.
    """

    source: str | None = None
    system: str
    gpu: str | None = None
    num_nodes: _Count = None
    ranks_per_node: _Count = None
    nccl_version: Annotated[str, _parsed(lambda text: str(NcclVersion.parse(text)))] | None = None
    collective: Annotated[str, _parsed(lambda text: Collective.parse(text).wire)]
    size_bytes: int = Field(ge=0, lt=1 << MAX_SIZE_BITS)
    algorithm: Annotated[str, _parsed(lambda text: Algorithm.parse(text).wire)] | None = None
    protocol: Annotated[str, _parsed(lambda text: Protocol.parse(text).wire)] | None = None
    num_channels: _Count = None
    mode: str = "isolated"
    launch_profile: str = DEFAULT_PROFILE
    in_place: bool | None = None
    run: str = "csv"
    repeat: int | None = Field(default=None, ge=0, lt=1 << 31)
    statistic: Annotated[str, _parsed(_statistic)] = Statistic.MEAN.value
    time_us: Annotated[float | None, Field(gt=0.0, allow_inf_nan=False)] = None
    busbw_gbytes_per_s: _Figure = None
    is_default: bool | None = None
    note: str = ""


#: Every column, in the usual order.
COLUMNS: Final = tuple(_Record.model_fields)
#: One of these is needed, too.
_TIMES: Final = ("time_us", "busbw_gbytes_per_s")
_NUMBERS: Final = ("num_nodes", "ranks_per_node", "num_channels", "size_bytes", "repeat")
_TYPES: Final[Mapping[str, Any]] = {
    "source_line": pl.Int64,
    **dict.fromkeys(COLUMNS, pl.String),
    **dict.fromkeys(_NUMBERS, pl.Int64),
    **dict.fromkeys(_TIMES, pl.Float64),
    **dict.fromkeys(("in_place", "is_default"), pl.Boolean),
}
#: What makes two rows one measurement printed twice.
_KEY: Final = tuple(
    name for name in COLUMNS if name not in {"source", "statistic", *_TIMES, "note"}
)
_NAME: Final = re.compile(r"[A-Za-z_][\w ()/.%-]{0,40}")
#: What a note says about an attempt without a result; the first that matches.
_OUTCOMES: Final = (
    (r"(?i)\bhang|\bhung|timeout|timed out", Status.TIMED_OUT),
    (r"(?i)\bcrash", Status.FAILED),
    (r"(?i)\binvalid|infeasible", Status.INFEASIBLE),
    (r"(?i)\bwrong", Status.WRONG_VALUES),
)


def is_tidy_csv(first_line: str) -> bool:
    """Whether a line is the header of a CSV file, supported or not.

    >>> is_tidy_csv("size,collective,us"), is_tidy_csv("n1:7:7 [0] NCCL INFO Using a, b, c")
    (True, False)
    """
    names = [name.strip().strip('"') for name in first_line.split(",")]
    return len(names) >= 3 and all(map(_NAME.fullmatch, names))


def read_tidy_csv(
    path: Path,
    columns_of: Callable[[str], Mapping[str, Any]],
    options: ImportOptions,
    report: FileReport,
) -> Iterator[Part]:
    """Yield the measurements of one CSV file; refused rows go to `report` with their line.

    `columns_of` gives the columns of a system, by its name in the file. Raises OutputError when a
    column is missing or unknown, and where the file is no CSV.
    """
    rows = pl.concat(_records(path, options, report))
    is_again = pl.int_range(pl.len()).over(_KEY)
    if rows["repeat"].null_count() == rows.height:
        rows = rows.with_columns(repeat=is_again)
    else:
        first = rows.with_columns(pl.col("repeat").fill_null(0)).filter(is_again == 0)
        report.duplicates += rows.height - first.height
        rows = first
    measured = rows.filter(pl.col("size_bytes") > 0)
    if measured.height < rows.height:
        report.drop("size 0", rows.height - measured.height)
    same = {
        "sweep": options.sweep or slug(path.stem),
        "source": Source.TIDY_CSV.value,
        "source_file": str(path),
    }
    for part in measured.iter_slices(PART_ROWS):
        found = _with_conditions(_with_config(_with_figures(part)), columns_of, options)
        if found.filter(status=Status.OK.value)["time_us"].null_count():
            report.remark("rows with a bandwidth of 0 or an unknown number of ranks keep no time")
        found = found.with_columns(**{name: pl.lit(value) for name, value in same.items()})
        found = found.select(name for name in MEASUREMENTS.names if name in found.columns)
        by = [name for name in TRIAL_COLUMNS if name in found.columns]
        yield "measurements", as_measurements(with_trials(found, by))


def _records(path: Path, options: ImportOptions, report: FileReport) -> Iterator[pl.DataFrame]:
    """The values of all records, and the line that each ends on; wrong ones are rejected."""
    records: list[dict[str, Any]] = []
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        try:
            names = [name.strip() for name in next(reader, [])]
            _check_names(path, names, options)
            known = _known(options)
            for cells in filter(None, reader):
                report.rows_read += 1
                try:
                    record = _record(names, cells, known)
                except ValueError as error:
                    why = first_problem(error) if isinstance(error, ValidationError) else str(error)
                    report.reject(reader.line_num, why, ",".join(cells))
                    continue
                records.append({"source_line": reader.line_num, **record.__dict__})
                if len(records) == CHUNK_ROWS:
                    yield pl.DataFrame(records, schema=_TYPES)
                    records = []
        except csv.Error as error:
            line = reader.line_num
            raise OutputError(f"{path}:{line}: no CSV: {error}; correct that line") from error
    lacking = ("mode", "launch_profile", "run", "statistic")
    taken = [f"{n} '{_Record.model_fields[n].default}'" for n in lacking if n not in names]
    if not {"is_default", "algorithm", "protocol"} & set(names):
        taken.append("NCCL's own choice")
    if taken:
        report.remark(f"no column says otherwise, so all rows are taken as {', '.join(taken)}")
    yield pl.DataFrame(records, schema=_TYPES)


def _record(names: Sequence[str], cells: Sequence[str], known: Mapping[str, Any]) -> _Record:
    """A record's values; raises ValueError."""
    if len(cells) != len(names):
        raise ValueError(f"{len(cells)} cells where the header names {len(names)} columns")
    texts = {name: cell.strip() for name, cell in zip(names, cells, strict=True)}
    return _Record.model_validate({**known, **{name: text for name, text in texts.items() if text}})


def _known(options: ImportOptions) -> dict[str, Any]:
    """What the caller knows, for cells that are empty."""
    told = {
        "system": options.system,
        "gpu": options.gpu,
        "nccl_version": options.nccl_version,
        "num_nodes": options.num_nodes,
        "ranks_per_node": ranks_per_node(options.num_ranks, options.num_nodes),
    }
    return {name: value for name, value in told.items() if value is not None}


def _check_names(path: Path, names: Sequence[str], options: ImportOptions) -> None:
    missing = [name for name in ("size_bytes", "collective") if name not in names]
    if options.system is None and "system" not in names:
        missing.append("system (or --system)")
    if not set(_TIMES) & set(names):
        missing.append(" or ".join(_TIMES))
    odd = [name for name in names if name not in COLUMNS or names.count(name) > 1]
    if missing or odd:
        what = [f"no column {', '.join(missing)}"] if missing else []
        what += [f"unknown or repeated column {', '.join(odd)}"] if odd else []
        raise OutputError(
            f"{path}:1: {'; '.join(what)}; it has {', '.join(names)}, and a sweep may have "
            f"{', '.join(COLUMNS)}: add, rename or remove what is wrong"
        )


def _with_config(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the requested and the actual config; see the decisions on top."""
    note, channels = pl.col("note").str.to_lowercase(), pl.col("num_channels")
    names = ("algorithm", "protocol", "num_channels")
    is_default = pl.col("is_default").fill_null(pl.all_horizontal(pl.col(names).is_null()))
    is_limit = note.str.contains("upper limit", literal=True)
    was_requested = note.str.contains("channels", literal=True) & note.str.contains("requested")
    was_read_back = note.str.contains("channels: read back", literal=True)
    is_forced = pl.when(is_default).then(was_requested).otherwise(~is_limit & ~was_read_back)
    forced = pl.when(is_forced).then(channels)
    return rows.with_columns(
        is_default=is_default & forced.is_null(),
        requested_algorithm=pl.when(~is_default).then("algorithm"),
        requested_protocol=pl.when(~is_default).then("protocol"),
        requested_num_channels=forced,
        actual_algorithm=pl.when(is_default).then("algorithm"),
        actual_protocol=pl.when(is_default).then("protocol"),
        actual_num_channels=pl.when(forced.is_null() & ~is_limit).then(channels),
    )


def _with_figures(rows: pl.DataFrame) -> pl.DataFrame:
    """Add number of ranks, status and statistic, and the figures that follow from others."""
    rows = rows.with_columns(num_ranks=pl.col("num_nodes") * pl.col("ranks_per_node"))
    time_us, busbw = pl.col.time_us, pl.col.busbw_gbytes_per_s
    groups = rows.select("collective", "num_ranks").unique()
    factors = [
        Collective.parse(name).bus_factor(ranks) if ranks else None
        for name, ranks in groups.iter_rows()
    ]
    groups = groups.with_columns(factor=pl.Series(factors, dtype=pl.Float64))
    rows = rows.join(groups, on=groups.columns[:2], nulls_equal=True, maintain_order="left")
    by_busbw = pl.when((busbw > 0) & (pl.col("factor") > 0)).then(busbw / pl.col("factor"))
    algbw = pl.coalesce(pl.col("size_bytes") / (time_us * 1e3), by_busbw)
    has_figure = time_us.is_not_null() | busbw.is_not_null()
    status = pl.lit(Status.FAILED.value)
    for pattern, outcome in reversed(_OUTCOMES):
        told = pl.col("note").str.contains(pattern)
        status = pl.when(told).then(pl.lit(outcome.value)).otherwise(status)
    return rows.with_columns(
        algbw_gbytes_per_s=algbw,
        status=pl.when(has_figure).then(pl.lit(Status.OK.value)).otherwise(status),
        statistic=pl.when(has_figure).then("statistic").otherwise(pl.lit(Statistic.NONE.value)),
        time_derived=time_us.is_null() & algbw.is_not_null(),
        time_us=time_us.fill_null(pl.col("size_bytes") / (algbw * 1e3)),
    )


def _with_conditions(
    rows: pl.DataFrame, columns_of: Callable[[str], Mapping[str, Any]], options: ImportOptions
) -> pl.DataFrame:
    """Add the facts of the system, and under which conditions it was measured."""
    texts = rows["system"].unique()
    names = [options.system or slug(text) for text in texts]
    facts = pl.DataFrame(
        [
            {"system_description": text, **columns_of(name)}
            for text, name in zip(texts, names, strict=True)
        ],
        infer_schema_length=None,
    )
    if options.launch_profile is not None:
        rows = rows.with_columns(launch_profile=pl.lit(options.launch_profile))
    is_quiet = pl.col("mode") == "isolated"
    is_untouched = pl.col("launch_profile") == DEFAULT_PROFILE
    untouched, profile = pl.lit(DefaultScope.UNTOUCHED.value), pl.lit(DefaultScope.PROFILE.value)
    rows = rows.rename({"system": "system_description"})
    return rows.join(facts, on="system_description", maintain_order="left").with_columns(
        default_scope=pl.when(is_untouched).then(untouched).otherwise(profile),
        interference_kind=pl.when(is_quiet).then(pl.lit(QUIET)).otherwise("mode"),
        interference_level=pl.when(is_quiet).then(0.0),
        reason=pl.when(pl.col("note") != "").then("note"),
    )
