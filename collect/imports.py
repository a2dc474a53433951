"""`dynamiccl-collect import`: other people's measurements into the Parquet store.

A file is recognised by what it holds (`_kind`). It becomes parts of its own, which depend on
nothing but the file, the options and this program: a file imported twice by one release is there
once, and a bad file among good ones costs nothing but itself. Calls files and traces of all ranks
are joined, so all that are named together make parts together.

Nothing is lost silently: a row that was read is written, dropped with a reason, counted as a
duplicate, or rejected with its file, line and text.
"""

import csv
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer
from pydantic import BeforeValidator, Field, ValidationError

from dynamiccl import cli
from dynamiccl.collect.calls import MAGIC, SUFFIX, read_calls
from dynamiccl.collect.nccl_tests import (
    CHUNK_ROWS,
    CollectiveName,
    Count,
    ImportOptions,
    Known,
    Part,
    ranks_per_node,
    read_file,
)
from dynamiccl.collect.output import MEANT_AS_ROW, FileReport, Rejected, Row
from dynamiccl.collect.traces import read_traces, trace_source
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.datasets.provenance import file_sha256, program_record
from dynamiccl.datasets.rows import measurements_table, scope_of, trial_id
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET, Source, Statistic, Status
from dynamiccl.datasets.store import part_paths, slug, write_part
from dynamiccl.errors import DataError, MissingPath, OutputError, UnknownName, UserError
from dynamiccl.nccl import Collective
from dynamiccl.simulator.toml_table import first_problem
from dynamiccl.sizes import MAX_SIZE_BITS

__all__ = ["ImportOptions", "ImportSummary", "import_files"]

TEXT: Final = Source.NCCL_TESTS_TEXT.value
JSON: Final = Source.NCCL_TESTS_JSON.value
CSV: Final = Source.TIDY_CSV.value
#: Kinds of which all files are read together; traces have the name of their source.
_CALLS: Final = "calls"
_TRACES: Final = (CallSource.KINETO.value, CallSource.INSPECTOR.value)
_SNIFF_BYTES: Final = 65_536
#: Lines of each kind that people are shown; all are in --json.
_SHOWN: Final = 20
#: Totals that are sums over the files.
_SUMS: Final = ("rows_read", "measurements_written", "duplicates", "num_rejected", "already_there")


@dataclass(slots=True)
class ImportSummary:
    """What became of every row: totals, each file's report, and what many files make together."""

    files: list[FileReport] = field(default_factory=list)
    #: Files of directories that are not read -> what they are.
    skipped: dict[str, str] = field(default_factory=dict)
    #: Why files gave nothing.
    errors: list[DataError] = field(default_factory=list)
    rows_read: int = 0
    measurements_written: int = 0
    dropped: int = 0
    duplicates: int = 0
    num_rejected: int = 0
    #: The first rejected lines of each file.
    rejected: list[Rejected] = field(default_factory=list)
    #: Measurements of those written that an earlier import had written, too.
    already_there: int = 0
    #: Calls of jobs, one for all ranks, and those of them whose time is known from all ranks.
    calls_written: int = 0
    calls_timed: int = 0
    #: Of traces: records of single ranks that calls were joined of, and steps.
    rank_records: int = 0
    steps_written: int = 0
    #: Why calls of traces have no time -> calls.
    untimed: dict[str, int] = field(default_factory=dict)

    def add_up(self) -> None:
        """Count the rows of all files; joined calls belong to no single file."""
        for name in _SUMS:
            setattr(self, name, sum(getattr(report, name) for report in self.files))
        self.dropped = sum(sum(report.dropped.values()) for report in self.files)
        self.rejected = [line for report in self.files for line in report.rejected]

    @property
    def written(self) -> str:
        """What was written, in words."""
        joined = f" from {self.rank_records} records of ranks" if self.rank_records else ""
        calls = f"calls{joined} ({self.calls_timed} with a time)"
        costs = sum(report.costs for report in self.files)
        counts = {calls: self.calls_written, "steps": self.steps_written, "of NCCL's costs": costs}
        others = [f", {number} {what}" for what, number in counts.items() if number]
        return f"{self.measurements_written} measurements{''.join(others)} written"

    def to_json(self) -> dict[str, Any]:
        """The summary as plain values for `json.dumps`; rejected lines appear once."""
        found = dataclasses.asdict(self)
        for report in found["files"]:
            report["rejected"] = report.pop("num_rejected")
        return {**found, "rejected": [line._asdict() for line in self.rejected]}


