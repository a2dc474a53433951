"""`dynamiccl-collect import`: other people's measurements into the Parquet store.

A file is recognised by what it holds (`_READERS`) and read into tables. It becomes parts of its
own, which depend on nothing but the file, the options and this program: a file imported twice by
one release is there once, and a bad file among good ones costs nothing but itself. Calls files and
traces are the exception: those of all ranks are joined, so all that are named together make parts
together.

Nothing is lost silently: a row that was read is written, dropped with a reason, counted as a
duplicate, or rejected with its file, line and text.
"""

import csv
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from rich.console import Console

from dynamiccl import cli
from dynamiccl.collect.calls import MAGIC, SUFFIX, read_calls
from dynamiccl.collect.nccl_tests import (
    CHUNK_ROWS,
    PART_ROWS,
    ImportOptions,
    Part,
    as_measurements,
    load_systems,
    ranks_per_node,
    read_file,
    with_trials,
)
from dynamiccl.collect.output import FileReport, Rejected, looks_like_row
from dynamiccl.collect.traces import TraceFile, read_files, trace_file
from dynamiccl.datasets.provenance import file_sha256, program_record
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
from dynamiccl.datasets.store import check_slug, part_paths, slug, write_part
from dynamiccl.errors import DataError, MissingPath, OutputError, UnknownName, UserError
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.toml_table import first_problem
from dynamiccl.sizes import MAX_SIZE_BITS

__all__ = ["ImportFailed", "ImportOptions", "ImportSummary", "import_files"]

_LOG: Final = logging.getLogger(__name__)
TEXT: Final = Source.NCCL_TESTS_TEXT.value
JSON: Final = Source.NCCL_TESTS_JSON.value
CSV: Final = Source.TIDY_CSV.value
#: Kinds of which all files are read together.
_CALLS: Final = "calls"
_TRACE: Final = "trace"
_JOINED: Final = (_CALLS, _TRACE)
_SNIFF_BYTES: Final = 65_536
#: Lines of each kind that people are shown; all are in --json.
_SHOWN: Final = 20
_stderr = Console(stderr=True)
_stdout = Console()


def _check(options: ImportOptions) -> None:
    """Refuse names that do not parse, before any file is read."""
    checks: Mapping[str, Callable[[Any], object]] = {
        "system": lambda name: check_slug(name, "system"),
        "sweep": lambda name: check_slug(name, "sweep"),
        "collective": lambda name: Collective.parse(name, where="option collective"),
        "algorithm": lambda name: Algorithm.parse(name, where="option algorithm"),
        "protocol": lambda name: Protocol.parse(name, where="option protocol"),
        "nccl_version": NcclVersion.parse,
    }
    for name, check in checks.items():
        if (value := getattr(options, name)) is not None:
            check(value)
    for name in ("num_ranks", "num_nodes", "num_channels"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"option {name} is {value}; give a whole number from 1 on")


@dataclass(frozen=True, slots=True)
class _Input:
    path: Path
    format: str
    sha256: str
    report: FileReport
    trace: TraceFile | None = None
    #: Why it cannot be read, where that is known from its beginning.
    problem: DataError | None = None


@dataclass(slots=True, kw_only=True)
class ImportSummary:
    """Totals over all files, and each file's report."""

    rows_read: int = 0
    measurements_written: int = 0
    #: Calls of jobs, one for all ranks, and those of them whose time is known from all ranks.
    calls_written: int = 0
    calls_timed: int = 0
    #: Of traces: records of single ranks that calls were joined of, and steps.
    rank_records: int = 0
    steps_written: int = 0
    #: Why calls of traces have no time -> calls.
    untimed: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    duplicates: int = 0
    num_rejected: int = 0
    #: Measurements of those written that an earlier import had written, too.
    already_there: int = 0
    #: Files of directories that are not read -> what they are.
    skipped: dict[str, str] = field(default_factory=dict)
    #: The first rejected lines of each file.
    rejected: list[Rejected] = field(default_factory=list)
    files: list[FileReport] = field(default_factory=list)

    def add_up(self) -> None:
        """Count the rows of all files; joined calls belong to no single file."""
        counts = (
            "rows_read",
            "measurements_written",
            "duplicates",
            "num_rejected",
            "already_there",
        )
        for name in counts:
            setattr(self, name, sum(getattr(report, name) for report in self.files))
        self.dropped = sum(sum(report.dropped.values()) for report in self.files)
        self.rejected = [line for report in self.files for line in report.rejected]

    @property
    def written_text(self) -> str:
        """What was written, as text."""
        joined = f" from {self.rank_records} records of ranks" if self.rank_records else ""
        counts = (
            (self.calls_written, f"calls{joined} ({self.calls_timed} with a time)"),
            (self.steps_written, "steps"),
            (sum(report.costs for report in self.files), "of NCCL's costs"),
        )
        told = [f"{count} {what}" for count, what in counts if count]
        return ", ".join([f"{self.measurements_written} measurements", *told])

    def to_json(self) -> dict[str, Any]:
        """The summary as plain values for `json.dumps`; rejected lines appear once."""
        found = dataclasses.asdict(self)
        for report in found["files"]:
            report["rejected"] = report.pop("num_rejected")
            del report["most_rejected"]
        return {**found, "rejected": [line._asdict() for line in self.rejected]}


