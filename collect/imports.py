"""`dynamiccl-collect import`: other people's measurements into the Parquet store.

A file is recognised by what it holds (`_READERS`) and read into tables. It becomes parts of its
own, which depend on nothing but the file, the options and this program: a file imported twice by
one release is there once, and a bad file among good ones costs nothing but itself. Calls files and
traces are the exception: those of all ranks are joined, so all that are named together make parts
together.

Nothing is lost silently: a row that was read is written, dropped with a reason, counted as a
duplicate, or rejected with its file, line and text.

What benchmark output does not print of its system stands in a TOML file, by columns of the schema:

    [systems."b300-nvlink"]
    name = "b300"                  # optional: rename the system
    compute_capability = 10.3
    nvlink_generation = 5
    nvswitch = true
    nic_kind = "none"
"""

import dataclasses
import logging
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from dynamiccl import cli
from dynamiccl.collect.calls import MAGIC, SUFFIX, read_calls
from dynamiccl.collect.nccl_tests import (
    ImportOptions,
    first_problem,
    read_file,
)
from dynamiccl.collect.output import FileReport, Rejected, looks_like_row
from dynamiccl.collect.tidy_csv import is_tidy_csv, read_tidy_csv
from dynamiccl.collect.traces import TraceFile, read_files, trace_file
from dynamiccl.datasets.provenance import file_sha256, program_record
from dynamiccl.datasets.schema import Source, Status
from dynamiccl.datasets.store import check_slug, part_paths, slug, write_part
from dynamiccl.errors import DataError, MissingPath, OutputError, UserError
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol

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


class _System(BaseModel):
    """Facts of one system; None = unknown. Names and units are those of the schema's columns."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    #: New hive directory, where the one in the data is unwieldy.
    name: str | None = None
    compute_capability: float | None = Field(default=None, ge=3.0, le=100.0)
    nvlink_generation: int | None = Field(default=None, ge=0, le=100)
    nvlinks_per_gpu: int | None = Field(default=None, ge=0, le=1000)
    nvswitch: bool | None = None
    nic_kind: Literal["infiniband", "roce", "efa", "socket", "none"] | None = None
    nic_gbits_per_s: float | None = Field(default=None, ge=0.0)
    nics_per_node: int | None = Field(default=None, ge=0)
    cpu_vendor: Literal["intel", "amd", "arm"] | None = None


class _Systems(BaseModel):
    model_config = ConfigDict(extra="forbid")

    systems: dict[str, _System] = {}


def load_systems(path: Path | None) -> Callable[[str], dict[str, Any]]:
    """Read a systems file; returns what gives the columns of a system, a new name among them.

    Raises MissingPath, and UserError with table, key, value and choices.
    """
    if path is None:
        return lambda system: {"system": system}
    if not path.is_file():
        raise MissingPath("systems file", path, "write one with a [systems.NAME] table")
    try:
        tables = _Systems.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).systems
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}; correct that line") from error
    except ValidationError as error:
        keys = ", ".join(_System.model_fields)
        raise UserError(
            f"{path}: {first_problem(error)}; write tables [systems.NAME] with any of {keys}"
        ) from error
    known = {name: table.model_dump(exclude_none=True) for name, table in tables.items()}
    for name, facts in known.items():
        facts["system"] = check_slug(facts.pop("name", name), "system")
    return lambda system: {"system": system, **known.get(system, {})}


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
        found = (
            f"{len(summary.skipped)} files of other kinds" if summary.skipped else "no file at all"
        )
        raise UserError(
            f"{', '.join(map(str, paths)) or 'no file to import'}: {found}, and no nccl-tests "
            "output, CSV, calls file or trace; name files, or the directory that holds them"
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
            is_csv = is_tidy_csv(text.split("\n", 1)[0])
            found = JSON if text.startswith("{") else CSV if is_csv else TEXT
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
        tables = read_tidy_csv(item.path, columns_of, options, report)
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