def import_files(
    paths: Sequence[Path], out_dir: Path, *, options: ImportOptions | None = None
) -> ImportSummary:
    """Import `paths` into `out_dir`, and report what became of every row.

    A directory stands for the files of known kinds below it. Raises UserError where it is not known
    of which system a file is, and OutputError, which names the files, after all are written when
    some gave no row. A single file raises its own error, which may be a CorruptFile.
    """
    options, summary = options or ImportOptions(), ImportSummary()
    reports, hashes = _recognised(paths, summary)
    _check(paths, reports, options)
    seen = set(part_paths(out_dir)) if out_dir.is_dir() else set()
    fresh = [report for report in reports if report.format and not report.remarks]
    jobs = [report for report in fresh if report.format in {_CALLS, *_TRACES}]
    for report in fresh:
        try:
            if report.format not in {_CALLS, *_TRACES}:
                _write_file(report, hashes, options, out_dir, seen)
        except DataError as error:
            report.failure = str(error)
            summary.errors.append(error)
    # A trace that is read has a report of its own.
    summary.files += [each for each in reports if each.format not in _TRACES or each.remarks]
    if jobs:
        _write_jobs(jobs, hashes, options, out_dir, summary)
    summary.add_up()
    if errors := summary.errors:
        told = "; ".join([*map(str, errors), f"of the others {summary.written}"])
        raise errors[0] if len(reports) == 1 else OutputError(told)
    return summary


def _recognised(
    paths: Sequence[Path], summary: ImportSummary
) -> tuple[list[FileReport], dict[str, str]]:
    """A report for each file to read, without a format for one that cannot be; SHA-256 by path.

    One whose bytes are those of another has a remark. What directories hold beside is skipped.
    """
    reports: list[FileReport] = []
    first: dict[str, Path] = {}
    hashes: dict[str, str] = {}
    for path in paths:
        below = sorted(each for each in path.rglob("*") if each.is_file())
        for file in below if path.is_dir() else [path]:
            report = FileReport(str(file), "")
            try:
                report.format = _kind(file, is_named=file == path)
                hashes[report.path] = file_sha256(file)
                same = first.setdefault(hashes[report.path], file)
                if same is not file:
                    report.remark(f"the same bytes as {same}; not taken twice")
            except DataError as error:
                if isinstance(error, OutputError) and file != path:
                    summary.skipped[str(file)] = str(error).removeprefix(f"{file} is ")
                    continue
                report.failure = str(error)
                summary.errors.append(error)
            reports.append(report)
    return reports, hashes


def _kind(path: Path, *, is_named: bool) -> str:
    """What a file holds, by its beginning; text that is not named must have a row, or NCCL's log.

    Raises MissingPath, OutputError for what is not read, and CorruptFile.
    """
    if not path.is_file():
        raise MissingPath("file to import", path, "check the name")
    with path.open("rb") as file:
        head = file.read(_SNIFF_BYTES)
    # By its name too: text would be refused for reasons that do not help.
    if head.startswith(MAGIC) or path.suffix == SUFFIX:
        return _CALLS
    if trace := trace_source(path):
        return trace.value
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if text.startswith("{"):
        return JSON
    if path.suffix == ".csv" or "size_bytes" in text.split("\n", 1)[0]:
        return CSV
    with path.open(encoding="utf-8", errors="replace") as lines:
        if is_named or any("NCCL INFO" in line or MEANT_AS_ROW.search(line) for line in lines):
            return TEXT
    raise OutputError(f"{path} is no kind that is known")


def _check(paths: Sequence[Path], reports: Sequence[FileReport], options: ImportOptions) -> None:
    """Raise UserError where there is nothing to read, or it is not known of which system it is."""
    if not reports:
        named = ", ".join(map(str, paths)) or "no file to import"
        raise UserError(
            f"{named}: no nccl-tests output, CSV, calls file or trace; name other files"
        )
    unknown = [report.path for report in reports if report.format not in {"", CSV}]
    if options.system is None and unknown:
        raise UserError(
            f"{unknown[0]} does not say on which system it was measured; name it with --system"
        )