class ImportFailed(OutputError):
    """Raised when files gave no row; `summary` has what the others gave."""

    def __init__(self, errors: Sequence[DataError], summary: ImportSummary) -> None:
        """Make a message with one line a failure, and what was written nevertheless."""
        told = list(map(str, errors))
        if others := sum(bool(report.parts) for report in summary.files):
            measurements = f"{summary.measurements_written} measurements"
            told.append(f"{measurements} of {others} other files are written")
        if summary.calls_written:
            told.append(f"{summary.calls_written} calls are written")
        super().__init__("; ".join(told))
        self.summary = summary


def import_files(
    paths: Sequence[Path], out_dir: Path, *, options: ImportOptions | None = None
) -> ImportSummary:
    """Import `paths` into `out_dir`, and report what became of every row.

    A directory stands for the files of known kinds below it.
    Raises UserError before anything is read when the options cannot work, and OutputError, which
    names the files, after all are written when some gave no row. A single file raises its own
    error, which may be a CorruptFile.
    """
    options = options or ImportOptions()
    _check(options)
    columns_of = load_systems(options.systems_file)
    summary = ImportSummary()
    inputs = _inputs(paths, summary.skipped)
    if not inputs:
        named = ", ".join(map(str, paths)) or "no file to import"
        found = (
            f"{len(summary.skipped)} files of other kinds" if summary.skipped else "no file at all"
        )
        raise UserError(
            f"{named}: {found}, and no nccl-tests output, CSV, calls file or trace; name files, or "
            "the directory that holds them"
        )
    unknown = [item.path for item in inputs if item.format != CSV]
    if options.system is None and unknown:
        raise UserError(
            f"{unknown[0]} does not say on which system it was measured; name it with --system"
        )
    fresh = {item.sha256: item for item in reversed(inputs)}
    errors: list[DataError] = []
    for item in inputs:
        if fresh[item.sha256] is not item:
            first = fresh[item.sha256].path
            item.report.remark(f"the same bytes as {first}; not taken twice")
            continue
        try:
            _import_one(item, options, columns_of, out_dir)
        except DataError as error:
            item.report.failure = str(error)
            errors.append(error)
    # A trace has a report of its own.
    summary.files = [item.report for item in inputs if not item.trace or item.report.remarks]
    jobs = [item for item in inputs if fresh[item.sha256] is item and item.format in _JOINED]
    if jobs:
        _import_jobs(jobs, options, columns_of, out_dir, summary, errors)
    summary.add_up()
    if errors:
        raise errors[0] if len(inputs) == 1 else ImportFailed(errors, summary)
    return summary


def _inputs(paths: Sequence[Path], skipped: dict[str, str]) -> list[_Input]:
    """The files to read; those of directories that are not go to `skipped`, with the reason."""
    inputs: list[_Input] = []
    for path in paths:
        if not path.is_dir():
            inputs.append(_input(path))
            continue
        for file in sorted(each for each in path.rglob("*") if each.is_file()):
            item = _input(file)
            if isinstance(item.problem, OutputError):
                skipped[str(file)] = str(item.problem).removeprefix(f"{file} is ")
            elif item.format != TEXT or _has_output(file):
                inputs.append(item)
            else:
                skipped[str(file)] = "no kind that is known"
    return inputs


