"""Import of files: nccl-tests output, CSV, calls files and traces, into the Parquet store.

Each file becomes parts of its own, which depend on nothing but the file, the options and this
program: a file imported twice by one release is there once, and a bad file among good ones costs
nothing but itself. Calls files and traces are the exception: those of all ranks are joined, so all
that are named together make parts together.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from dynamiccl.collect.calls.reader import MAGIC, SUFFIX
from dynamiccl.collect.calls.take_in import CallsFile, CallsTaken, take_in
from dynamiccl.collect.importing.systems import KnownSystems, load_systems
from dynamiccl.collect.importing.tidy_csv import csv_tables, is_tidy_csv
from dynamiccl.collect.nccl_tests.json_output import json_tables
from dynamiccl.collect.nccl_tests.layout import looks_like_row
from dynamiccl.collect.nccl_tests.text import main_of, text_file_tables
from dynamiccl.collect.reports import FileReport, ImportOptions, ImportSummary, Recorded
from dynamiccl.collect.traces import TraceFile, Traces, read_files, trace_files
from dynamiccl.datasets.provenance import file_sha256, program_record
from dynamiccl.datasets.schema import Status
from dynamiccl.datasets.store import SCHEMAS, check_slug, part_paths, slug, write_part
from dynamiccl.errors import DataError, MissingPath, OutputError, UserError
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol

__all__ = ["ImportFailed", "ImportOptions", "ImportSummary", "detect_format", "import_files"]

_LOG: Final = logging.getLogger(__name__)
_SNIFF_BYTES: Final = 65_536

TEXT: Final = "nccl-tests-text"
JSON: Final = "nccl-tests-json"
CSV: Final = "tidy-csv"
CALLS: Final = "calls"
TRACE: Final = "trace"


@dataclass(frozen=True, slots=True)
class _Input:
    path: Path
    format: str
    sha256: str
    #: Of a trace, or an archive of them, what is in it.
    traces: tuple[TraceFile, ...] = ()
    #: Why it cannot be read, where that is known from its beginning.
    problem: DataError | None = None


def import_files(
    paths: Sequence[Path],
    out_dir: Path,
    *,
    options: ImportOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ImportSummary:
    """Import `paths` into `out_dir`, and report what became of every row.

    A directory stands for the files of known kinds below it. `progress` is called with the files
    done and their total.
    Raises UserError before anything is read when the options cannot work, and OutputError, which
    names the files, after all are written when some gave no row. A single file raises its own
    error, which may be a CorruptFile.
    """
    options = options or ImportOptions()
    _check_options(options)
    systems = load_systems(options.systems_file)
    inputs, skipped = _inputs(paths)
    if not inputs:
        raise UserError(_no_file(paths, skipped))
    _need_system(inputs, options)
    reports = [FileReport(path=str(item.path), format=item.format) for item in inputs]
    fresh = list(_without_repeats(inputs, reports))
    errors = _import_each(fresh, out_dir, options, systems, progress)
    calls = [CallsFile(i.path, i.sha256, report) for i, report in fresh if i.format == CALLS]
    taken, failed = _import_calls(calls, out_dir, options, systems)
    errors += failed
    found = [item for item, _ in fresh if item.traces]
    reports = [r for i, r in zip(inputs, reports, strict=True) if not i.traces or r.remarks]
    recorded = Recorded(calls=taken.calls, calls_timed=taken.calls_timed)
    if found:
        traces = _import_traces(found, out_dir, options, systems, progress)
        errors += traces.errors
        reports += traces.reports
        recorded = Recorded(
            calls=taken.calls + traces.calls.num_rows,
            calls_timed=taken.calls_timed
            + traces.calls.num_rows
            - traces.calls["time_us"].null_count,
            rank_records=traces.records,
            steps=traces.steps.num_rows,
            untimed=dict(traces.untimed.most_common()),
        )
    if errors and len(inputs) == 1:
        raise errors[0]
    summary = ImportSummary.of(
        reports,
        recorded=recorded,
        skipped={str(path): reason for path, reason in skipped.items()},
    )
    if errors:
        raise ImportFailed(errors, summary)
    return summary


def _import_each(
    fresh: Sequence[tuple[_Input, FileReport]],
    out_dir: Path,
    options: ImportOptions,
    systems: KnownSystems,
    progress: Callable[[int, int], None] | None,
) -> list[DataError]:
    """Import the files that are not joined with others; returns their errors."""
    errors: list[DataError] = []
    for done, (item, report) in enumerate(fresh, 1):
        try:
            if item.problem is None and item.format not in {CALLS, TRACE}:
                _import_one(item, out_dir, options, systems, report)
        except DataError as error:
            report.failure = str(error)
            errors.append(error)
        if item.problem is not None:
            report.failure = str(item.problem)
            errors.append(item.problem)
        if progress is not None:
            progress(done, len(fresh))
    return errors


def _without_repeats(
    inputs: list[_Input], reports: list[FileReport]
) -> Iterator[tuple[_Input, FileReport]]:
    """Leave out files that are read together with another one, and note it in their report."""
    seen: dict[str, Path] = {}
    named = {item.path.resolve() for item in inputs}
    for item, report in zip(inputs, reports, strict=True):
        first = seen.setdefault(item.sha256, item.path)
        if first is not item.path:
            report.remark(f"the same bytes as {first}; not taken twice")
        elif main_of(item.path) in named:
            report.remark("NCCL's log of another file; read with that one")
        else:
            yield item, report


class ImportFailed(OutputError):
    """Raised when files gave no row; `summary` has what the others gave."""

    def __init__(self, errors: list[DataError], summary: ImportSummary) -> None:
        """Make a message with one line a failure, and what was written nevertheless."""
        written = sum(1 for report in summary.files if report.measurements_written)
        tail = (
            f"; {summary.measurements_written} measurements of {written} other files are written"
            if written
            else ""
        )
        if summary.recorded.calls:
            tail += f"; {summary.recorded.calls} calls are written"
        super().__init__("; ".join(map(str, errors)) + tail)
        self.summary = summary


def _check_options(options: ImportOptions) -> None:
    """Refuse names that do not parse, before any file is read."""
    checks: tuple[tuple[str, Callable[[Any], object]], ...] = (
        ("system", partial(check_slug, what="system")),
        ("sweep", partial(check_slug, what="sweep")),
        ("collective", partial(Collective.parse, where="option collective")),
        ("algorithm", partial(Algorithm.parse, where="option algorithm")),
        ("protocol", partial(Protocol.parse, where="option protocol")),
        ("nccl_version", NcclVersion.parse),
    )
    for name, check in checks:
        value = getattr(options, name)
        if value is not None:
            check(value)
    for name in ("num_ranks", "num_nodes", "num_channels"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"option {name} is {value}; give a whole number from 1 on")


def _inputs(paths: Sequence[Path]) -> tuple[list[_Input], dict[Path, str]]:
    """The files to read, and those of directories that are not, with the reason."""
    inputs: list[_Input] = []
    skipped: dict[Path, str] = {}
    for path in paths:
        if not path.is_dir():
            inputs.append(_input(path))
            continue
        for file in sorted(each for each in path.rglob("*") if each.is_file()):
            item = _input(file)
            if isinstance(item.problem, OutputError):
                skipped[file] = str(item.problem).removeprefix(f"{file} is ")
            elif item.format != TEXT or _has_output(file):
                inputs.append(item)
            else:
                skipped[file] = "no kind that is known"
    return inputs, skipped


def _has_output(path: Path) -> bool:
    """Whether a text file of a directory is a benchmark's output or NCCL's log."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return any("NCCL INFO" in x or looks_like_row(x.split(), in_table=False) for x in file)


