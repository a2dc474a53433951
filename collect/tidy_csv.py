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

Cells are split by Python's `csv`, which knows the line of each record and how many cells a torn one
has; all else is done a column at a time.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import polars as pl

from dynamiccl.collect.facts import ImportOptions
from dynamiccl.collect.nccl_tests import (
    CHUNK_ROWS,
    PART_ROWS,
    Part,
    as_measurements,
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

#: Every column, in the usual order.
COLUMNS: Final = (
    *("source", "system", "gpu", "num_nodes", "ranks_per_node", "nccl_version", "collective"),
    *("size_bytes", "algorithm", "protocol", "num_channels", "mode", "launch_profile"),
    *("in_place", "run", "repeat", "statistic", "time_us", "busbw_gbytes_per_s", "is_default"),
    "note",
)
_NEEDED: Final = ("size_bytes", "collective")
#: One of these is needed, too.
_TIMES: Final = ("time_us", "busbw_gbytes_per_s")
#: What a row has in a column that its file lacks: one quiet run in the untouched environment.
_PLAIN: Final[Mapping[str, str]] = {
    "mode": "isolated",
    "launch_profile": DEFAULT_PROFILE,
    "run": "csv",
    "statistic": Statistic.MEAN.value,
}
_NAME: Final = re.compile(r"[A-Za-z_][\w ()/.%-]{0,40}")
#: What makes two rows one measurement printed twice.
_KEY: Final = (
    *(n for n in COLUMNS if n not in {"source", "system", "statistic", *_TIMES, "note"}),
    "system_description",
)
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
    sweep: str,
    columns_of: Callable[[str], Mapping[str, Any]],
    options: ImportOptions,
    report: FileReport,
) -> Iterator[Part]:
    """Yield the measurements of one CSV file; refused rows go to `report` with their line.

    `columns_of` gives the columns of a system, by its name in the file. Raises OutputError when a
    column is missing or unknown.
    """
    chunks = [
        (_converted(_filled(given, options), options, report), "repeat" in given.columns)
        for given in _records(path, options, report)
    ]
    rows = pl.concat([chunk for chunk, _ in chunks])
    is_again = pl.int_range(pl.len()).over(_KEY)
    if chunks[0][1]:
        first = rows.filter(is_again == 0)
        report.duplicates += rows.height - first.height
        rows = first
    else:
        rows = rows.with_columns(repeat=is_again)
    measured = rows.filter(pl.col("size_bytes") > 0)
    if measured.height < rows.height:
        report.drop("size 0", rows.height - measured.height)
    same = {"sweep": sweep, "source": Source.TIDY_CSV.value, "source_file": str(path)}
    for part in measured.iter_slices(PART_ROWS):
        found = _with_conditions(_with_config(_with_figures(part)), columns_of)
        if found.filter(status=Status.OK.value)["time_us"].null_count():
            report.remark("rows with a bandwidth of 0 or an unknown number of ranks keep no time")
        found = found.with_columns(**{name: pl.lit(value) for name, value in same.items()})
        found = found.select(name for name in MEASUREMENTS.names if name in found.columns)
        by = [name for name in TRIAL_COLUMNS if name in found.columns]
        yield "measurements", as_measurements(with_trials(found, by))


def _records(path: Path, options: ImportOptions, report: FileReport) -> Iterator[pl.DataFrame]:
    """The cells of each record as text, and its line; records of another length are rejected."""
    records: list[list[Any]] = []
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        try:
            names = [name.strip() for name in next(reader, [])]
        except csv.Error as error:
            raise OutputError(f"{path}:1: no CSV: {error}; correct the header line") from error
        _check_names(path, names, options)
        schema = {"source_line": pl.Int64, **dict.fromkeys(names, pl.String)}
        for line, cells in _split(reader, report):
            report.rows_read += 1
            if len(records) == CHUNK_ROWS:
                yield pl.DataFrame(records, schema=schema, orient="row")
                records = []
            if len(cells) == len(names):
                records.append([line, *cells])
            else:
                reason = f"{len(cells)} cells where the header names {len(names)} columns"
                report.reject(line, reason, ",".join(cells))
    taken = [f"{name} '{value}'" for name, value in _PLAIN.items() if name not in names]
    if not {"is_default", "algorithm", "protocol"} & set(names):
        taken.append("NCCL's own choice")
    if taken:
        report.remark(f"no column says otherwise, so all rows are taken as {', '.join(taken)}")
    yield pl.DataFrame(records, schema=schema, orient="row")


def _split(reader: Any, report: FileReport) -> Iterator[tuple[int, list[str]]]:
    """Each record with the line that it begins on."""
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            report.reject(line, f"no CSV: {error}", "")
            continue
        if cells:
            yield line, cells