def _input(path: Path) -> _Input:
    """Recognise a file by its first bytes."""
    if not path.is_file():
        raise MissingPath("file to import", path, "check the name")
    trace: TraceFile | None = None
    problem = None
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFF_BYTES)
        text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
        # By its name too: text would be refused for reasons that do not help.
        if head.startswith(MAGIC) or path.suffix == SUFFIX:
            kind = _CALLS
        else:
            try:
                trace = trace_file(path)
            except DataError as error:
                problem = error
            looks_csv = is_csv(text.split("\n", 1)[0])
            found = JSON if text.startswith("{") else CSV if looks_csv else TEXT
            kind = _TRACE if trace or problem else found
        sha256 = file_sha256(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    return _Input(path, kind, sha256, FileReport(path=str(path), format=kind), trace, problem)


def _has_output(path: Path) -> bool:
    """Whether a text file of a directory is a benchmark's output or NCCL's log."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return any("NCCL INFO" in line or looks_like_row(line) for line in file)


def _import_one(
    item: _Input,
    options: ImportOptions,
    columns_of: Callable[[str], dict[str, Any]],
    out_dir: Path,
) -> None:
    """Write what a file tells that is read by itself; raises DataError where it is nothing."""
    if item.problem is not None:
        raise item.problem
    if item.format in _JOINED:
        return
    report = item.report
    if item.format == CSV:
        tables = _read_csv(item.path, columns_of, options, report)
    else:
        base = {
            **columns_of(options.system or ""),
            "sweep": options.sweep or slug(item.path.resolve().parent.name),
            "run": f"{slug(item.path.stem)[:80]}-{item.sha256[:8]}",
            "source_file": str(item.path),
        }
        tables = read_file(item.path, base, options, report)
    before = set(part_paths(out_dir)) if out_dir.is_dir() else set()
    wrong = 0
    for kind, table in tables:
        parts = write_part(out_dir, table, kind=kind, provenance=_record([item]))
        report.parts += [str(part) for part in parts]
        if kind == "measurements":
            report.measurements_written += table.num_rows
            wrong += pc.sum(pc.equal(table["status"], Status.WRONG_VALUES.value)).as_py()
            there = before.intersection(parts)
            report.already_there += sum(pq.read_metadata(part).num_rows for part in there)
    if wrong:
        report.remark(f"{wrong} measurements had wrong values: kept as such, and nothing uses them")
    if not report.parts:
        reasons = [*report.dropped, *report.rejected[:1], *report.remarks]
        raise OutputError(f"{item.path} holds no usable row: {'; '.join(map(str, reasons))}")
    _LOG.info("%s: %d measurements", item.path, report.measurements_written)


def _record(items: Sequence[_Input]) -> dict[str, Any]:
    # No command line and no host: importing files again writes the same parts, not others.
    return program_record("import", files={item.path.name: item.sha256 for item in items})


def _import_jobs(
    items: Sequence[_Input],
    options: ImportOptions,
    columns_of: Callable[[str], dict[str, Any]],
    out_dir: Path,
    summary: ImportSummary,
    errors: list[DataError],
) -> None:
    """Write the calls and steps of the recorder's files, and of the traces, of all ranks."""
    version = options.nccl_version
    base = {
        **columns_of(options.system or ""),
        "sweep": options.sweep or slug(items[0].path.resolve().parent.name),
        **({"gpu": options.gpu} if options.gpu else {}),
        **({"nccl_version": str(NcclVersion.parse(version))} if version else {}),
    }

    def write(kind: str, table: pa.Table) -> None:
        if kind == "calls":
            summary.calls_written += table.num_rows
            summary.calls_timed += table.num_rows - table["time_us"].null_count
        if table.num_rows:
            write_part(out_dir, table, kind=kind, provenance=_record(items))

    if files := [(item.path, item.report) for item in items if item.format == _CALLS]:
        write("calls", read_calls(files, base, errors))
    if found := [item.trace for item in items if item.trace]:
        group = {"num_ranks": options.num_ranks, "num_nodes": options.num_nodes}
        traces = read_files(found, {**base, "run": base["sweep"], **group})
        write("calls", traces.calls)
        write("steps", traces.steps)
        summary.files += traces.reports
        summary.rank_records, summary.steps_written = traces.records, traces.steps.num_rows
        summary.untimed = dict(traces.untimed.most_common())
        errors += traces.errors


# --- CSV sweeps: one measurement a row, one column a fact, as published sweeps are tidied ---
#
# Decisions that the columns leave open:
# * A channel count in a default row was read back, unless its note says `requested`: then it was
#   forced and algorithm and protocol were left to NCCL, which is a requested config of its own and
#   not NCCL's default (the definition in the schema: nothing was requested).
# * `channels = upper limit` in a note is a limit of the launch profile, not a requested count.
# * A mode other than `isolated` is what ran beside the collective; how strong it was is not known.
# * Time is computed from the bus bandwidth where only that is given (`time_derived`). A bandwidth
#   that is printed as 0 has no time, and stays a row without one.


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
    busbw_gbytes_per_s: Annotated[float | None, Field(ge=0.0, allow_inf_nan=False)] = None
    is_default: bool | None = None
    note: str = ""


#: Every column, in the usual order.
CSV_COLUMNS: Final = tuple(_Record.model_fields)
#: One of these is needed, too.
_CSV_TIMES: Final = ("time_us", "busbw_gbytes_per_s")
_NUMBERS: Final = ("num_nodes", "ranks_per_node", "num_channels", "size_bytes", "repeat")
_CSV_TYPES: Final[Mapping[str, Any]] = {
    "source_line": pl.Int64,
    **dict.fromkeys(CSV_COLUMNS, pl.String),
    **dict.fromkeys(_NUMBERS, pl.Int64),
    **dict.fromkeys(_CSV_TIMES, pl.Float64),
    **dict.fromkeys(("in_place", "is_default"), pl.Boolean),
}
#: What makes two rows one measurement printed twice.
_CSV_KEY: Final = tuple(
    name for name in CSV_COLUMNS if name not in {"source", "statistic", *_CSV_TIMES, "note"}
)
_CSV_NAME: Final = re.compile(r"[A-Za-z_][\w ()/.%-]{0,40}")
#: What a note says about an attempt without a result; the first that matches.
_OUTCOMES: Final = (
    (r"(?i)\bhang|\bhung|timeout|timed out", Status.TIMED_OUT),
    (r"(?i)\bcrash", Status.FAILED),
    (r"(?i)\binvalid|infeasible", Status.INFEASIBLE),
)


def is_csv(first_line: str) -> bool:
    """Whether a line is the header of a CSV file, supported or not.

    >>> is_csv("size,collective,us"), is_csv("n1:7:7 [0] NCCL INFO Using a, b, c")
    (True, False)
    """
    names = [name.strip().strip('"') for name in first_line.split(",")]
    return len(names) >= 3 and all(map(_CSV_NAME.fullmatch, names))


def _read_csv(
    path: Path,
    columns_of: Callable[[str], Mapping[str, Any]],
    options: ImportOptions,
    report: FileReport,
) -> Iterator[Part]:
    """Yield the measurements of one CSV file; refused rows go to `report` with their line.

    `columns_of` gives the columns of a system, by its name in the file. Raises OutputError when a
    column is missing or unknown, and where the file is no CSV.
    """
    rows = pl.concat(_csv_records(path, options, report))
    is_again = pl.int_range(pl.len()).over(_CSV_KEY)
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


def _csv_records(path: Path, options: ImportOptions, report: FileReport) -> Iterator[pl.DataFrame]:
    """The values of all records, and the line that each ends on; wrong ones are rejected."""
    records: list[dict[str, Any]] = []
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        try:
            names = [name.strip() for name in next(reader, [])]
            _check_names(path, names, options)
            known = {
                "system": options.system,
                "gpu": options.gpu,
                "nccl_version": options.nccl_version,
                "num_nodes": options.num_nodes,
                "ranks_per_node": ranks_per_node(options.num_ranks, options.num_nodes),
            }
            # What the caller knows is for cells that are empty.
            known = {name: value for name, value in known.items() if value is not None}
            for cells in filter(None, reader):
                report.rows_read += 1
                try:
                    record = _csv_record(names, cells, known)
                except ValueError as error:
                    why = first_problem(error) if isinstance(error, ValidationError) else str(error)
                    report.reject(reader.line_num, why, ",".join(cells))
                    continue
                records.append({"source_line": reader.line_num, **record.__dict__})
                if len(records) == CHUNK_ROWS:
                    yield pl.DataFrame(records, schema=_CSV_TYPES)
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
    yield pl.DataFrame(records, schema=_CSV_TYPES)


def _csv_record(names: Sequence[str], cells: Sequence[str], known: Mapping[str, Any]) -> _Record:
    """A record's values; raises ValueError."""
    if len(cells) != len(names):
        raise ValueError(f"{len(cells)} cells where the header names {len(names)} columns")
    texts = {name: cell.strip() for name, cell in zip(names, cells, strict=True)}
    return _Record.model_validate({**known, **{name: text for name, text in texts.items() if text}})


def _check_names(path: Path, names: Sequence[str], options: ImportOptions) -> None:
    missing = [name for name in ("size_bytes", "collective") if name not in names]
    if options.system is None and "system" not in names:
        missing.append("system (or --system)")
    if not set(_CSV_TIMES) & set(names):
        missing.append(" or ".join(_CSV_TIMES))
    odd = [name for name in names if name not in CSV_COLUMNS or names.count(name) > 1]
    if missing or odd:
        what = [f"no column {', '.join(missing)}"] if missing else []
        what += [f"unknown or repeated column {', '.join(odd)}"] if odd else []
        raise OutputError(
            f"{path}:1: {'; '.join(what)}; it has {', '.join(names)}, and a sweep may have "
            f"{', '.join(CSV_COLUMNS)}: add, rename or remove what is wrong"
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


# --- The command ---


def import_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE_OR_DIR...",
            help="Logs, JSON, CSV, calls files, traces; or directories of them.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Data directory to add to.")],
    system: Annotated[str | None, typer.Option(help="Name of the system measured.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Name of this import.")] = None,
    systems: Annotated[
        Path | None, typer.Option(help="TOML with topology facts of the systems.")
    ] = None,
    collective: Annotated[
        str | None, typer.Option(help="The collective, where no line of the output names it.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks, where unknown.", min=1)] = None,
    nodes: Annotated[int | None, typer.Option(help="NCCL's nNodes, where unknown.", min=1)] = None,
    nccl_version: Annotated[str | None, typer.Option(help="NCCL release, where unknown.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU model, where unknown.")] = None,
    launch_profile: Annotated[
        str | None, typer.Option(help="Name of the launch-time settings, where unknown.")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="Requested algorithm, if hidden.")] = None,
    protocol: Annotated[str | None, typer.Option(help="Requested protocol, if hidden.")] = None,
    channels: Annotated[
        int | None, typer.Option(help="Requested channel count, if hidden.", min=1)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON document to stdout.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")] = False,
) -> None:
    """Read nccl-tests outputs (text, -J JSON), CSV sweeps, what the plugin recorded, and traces.

    A directory stands for all such files below it; what is none of them is named and left alone. A
    CSV needs size_bytes, collective, and time_us or busbw_gbytes_per_s (docs/collect.md).

    Traces are those of PyTorch's profiler and dumps of NCCL's Inspector (.json, .json.gz).
    What is what, the content tells.

    The calls files (.dcc) or traces of all ranks of a job belong into one import: the time of a
    call is known only with all its ranks.

    Example: dynamiccl-collect import all_reduce.log --out out/data --system mycluster
    Example: dynamiccl-collect import rank*.json.gz --out out/data --system mycluster
    """
    cli.configure_logging(verbose=verbose)
    options = ImportOptions(
        system=system,
        sweep=sweep,
        collective=collective,
        num_ranks=ranks,
        num_nodes=nodes,
        nccl_version=nccl_version,
        gpu=gpu,
        launch_profile=launch_profile,
        algorithm=algorithm,
        protocol=protocol,
        num_channels=channels,
        systems_file=systems,
    )
    kept = f"what was read so far is in {out}; the same command goes on, and takes nothing twice"
    with cli.interruptible(lambda: kept):
        summary = import_files(files, out, options=options)
    if as_json:
        cli.print_json(summary.to_json())
    else:
        _show(summary, out)