def _no_file(paths: Sequence[Path], skipped: Mapping[Path, str]) -> str:
    if not paths:
        return "no file to import; name at least one"
    found = f"{len(skipped)} files of other kinds" if skipped else "no file at all"
    return (
        f"{', '.join(map(str, paths))}: {found}, and no nccl-tests output, CSV, calls file or "
        "trace; name the directory that holds them"
    )


def _input(path: Path) -> _Input:
    """Classify a file by its first bytes."""
    if not path.is_file():
        raise MissingPath("file to import", path, "check the name")
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFF_BYTES)
        # By its name too: text would be refused for reasons that do not help.
        if head.startswith(MAGIC) or path.suffix == SUFFIX:
            return _Input(path, CALLS, file_sha256(path))
        try:
            traces = tuple(trace_files(path))
        except DataError as error:
            return _Input(path, TRACE, file_sha256(path), problem=error)
        if traces:
            return _Input(path, TRACE, file_sha256(path), traces)
        text = head.decode("utf-8", errors="replace")
        return _Input(path, detect_format(text), file_sha256(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def detect_format(head: str) -> str:
    """The format of a file by its first bytes, never by its name.

    >>> detect_format('{"version":3,"args":[]}'), detect_format("# nThread 1 nGpus 8")
    ('nccl-tests-json', 'nccl-tests-text')
    """
    text = head.lstrip("\ufeff \t\r\n")
    if text.startswith("{"):
        return JSON
    return CSV if is_tidy_csv(text.split("\n", 1)[0]) else TEXT


def _need_system(inputs: list[_Input], options: ImportOptions) -> None:
    if options.system is not None:
        return
    for item in inputs:
        if item.format != CSV:
            raise UserError(
                f"{item.path} does not say on which system it was measured; name it with --system"
            )


def _import_one(
    item: _Input,
    out_dir: Path,
    options: ImportOptions,
    systems: KnownSystems,
    report: FileReport,
) -> None:
    # No command line and no host: importing a file again writes the same part, not a second one.
    record = program_record("import", files={item.path.name: item.sha256})
    before = set(part_paths(out_dir)) if out_dir.is_dir() else set()
    wrong = 0
    for table in _tables(item, options, systems, report):
        parts = write_part(out_dir, table, provenance=record)
        report.parts += [str(p) for p in parts]
        report.measurements_written += table.num_rows
        wrong += table["status"].to_pylist().count(Status.WRONG_VALUES.value)
        report.already_there += sum(
            pq.read_metadata(p).num_rows for p in before.intersection(parts)
        )
    if wrong:
        report.remark(f"{wrong} measurements had wrong values: kept as such, and nothing uses them")
    if not (report.measurements_written or report.costs or report.decisions):
        raise OutputError(_nothing_usable(report))
    for kind, rows in (("costs", report.costs), ("decisions", report.decisions)):
        if rows:
            told = pa.Table.from_pylist(rows, schema=SCHEMAS[kind])
            parts = write_part(out_dir, told, kind=kind, provenance=record)
            report.parts += [str(p) for p in parts]
    _LOG.info("%s: %d measurements", item.path, report.measurements_written)


def _import_calls(
    files: Sequence[CallsFile], out_dir: Path, options: ImportOptions, systems: KnownSystems
) -> tuple[CallsTaken, list[DataError]]:
    if not files:
        return CallsTaken(), []
    base: dict[str, Any] = {
        **systems.columns_of(options.system or ""),
        "sweep": options.sweep or slug(files[0].path.resolve().parent.name),
    }
    if options.gpu is not None:
        base["gpu"] = options.gpu
    if options.nccl_version is not None:
        base["nccl_version"] = str(NcclVersion.parse(options.nccl_version))
    return take_in(files, out_dir, base=base)


def _import_traces(
    inputs: Sequence[_Input],
    out_dir: Path,
    options: ImportOptions,
    systems: KnownSystems,
    progress: Callable[[int, int], None] | None,
) -> Traces:
    """Write the calls and steps of the traces; the same files give the same parts."""
    sweep = options.sweep or slug(inputs[0].path.resolve().parent.name)
    base: dict[str, Any] = {
        **systems.columns_of(options.system or ""),
        "sweep": sweep,
        "run": sweep,
        "num_ranks": options.num_ranks,
        "num_nodes": options.num_nodes,
    }
    if options.gpu is not None:
        base["gpu"] = options.gpu
    if options.nccl_version is not None:
        base["nccl_version"] = str(NcclVersion.parse(options.nccl_version))
    traces = read_files([trace for each in inputs for trace in each.traces], base, progress)
    hashes = {each.path.name: each.sha256 for each in inputs}
    for kind, table in (("calls", traces.calls), ("steps", traces.steps)):
        if table.num_rows:
            write_part(out_dir, table, kind=kind, provenance=program_record("import", files=hashes))
    return traces


def _nothing_usable(report: FileReport) -> str:
    if report.contradictions:
        return f"{report.path}: {report.contradictions[0]}; leave --collective out, or correct it"
    if "collective not known" in report.dropped:
        return (
            f"{report.path} does not say which collective it measured; name it with --collective "
            f"(one of {', '.join(c.wire for c in Collective)})"
        )
    if report.rejected:
        return f"{report.path} holds no usable row; {report.rejected[0]}"
    return f"{report.path} holds no usable row; dropped: {json.dumps(report.dropped)}"


def _tables(
    item: _Input, options: ImportOptions, systems: KnownSystems, report: FileReport
) -> Iterator[pa.Table]:
    if item.format == CSV:
        sweep = options.sweep or slug(item.path.stem)
        return csv_tables(item.path, sweep, options=options, systems=systems, report=report)
    base: dict[str, Any] = {
        **systems.columns_of(options.system or ""),
        "sweep": options.sweep or slug(item.path.resolve().parent.name),
        "run": f"{slug(item.path.stem)[:80]}-{item.sha256[:8]}",
        "source_file": str(item.path),
    }
    if item.format == JSON:
        return json_tables(item.path, base=base, options=options, report=report)
    return text_file_tables(item.path, base=base, options=options, report=report)