def _check_names(path: Path, names: list[str], options: ImportOptions) -> None:
    known = ", ".join(COLUMNS)
    missing = [name for name in _NEEDED if name not in names]
    if options.system is None and "system" not in names:
        missing.append("system (or --system)")
    if not set(_TIMES) & set(names):
        missing.append(" or ".join(_TIMES))
    if missing:
        raise OutputError(
            f"{path}:1: no column {', '.join(missing)}; it has {', '.join(names)}, and a sweep may "
            f"have {known}: add or rename what is missing"
        )
    for name in names:
        if name not in COLUMNS or names.count(name) > 1:
            what = "unknown" if name not in COLUMNS else "repeated"
            raise OutputError(
                f"{path}:1: {what} column '{name}'; a sweep may have {known}: rename or remove it"
            )


def _filled(given: pl.DataFrame, options: ImportOptions) -> pl.DataFrame:
    """The cells, with defaults for columns that the file lacks."""
    nodes, ranks = options.num_nodes, options.num_ranks
    plain = {
        **dict.fromkeys(COLUMNS, ""),
        **_PLAIN,
        "num_nodes": str(nodes or ""),
        "ranks_per_node": str(ranks // nodes) if nodes and ranks and ranks % nodes == 0 else "",
    }
    lacking = {name: pl.lit(text) for name, text in plain.items() if name not in given.columns}
    cells = given.with_columns(pl.col(pl.String).str.strip_chars()).with_columns(**lacking)
    if "is_default" in lacking:
        forced = pl.any_horizontal(pl.col("algorithm", "protocol", "num_channels") != "")
        word = pl.when(forced).then(pl.lit("false")).otherwise(pl.lit("true"))
        cells = cells.with_columns(is_default=word)
    return cells


def _converted(cells: pl.DataFrame, options: ImportOptions, report: FileReport) -> pl.DataFrame:
    """The values of all cells; rows with one that cannot be read are rejected."""
    named = pl.col("system") if options.system is None else pl.lit(options.system)
    cells = cells.with_columns(named=named, system_description="system")
    values, reasons = {}, []
    for name, (kind, read) in _READERS.items():
        good: dict[str, Any] = {}
        bad: dict[str, str] = {}
        for text in cells[name].unique():
            try:
                good[text] = read(text)
            except (ValueError, UnknownName) as error:
                bad[text] = str(error)
        values[name] = pl.col(name).replace_strict(good, default=None, return_dtype=kind)
        if bad:
            reasons.append(pl.col(name).replace_strict(bad, default=None, return_dtype=pl.String))
    cells = cells.with_columns(why=pl.coalesce([*reasons, pl.lit(None, pl.String)]))
    for row in cells.filter(pl.col("why").is_not_null()).to_dicts():
        report.reject(row["source_line"], row["why"], ",".join(row[name] for name in COLUMNS))
    version = options.nccl_version and str(NcclVersion.parse(options.nccl_version))
    rows = cells.filter(pl.col("why").is_null()).with_columns(**values).drop("system")
    rows = rows.with_columns(
        pl.col("nccl_version").fill_null(pl.lit(version, pl.String)),
        gpu=pl.when(pl.col("gpu") != "").then("gpu").otherwise(pl.lit(options.gpu, pl.String)),
    )
    if options.launch_profile is not None:
        rows = rows.with_columns(launch_profile=pl.lit(options.launch_profile))
    return rows


def _with_conditions(
    rows: pl.DataFrame, columns_of: Callable[[str], Mapping[str, Any]]
) -> pl.DataFrame:
    """Add the facts of the system, and under which conditions it was measured."""
    systems = [{"named": name, **columns_of(name)} for name in rows["named"].unique()]
    facts = pl.DataFrame(systems, infer_schema_length=None)
    is_quiet = pl.col("mode") == "isolated"
    is_untouched = pl.col("launch_profile") == DEFAULT_PROFILE
    untouched, profile = pl.lit(DefaultScope.UNTOUCHED.value), pl.lit(DefaultScope.PROFILE.value)
    return rows.join(facts, on="named", maintain_order="left").with_columns(
        num_ranks=pl.col("num_nodes") * pl.col("ranks_per_node"),
        default_scope=pl.when(is_untouched).then(untouched).otherwise(profile),
        interference_kind=pl.when(is_quiet).then(pl.lit(QUIET)).otherwise("mode"),
        interference_level=pl.when(is_quiet).then(0.0),
        reason=pl.when(pl.col("note") != "").then("note"),
    )


def _with_config(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the requested and the actual config; see the decisions on top."""
    note = pl.col("note").str.to_lowercase()
    is_default, channels = pl.col("is_default"), pl.col("num_channels")
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
    """Add status and statistic, and the figures that follow from others."""
    time_us, busbw = pl.col("time_us"), pl.col("busbw_gbytes_per_s")
    status = pl.lit(Status.FAILED.value)
    for pattern, outcome in reversed(_OUTCOMES):
        told = pl.col("note").str.contains(pattern)
        status = pl.when(told).then(pl.lit(outcome.value)).otherwise(status)
    has_figure = time_us.is_not_null() | busbw.is_not_null()
    groups = rows.select("collective", "num_nodes", "ranks_per_node").unique()
    factors = [
        _bus_factor(Collective.parse(name), nodes * each if nodes and each else None)
        for name, nodes, each in groups.iter_rows()
    ]
    groups = groups.with_columns(factor=pl.Series(factors, dtype=pl.Float64))
    rows = rows.join(groups, on=groups.columns[:3], nulls_equal=True, maintain_order="left")
    algbw = (
        pl.when(time_us.is_not_null())
        .then(pl.col("size_bytes") / (time_us * 1e3))
        .when((busbw > 0) & (pl.col("factor") > 0))
        .then(busbw / pl.col("factor"))
    )
    return rows.with_columns(
        algbw_gbytes_per_s=algbw,
        status=pl.when(has_figure).then(pl.lit(Status.OK.value)).otherwise(status),
        statistic=pl.when(has_figure).then("statistic").otherwise(pl.lit(Statistic.NONE.value)),
        time_derived=time_us.is_null() & algbw.is_not_null(),
        time_us=time_us.fill_null(pl.col("size_bytes") / (algbw * 1e3)),
    )


def _bus_factor(collective: Collective, num_ranks: int | None) -> float | None:
    """Bus bandwidth / algorithm bandwidth, also where it is 1 for any number of ranks."""
    if num_ranks is not None:
        return collective.bus_factor(num_ranks)
    few, many = collective.bus_factor(2), collective.bus_factor(3)
    return few if few == many else None


class _BadCell(ValueError):
    """Raised for a cell whose row is rejected; the message is the reason."""


def _required(name: str, text: str) -> str:
    if not text:
        raise _BadCell(f"{name} is empty; write a value")
    return text


def _boolean(name: str, text: str) -> bool | None:
    values: dict[str, bool | None] = {"true": True, "false": False, "": None}
    if text.lower() not in values:
        raise _BadCell(f"{name} is '{text}'; write true, false or nothing")
    return values[text.lower()]


def _count(name: str, text: str, *, least: int = 1) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > 19 or int(text) >> MAX_SIZE_BITS or int(text) < least:
        raise _BadCell(f"{name} is '{text}', not a whole number from {least} on")
    return int(text)


def _time(text: str) -> float | None:
    value = _figure("time_us", text)
    if value == 0.0:
        raise _BadCell("time_us is 0; leave it empty when it is not known")
    return value


def _figure(name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise _BadCell(f"{name} is '{text}', not a number") from error
    if not 0.0 <= value < float("inf"):
        raise _BadCell(f"{name} is '{text}', not a number from 0 on")
    return value


def _statistic(text: str) -> str:
    if re.fullmatch(r"mean_of_\d+_runs", _required("statistic", text)):
        return Statistic.MEAN_OF_RUNS.value
    names = [statistic.value for statistic in Statistic]
    if text not in names:
        raise UnknownName("statistic", text, names)
    if text == Statistic.TARGET.value:
        raise _BadCell("statistic 'target' is no measurement")
    return text


#: What reads the text of a cell, by column; raises ValueError or UnknownName for a wrong one.
_READERS: Final[Mapping[str, tuple[Any, Callable[[str], Any]]]] = {
    "statistic": (pl.String, _statistic),
    "named": (pl.String, lambda text: slug(_required("system", text))),
    "num_nodes": (pl.Int64, partial(_count, "num_nodes")),
    "ranks_per_node": (pl.Int64, partial(_count, "ranks_per_node")),
    "mode": (pl.String, partial(_required, "mode")),
    "launch_profile": (pl.String, partial(_required, "launch_profile")),
    "run": (pl.String, partial(_required, "run")),
    "repeat": (pl.Int64, lambda text: _count("repeat", text, least=0) or 0),
    "nccl_version": (pl.String, lambda text: str(NcclVersion.parse(text)) if text else None),
    "collective": (pl.String, lambda text: Collective.parse(text).wire),
    "size_bytes": (
        pl.Int64,
        lambda text: _count("size_bytes", _required("size_bytes", text), least=0),
    ),
    "in_place": (pl.Boolean, partial(_boolean, "in_place")),
    "algorithm": (pl.String, lambda text: Algorithm.parse(text).wire if text else None),
    "protocol": (pl.String, lambda text: Protocol.parse(text).wire if text else None),
    "num_channels": (pl.Int64, partial(_count, "num_channels")),
    "is_default": (pl.Boolean, lambda text: _boolean("is_default", _required("is_default", text))),
    "time_us": (pl.Float64, _time),
    "busbw_gbytes_per_s": (pl.Float64, partial(_figure, "busbw_gbytes_per_s")),
}