def _write_file(
    report: FileReport,
    hashes: Mapping[str, str],
    options: ImportOptions,
    out_dir: Path,
    seen: set[Path],
) -> None:
    """Write what a file tells that is read by itself; raises DataError where that is nothing."""
    path = Path(report.path)
    if report.format == CSV:
        tables = _read_csv(path, options, report)
    else:
        run = f"{slug(path.stem)[:80]}-{hashes[report.path][:8]}"
        base = {**options.columns(path), "run": run, "source_file": str(path)}
        tables = read_file(path, base, options, report)
    wrong, provenance = 0, _provenance([report], hashes)
    for kind, table in tables:
        parts = write_part(out_dir, table, kind=kind, provenance=provenance)
        report.parts += map(str, parts)
        if kind == "measurements":
            report.measurements_written += table.num_rows
            wrong += pc.sum(pc.equal(table["status"], Status.WRONG_VALUES.value)).as_py()
            again = [pq.read_metadata(part).num_rows for part in parts if part in seen]
            report.already_there += sum(again)
    if wrong:
        report.remark(f"{wrong} measurements had wrong values: kept as such, and nothing uses them")
    if not report.parts:
        reasons = [*report.dropped, *report.rejected[:1], *report.remarks]
        raise OutputError(f"{path} holds no usable row: {'; '.join(map(str, reasons))}")


def _provenance(reports: Sequence[FileReport], hashes: Mapping[str, str]) -> dict[str, Any]:
    # No command line and no host: importing files again writes the same parts, not others.
    files = {Path(report.path).name: hashes[report.path] for report in reports}
    return program_record("import", files=files)


def _write_jobs(
    reports: Sequence[FileReport],
    hashes: Mapping[str, str],
    options: ImportOptions,
    out_dir: Path,
    summary: ImportSummary,
) -> None:
    """Write the calls and steps of the recorder's files, and of the traces, of all ranks."""
    known = options.model_dump(include={"gpu", "nccl_version"}, exclude_none=True)
    base = {**options.columns(Path(reports[0].path)), **known}
    shape = {"num_ranks": options.num_ranks, "num_nodes": options.num_nodes}
    recorded = [(Path(each.path), each) for each in reports if each.format == _CALLS]
    tables = [("calls", read_calls(recorded, base, summary.errors))]
    if others := [Path(each.path) for each in reports if each.format != _CALLS]:
        traces = read_traces(others, **{**base, **shape})
        tables += [("calls", traces.calls), ("steps", traces.steps)]
        summary.files += traces.reports
        summary.errors += traces.errors
        summary.rank_records = pc.sum(traces.calls["ranks_seen"]).as_py() or 0
        summary.steps_written = traces.steps.num_rows
        summary.untimed = dict(traces.untimed.most_common())
    provenance = _provenance(reports, hashes)
    for kind, table in tables:
        if table.num_rows:
            write_part(out_dir, table, kind=kind, provenance=provenance)
        if kind == "calls":
            summary.calls_written += table.num_rows
            summary.calls_timed += table.num_rows - table["time_us"].null_count


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


_of_runs: Final = partial(re.sub, r"mean_of_\d+_runs", Statistic.MEAN_OF_RUNS.value)


class _Record(Known):
    """The cells of one record; an empty one, or one of a column that is not there, is the default.

    The defaults are one quiet run in the untouched environment.
    """

    source: str | None = None
    system: str
    ranks_per_node: Count | None = None
    collective: CollectiveName
    size_bytes: int = Field(ge=0, lt=1 << MAX_SIZE_BITS)
    mode: str = "isolated"
    launch_profile: str = DEFAULT_PROFILE
    in_place: bool | None = None
    run: str = "csv"
    repeat: int | None = Field(default=None, ge=0, lt=1 << 31)
    statistic: Annotated[Statistic, BeforeValidator(_of_runs)] = Statistic.MEAN
    time_us: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    busbw_gbytes_per_s: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    is_default: bool | None = None
    note: str = ""


#: Every column that there may be.
CSV_COLUMNS: Final = tuple(_Record.model_fields)
#: One of these is needed, too.
_CSV_TIMES: Final = ("time_us", "busbw_gbytes_per_s")
#: What the caller may know of all rows.
_CSV_KNOWN: Final = {"system", "gpu", "num_nodes", "nccl_version", "launch_profile"}
#: What is no column of the schema, or another.
_CSV_OTHER: Final = {"system", "algorithm", "protocol", "num_channels", "mode", "repeat", "note"}
#: How a note says that an attempt ended by its time limit.
_HANG: Final = re.compile(r"(?i)\bhang|\bhung|timeout|timed out")