def _show(summary: ImportSummary, out: Path) -> None:
    lines = [f"{line.path}:{line.line}: {line.reason}" for line in summary.rejected]
    of_remark: dict[str, list[str]] = {}
    for file in summary.files:
        for remark in file.remarks:
            of_remark.setdefault(remark, []).append(file.path)
    for remark, paths in of_remark.items():
        others = f" (and {len(paths) - 1} more files)" if len(paths) > 1 else ""
        lines.append(f"{paths[0]}{others}: {remark}")
    lines[_SHOWN:] = [f"... and {len(lines) - _SHOWN} more (with --json)"][: len(lines) > _SHOWN]
    lines += [f"{path}: left alone, {what}" for path, what in summary.skipped.items()]
    lines += [f"{count} calls without a time: {why}" for why, count in summary.untimed.items()]
    for line in lines:
        _stderr.print(line, markup=False, soft_wrap=True, highlight=False)
    there = f"; {summary.already_there} were there already" if summary.already_there else ""
    _stdout.print(
        f"{summary.rows_read} rows read, {summary.written_text} written{there}, "
        f"{summary.dropped} dropped, {summary.duplicates} duplicates, "
        f"{summary.num_rejected} rejected -> {out}",
        soft_wrap=True,
        highlight=False,
    )
