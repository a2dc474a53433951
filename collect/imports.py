"""`dynamiccl-collect import`: other people's measurements into the Parquet store.

Parts depend on the file, the options and this release alone: a file imported twice is there once.
Calls files and traces that are named together are joined into parts together.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from dynamiccl import cli
from dynamiccl.collect.calls import MAGIC, SUFFIX, read_calls
from dynamiccl.collect.csv_files import CSV, CSV_SIGN, SOME_CSV, read_csv
from dynamiccl.collect.lines import opened, plain_lines
from dynamiccl.collect.nccl_tests import ImportOptions, Part, read_file
from dynamiccl.collect.output import MEANT_AS_ROW, FileReport, Rejected
from dynamiccl.collect.traces import BEGINNING, SIGNS, read_traces
from dynamiccl.datasets.schema import Source, Status
from dynamiccl.datasets.store import file_sha256, part_paths, program_record, slug, write_part
from dynamiccl.errors import DataError, MissingPath, OutputError, UserError

__all__ = ["ImportOptions", "ImportSummary", "import_files"]

_CALLS: Final = "calls"
_TEXT: Final = Source.NCCL_TESTS_TEXT.value


@dataclass(slots=True)
class ImportSummary:
    """What became of every row."""

    files: list[FileReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    calls_written: int = 0
    calls_timed: int = 0
    rank_records: int = 0
    steps_written: int = 0
    untimed: dict[str, int] = field(default_factory=dict)

    @property
    def errors(self) -> list[DataError]:
        """Why files gave nothing."""
        return [report.failure for report in self.files if report.failure]

    @property
    def sums(self) -> dict[str, int]:
        """Numbers of rows over all files; joined calls belong to no single file."""
        files = self.files
        return {
            "rows_read": sum(each.rows_read for each in files),
            "measurements_written": sum(each.measurements_written for each in files),
            "dropped": sum(sum(each.dropped.values()) for each in files),
            "duplicates": sum(each.duplicates for each in files),
            "num_rejected": sum(each.num_rejected for each in files),
            "already_there": sum(each.already_there for each in files),
        }

    @property
    def rejected(self) -> list[Rejected]:
        """The first rejected lines of each file."""
        return [line for report in self.files for line in report.rejected]

    @property
    def written(self) -> str:
        """What was written, in words."""
        joined = f" from {self.rank_records} records of ranks" if self.rank_records else ""
        calls = f"calls{joined} ({self.calls_timed} with a time)"
        costs = sum(report.costs for report in self.files)
        counts = {calls: self.calls_written, "steps": self.steps_written, "of NCCL's costs": costs}
        others = [f", {number} {what}" for what, number in counts.items() if number]
        measured = self.sums["measurements_written"]
        return f"{measured} measurements{''.join(others)} written"

    def to_json(self) -> dict[str, Any]:
        """The summary for `json.dumps`; rejected lines appear once."""
        found = dataclasses.asdict(self)
        for report in found["files"]:
            report["rejected"] = report.pop("num_rejected")
            report["failure"] = report["failure"] and str(report["failure"])
        return {**found, **self.sums, "rejected": [line._asdict() for line in self.rejected]}


def import_files(
    paths: Sequence[Path], out_dir: Path, *, options: ImportOptions | None = None
) -> ImportSummary:
    """Import `paths`, of directories the known files. Raises UserError for an unknown system.

    Files without a row raise once all others are written: OutputError, or a single file's error.
    """
    options = options or ImportOptions()
    summary = recognised(paths, options)
    reports = summary.files
    if not reports:
        given = ", ".join(map(str, paths)) or "no file to import"
        why = (
            "no nccl-tests output, CSV, calls file or trace; name other files. A job that records "
            f"its calls (DYNAMICCL_CALLS_DIR) leaves *{SUFFIX} files, and none is there: it loaded "
            "no NCCL, or not the plugin"
        )
        raise UserError(f"{given}: {why}")
    unknown = [report.path for report in reports if report.format not in {"", CSV}]
    if options.system is None and unknown:
        raise UserError(f"{unknown[0]} does not say on which system it is; name it with --system")
    seen = set(part_paths(out_dir)) if out_dir.is_dir() else set()
    to_read = [each for each in reports if each.format and not each.remarks]
    for report in to_read:
        try:
            _write_file(out_dir, options, report, seen)
        except DataError as error:
            report.failure = error
    _write_jobs(out_dir, options, summary, [e for e in to_read if _FORMATS[e.format][1] is None])
    if errors := summary.errors:
        told = "; ".join([*map(str, errors), f"of the others {summary.written}"])
        raise errors[0] if len(reports) == 1 else OutputError(told)
    return summary


def recognised(paths: Sequence[Path], told: ImportOptions) -> ImportSummary:
    """A report for each file (no format: unreadable; equal bytes: a remark), before any is read."""
    summary = ImportSummary()
    known = told.systems_file and told.systems_file.resolve()
    first: dict[str, Path] = {}
    for path in paths:
        below = sorted(each for each in path.rglob("*") if each.is_file())
        for file in [f for f in below if f.resolve() != known] if path.is_dir() else [path]:
            report = FileReport(str(file), "")
            try:
                report.format = _recognise(file, is_named=file == path)
                report.sha256 = file_sha256(file)
                same = first.setdefault(report.sha256, file)
                if same is not file:
                    report.remark(f"the same bytes as {same}; not taken twice")
            except DataError as error:
                if isinstance(error, OutputError) and file != path:
                    summary.skipped[str(file)] = str(error).removeprefix(f"{file} is ")
                    continue
                report.failure = error
            summary.files.append(report)
    return summary


_Reader = Callable[[Path, str, ImportOptions, FileReport], Iterator[Part]]
#: In the order tried: a pattern of the file's beginning, and a reader (None: files read together).
_FORMATS: Final[dict[str, tuple[str, _Reader | None]]] = {
    _CALLS: (rf"\A{MAGIC.decode()}", None),
    **{source.value: (sign, None) for source, sign in SIGNS.items()},
    Source.NCCL_TESTS_JSON.value: (r'\A\s*\{[^\0]*"(?:args|results)"\s*:', read_file),
    CSV: (CSV_SIGN, read_csv),
    _TEXT: (rf"NCCL INFO|{MEANT_AS_ROW.pattern}", read_file),
}
#: Patterns of other files -> why they are no measurements.
_NOT_READ: Final = {
    r'"(?:pg_status|collective_seq_id)"': "PyTorch's Flight Recorder: calls without times",
    r'"schema"\s*:\s*"[^"]*chakra|"in_msg_size"\s*:': "an execution trace: calls without times",
    r'"communicators_count"\s*:': "a report of NCCL's RAS: counts without a time",
    r"(?:Time|Duration|Avg) \(ns\)": "a table of Nsight Systems: kernels without sizes and ranks",
    r"\A\s*[{[]\s*[\"{[\]}]": "JSON of no kind that is read",
    r"\A\s*\Z": "empty",
}


def _recognise(path: Path, *, is_named: bool) -> str:
    """The format by the beginning of a file; text by any line. Raises DataError for others."""
    if not path.is_file():
        raise MissingPath("file to import", path, "check the name")
    if path.suffix == SUFFIX:
        return _CALLS
    with opened(path) as file:
        head = file.read(BEGINNING)
        plain = "\n".join(plain_lines(head.splitlines()))
        found = (name for name, (sign, _) in _FORMATS.items() if re.search(sign, plain))
        if name := next(found, None):
            return name
        if any(re.search(_FORMATS[_TEXT][0], line) for line in file):
            return _TEXT
    is_csv = re.search(r"\.[ct]sv\b", path.name) or (is_named and re.match(SOME_CSV, plain))
    is_text = sum(map(plain.count, "\0\ufffd")) <= len(plain) / 10
    other = ("" if is_text else "no text") if is_named or is_csv else "no kind that is known"
    if what := next((what for sign, what in _NOT_READ.items() if re.search(sign, plain)), other):
        others = "nccl-tests, a trace of PyTorch's profiler or a dump of NCCL's Inspector"
        raise OutputError(f"{path} is {what}; give an output of {others}")
    return CSV if is_csv else _TEXT


def _write_file(out: Path, options: ImportOptions, report: FileReport, seen: set[Path]) -> None:
    """Write what a file tells by itself; `seen` are earlier parts. Raises DataError for nothing."""
    path, read, wrong = Path(report.path), _FORMATS[report.format][1], 0
    if read is None:
        return
    run = f"{slug(path.stem)[:80]}-{report.sha256[:8]}"
    for kind, table in read(path, run, options, report):
        parts = _write(out, kind, table, [report])
        report.parts += map(str, parts)
        if kind == "measurements":
            report.measurements_written += table.num_rows
            wrong += pc.sum(pc.equal(table["status"], Status.WRONG_VALUES.value)).as_py()
            report.already_there += sum(pq.read_metadata(part).num_rows for part in seen & {*parts})
    if wrong:
        kept = "kept as such: no table holds that algorithm and protocol, no gate lets it pass"
        report.remark(f"{wrong} measurements had wrong values: {kept}")
    if not report.parts:
        reasons = [*report.dropped, *map(str, report.rejected[:1])] or ["it has none"]
        raise OutputError(f"{path} holds no usable row: {'; '.join(reasons)}")


def _write(out: Path, kind: str, table: pa.Table, reports: Sequence[FileReport]) -> list[Path]:
    # No command line and no host: importing again writes the same parts.
    files = {Path(report.path).name: report.sha256 for report in reports}
    return write_part(out, table, kind=kind, provenance=program_record("import", files=files))


def _write_jobs(
    out: Path, options: ImportOptions, summary: ImportSummary, reports: Sequence[FileReport]
) -> None:
    """Write the calls and steps of all ranks' calls files and traces."""
    if not reports:
        return
    known = options.model_dump(include={"gpu", "nccl_version"}, exclude_none=True)
    base = {**options.columns(Path(reports[0].path)), **known}
    recorded = [each for each in reports if each.format == _CALLS]
    tables = [("calls", read_calls(recorded, base))]
    if others := [each for each in reports if each.format != _CALLS]:
        base |= {"num_ranks": options.num_ranks, "num_nodes": options.num_nodes}
        traces = read_traces(others, **base)
        tables += [("calls", traces.calls), ("steps", traces.steps)]
        summary.rank_records = pc.sum(traces.calls["ranks_seen"]).as_py() or 0
        summary.steps_written = traces.steps.num_rows
        summary.untimed = dict(traces.untimed.most_common())
    for kind, table in tables:
        if table.num_rows:
            _write(out, kind, table, reports)
        if kind == "calls":
            summary.calls_written += table.num_rows
            summary.calls_timed += table.num_rows - table["time_us"].null_count


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
    algorithm: Annotated[str | None, typer.Option(help="Forced algorithm.")] = None,
    protocol: Annotated[str | None, typer.Option(help="Forced protocol.")] = None,
    num_channels: Annotated[int | None, typer.Option("--channels", help="Forced.", min=1)] = None,
    foreign_columns: Annotated[str | None, typer.Option("--columns", help="OURS=THEIRS,..")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON document.")] = False,
) -> None:
    """Read nccl-tests outputs (text, -J JSON), CSV sweeps, what the plugin recorded, and traces.

    A directory stands for all such files below it; what is none of them is named and left alone. A
    CSV needs size_bytes, collective, and time_us or busbw_gbytes_per_s, by these names or those of
    --columns (docs/collect.md). Traces are those of PyTorch's profiler and dumps of NCCL's
    Inspector (.json, .json.gz). The calls files (.dcc) or traces of all ranks of a job belong into
    one import: only with all its ranks is a call's time known. Options say what files do not.

    Example: dynamiccl-collect import all_reduce.log --out out/data --system mycluster
    Example: dynamiccl-collect import rank*.json.gz --out out/data --system mycluster
    """
    # Each option but the last is a field of the record.
    told = locals()
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
        dropped = [f"{count} rows left out: {why}" for why, count in file.dropped.items()]
        for remark in file.remarks + dropped:
            of_remark.setdefault(remark, []).append(file.path)
    for remark, paths in of_remark.items():
        others = f" (and {len(paths) - 1} more files)" if len(paths) > 1 else ""
        lines.append(f"{paths[0]}{others}: {remark}")
    if len(lines) > 20:
        lines[20:] = [f"... and {len(lines) - 20} more (with --json)"]
    lines += [f"{path}: left alone, {what}" for path, what in summary.skipped.items()]
    lines += [f"{count} calls without a time: {why}" for why, count in summary.untimed.items()]
    for line in lines:
        typer.echo(line, err=True)
    sums = summary.sums
    there = "; {already_there} were there already" if sums["already_there"] else ""
    told = "{dropped} dropped, {duplicates} duplicates, {num_rejected} rejected"
    text = f"{{rows_read}} rows read, {summary.written}{there}, {told} -> "
    typer.echo(f"{text.format(**sums)}{out}")