def _read_csv(path: Path, options: ImportOptions, report: FileReport) -> Iterator[Part]:
    """Yield the measurements of one CSV file; refused rows go to `report` with their line.

    Raises OutputError when a column is missing or unknown, and where the file is no CSV.
    """
    rows: list[Row] = []
    repeats: defaultdict[tuple[Any, ...], set[int]] = defaultdict(set)
    for line, record in _records(options, report):
        row = {**options.columns(path, record.system), **_measurement(record)}
        row |= {"source_file": str(path), "source_line": line, "trial": trial_id(row)}
        config = (record.algorithm, record.protocol, record.num_channels)
        known = repeats[row["trial"], record.system, record.run, *config]
        if not record.size_bytes:
            report.drop("size 0")
        elif record.repeat in known:
            report.duplicates += 1
        else:
            free = (number for number in count(len(known)) if number not in known)
            row["repeat"] = next(free) if record.repeat is None else record.repeat
            known.add(row["repeat"])
            rows.append(row)
        if row["status"] == Status.OK.value and row["time_us"] is None:
            report.remark("rows with a bandwidth of 0 or an unknown number of ranks keep no time")
        if len(rows) == CHUNK_ROWS:
            yield "measurements", measurements_table(rows)
            rows = []
    if rows:
        yield "measurements", measurements_table(rows)


def _records(options: ImportOptions, report: FileReport) -> Iterator[tuple[int, _Record]]:
    """All records, and the line that each ends on; wrong ones are rejected."""
    # What the caller knows is for cells that are empty.
    known = {
        "ranks_per_node": ranks_per_node(options.num_ranks, options.num_nodes),
        **options.model_dump(include=_CSV_KNOWN, exclude_none=True),
    }
    with Path(report.path).open(encoding="utf-8-sig", errors="replace", newline="") as file:
        # Not polars: it fills a row that is cut short with nulls, and knows no lines.
        reader = csv.reader(file)
        try:
            names = [name.strip() for name in next(reader, [])]
            _check_names(names, options, report)
            for cells in filter(None, reader):
                report.rows_read += 1
                try:
                    record = _record(names, cells, known)
                except (ValueError, UnknownName) as error:
                    why = first_problem(error) if isinstance(error, ValidationError) else str(error)
                    report.reject(reader.line_num, why, ",".join(cells))
                    continue
                yield reader.line_num, record
        except csv.Error as error:
            line = reader.line_num
            raise OutputError(
                f"{report.path}:{line}: no CSV: {error}; correct that line"
            ) from error


def _record(names: Sequence[str], cells: Sequence[str], known: Mapping[str, Any]) -> _Record:
    if len(cells) != len(names):
        raise ValueError(f"{len(cells)} cells where the header names {len(names)} columns")
    texts = {name: text for name, cell in zip(names, cells, strict=True) if (text := cell.strip())}
    return _Record.model_validate({**known, **texts})


def _check_names(names: Sequence[str], options: ImportOptions, report: FileReport) -> None:
    """Refuse columns that are missing or unknown; say what is assumed in place of others."""
    needed = (("size_bytes",), ("collective",), ("system", "--system"), _CSV_TIMES)
    there = {*names, "--system" if options.system else None}
    missing = [" or ".join(each) for each in needed if there.isdisjoint(each)]
    odd = [name for name in names if name not in CSV_COLUMNS or names.count(name) > 1]
    if missing or odd:
        raise OutputError(
            f"{report.path}:1: no column {', '.join(missing) or '-'}; unknown or repeated column "
            f"{', '.join(odd) or '-'}; it has {', '.join(names)}, and a sweep may have "
            f"{', '.join(CSV_COLUMNS)}: add, rename or remove what is wrong"
        )
    lacking = [n for n in ("mode", "launch_profile", "run", "statistic") if n not in names]
    taken = [f"{name} '{_Record.model_fields[name].default}'" for name in lacking]
    if not {"is_default", "algorithm", "protocol"} & set(names):
        taken.append("NCCL's own choice")
    if taken:
        report.remark(f"no column says otherwise, so all rows are taken as {', '.join(taken)}")


def _measurement(record: _Record) -> Row:
    """The columns of a record; see the decisions on top."""
    nodes, per_node = record.num_nodes, record.ranks_per_node
    num_ranks = nodes * per_node if nodes and per_node else None
    is_quiet = record.mode == "isolated"
    return {
        **record.model_dump(exclude=_CSV_OTHER),
        "source": CSV,
        "system_description": record.system,
        "num_ranks": num_ranks,
        "default_scope": scope_of(record.launch_profile),
        "interference_kind": QUIET if is_quiet else record.mode,
        "interference_level": 0.0 if is_quiet else None,
        "reason": record.note or None,
        **_config(record),
        **_figures(record, num_ranks),
    }


def _config(record: _Record) -> Row:
    """The requested and the actual config."""
    note, channels = record.note.lower(), record.num_channels
    names = {"algorithm": record.algorithm, "protocol": record.protocol}
    is_auto = channels is None and not any(names.values())
    is_default = is_auto if record.is_default is None else record.is_default
    is_limit = "upper limit" in note
    is_said = "channels" in note and "requested" in note
    is_forced = is_said if is_default else not (is_limit or "channels: read back" in note)
    asked, ran = ({}, names) if is_default else (names, {})
    return {
        "is_default": is_default and not (is_forced and channels),
        **{f"requested_{name}": asked.get(name) for name in names},
        **{f"actual_{name}": ran.get(name) for name in names},
        "requested_num_channels": channels if is_forced else None,
        "actual_num_channels": None if is_forced or is_limit else channels,
    }


def _figures(record: _Record, num_ranks: int | None) -> Row:
    """Time and bandwidth, one from the other, and what an attempt without both came to."""
    time_us, busbw, algbw = record.time_us, record.busbw_gbytes_per_s, None
    status, statistic = Status.OK, record.statistic
    if time_us is not None:
        algbw = record.size_bytes / (time_us * 1e3)
    elif busbw is None:
        status = Status.TIMED_OUT if _HANG.search(record.note) else Status.FAILED
        statistic = Statistic.NONE
    elif num_ranks and (factor := Collective[record.collective].bus_factor(num_ranks)):
        algbw = busbw / factor or None
        time_us = algbw and record.size_bytes / (algbw * 1e3)
    return {
        "status": status.value,
        "statistic": statistic.value,
        "time_us": time_us,
        "time_derived": record.time_us is None and algbw is not None,
        "algbw_gbytes_per_s": algbw,
    }


# --- The command ---


def import_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE_OR_DIR...")],
    out: Annotated[Path, typer.Option("--out", help="Data directory to add to.")],
    system: Annotated[str | None, typer.Option(help="Name of the system measured.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Name of this import.")] = None,
    systems_file: Annotated[Path | None, typer.Option("--systems", help="TOML of systems.")] = None,
    collective: Annotated[str | None, typer.Option(help="What was measured.")] = None,
    num_ranks: Annotated[int | None, typer.Option("--ranks", help="Of the job.", min=1)] = None,
    num_nodes: Annotated[int | None, typer.Option("--nodes", help="NCCL's nNodes.", min=1)] = None,
    nccl_version: Annotated[str | None, typer.Option(help="NCCL release.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU model.")] = None,
    launch_profile: Annotated[str | None, typer.Option(help="Name of launch settings.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="Forced algorithm.")] = None,
    protocol: Annotated[str | None, typer.Option(help="Forced protocol.")] = None,
    num_channels: Annotated[
        int | None, typer.Option("--channels", help="Forced number of channels.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON document.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")] = False,
) -> None:
    """Read nccl-tests outputs (text, -J JSON), CSV sweeps, what the plugin recorded, and traces.

    A directory stands for all such files below it; what is none of them is named and left alone. A
    CSV needs size_bytes, collective, and time_us or busbw_gbytes_per_s (docs/collect.md). Traces
    are those of PyTorch's profiler and dumps of NCCL's Inspector (.json, .json.gz). The calls files
    (.dcc) or traces of all ranks of a job belong into one import: the time of a call is known only
    with all its ranks. Options say what the files do not.

    Example: dynamiccl-collect import all_reduce.log --out out/data --system mycluster
    Example: dynamiccl-collect import rank*.json.gz --out out/data --system mycluster
    """
    # Each option but the last two is a field of the record.
    told = locals()
    cli.configure_logging(verbose=verbose)
    options = ImportOptions(**{name: told[name] for name in ImportOptions.model_fields})
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
        typer.echo(line, err=True)
    there = f"; {summary.already_there} were there already" if summary.already_there else ""
    typer.echo(
        f"{summary.rows_read} rows read, {summary.written}{there}, "
        f"{summary.dropped} dropped, {summary.duplicates} duplicates, "
        f"{summary.num_rejected} rejected -> {out}"
    )
