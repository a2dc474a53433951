"""Reads the traces of all ranks of a job into the tables `calls` and `steps`."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from dynamiccl.collect.reports import FileReport
from dynamiccl.collect.traces.execution_trace import read_execution_trace
from dynamiccl.collect.traces.files import TraceFile, trace_files
from dynamiccl.collect.traces.flight_recorder import read_flight_recorder
from dynamiccl.collect.traces.inspector import read_inspector
from dynamiccl.collect.traces.joiner import join_ranks
from dynamiccl.collect.traces.kineto import read_kineto
from dynamiccl.collect.traces.linking import link, number_calls
from dynamiccl.collect.traces.rank_call import RankTrace
from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.datasets.schema import STEPS
from dynamiccl.errors import CorruptFile, DataError, MissingPath, OutputError

_LOG: Final = logging.getLogger(__name__)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_READERS: Final[Mapping[CallSource, Callable[[TraceFile, FileReport], RankTrace]]] = {
    CallSource.INSPECTOR: read_inspector,
    CallSource.KINETO: read_kineto,
    CallSource.FLIGHT_RECORDER: read_flight_recorder,
    CallSource.EXECUTION_TRACE: read_execution_trace,
}


@dataclass(slots=True)
class Traces:
    """The tables, and what went wrong."""

    #: Of schema CALLS, one row a call.
    calls: pa.Table
    #: Of schema STEPS, one row a step and rank.
    steps: pa.Table
    #: One for each trace, members of archives too.
    reports: list[FileReport]
    #: Records of ranks that the calls are made of.
    records: int
    #: Why calls have no time of their own -> calls.
    untimed: Counter[str] = field(default_factory=Counter)
    #: Of traces that gave nothing.
    errors: list[DataError] = field(default_factory=list)


def read_traces(
    paths: Sequence[Path],
    *,
    system: str,
    sweep: str,
    run: str | None = None,
    known: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Traces:
    """Read the traces of one job; those of all ranks belong into one call.

    `paths` are trace files, archives of them, or directories, of which other files are left alone.
    `known` holds columns of `calls` that the caller knows, `num_ranks` and `num_nodes` where traces
    do not tell; `progress` is told of traces done, and of all. What single traces do wrong stands
    in `errors` and in their reports; the first is raised where nothing was read. Raises
    MissingPath, and OutputError where none is a trace.
    """
    errors: list[DataError] = []
    found: list[TraceFile] = []
    for path in _files(paths):
        try:
            found += trace_files(path)
        except CorruptFile as error:
            errors.append(error)
    if not found and not errors:
        raise OutputError(
            f"{', '.join(map(str, paths))}: no trace that is known; give dumps of NCCL's Inspector "
            "or PyTorch's Flight Recorder, traces of its profiler, or execution traces"
        )
    reports = [FileReport(path=trace.name, format=trace.source.value) for trace in found]
    base = {"system": system, "sweep": sweep, "run": run or sweep, **(known or {})}
    traces = read_files(found, reports, base, errors, progress)
    if errors and not traces.calls.num_rows and not traces.steps.num_rows:
        raise errors[0]
    return traces


def read_files(
    files: Sequence[TraceFile],
    reports: list[FileReport],
    base: Mapping[str, Any],
    errors: list[DataError],
    progress: Callable[[int, int], None] | None = None,
) -> Traces:
    """Read traces that are recognised already; `reports` has one for each, and is filled."""
    traces: dict[CallSource, list[RankTrace]] = {source: [] for source in _READERS}
    for done, (file, report) in enumerate(zip(files, reports, strict=True), 1):
        try:
            trace = _READERS[file.source](file, report)
        except DataError as error:
            report.failure = str(error)
            errors.append(error)
        else:
            traces[file.source].append(trace)
            _check(file, trace, report, errors)
        if progress is not None:
            progress(done, len(files))
    traces[CallSource.EXECUTION_TRACE] = link(
        traces[CallSource.KINETO], traces[CallSource.EXECUTION_TRACE]
    )
    everything = [trace for several in traces.values() for trace in several]
    fixed = {name: value for name, value in base.items() if name not in {"num_ranks", "num_nodes"}}
    for trace in everything:
        _fill(trace, base)
        number_calls(trace)
    joined = join_ranks([call for trace in everything for call in trace.calls], fixed)
    if reports:
        reports[0].duplicates += joined.duplicates
    _LOG.info("%d traces: %d calls", len(files), joined.table.num_rows)
    steps = _steps_table(traces[CallSource.KINETO], base)
    return Traces(joined.table, steps, reports, joined.records, joined.untimed, errors)


def _files(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(each for each in path.rglob("*") if each.is_file())
        elif path.is_file():
            found.append(path)
        else:
            raise MissingPath("trace", path, "check the name")
    return found


def _check(file: TraceFile, trace: RankTrace, report: FileReport, errors: list[DataError]) -> None:
    """Report where a trace is cut off, and where it had no calls."""
    problem: DataError | None = trace.cut_off
    if problem is None and report.rejected and not trace.calls and not trace.steps:
        problem = OutputError(f"{file.name} holds no usable record; {report.rejected[0]}")
    if problem is not None:
        report.failure = str(problem)
        errors.append(problem)
    elif not trace.calls:
        report.remark("no collective in it")


def _fill(trace: RankTrace, base: Mapping[str, Any]) -> None:
    """Fill in ranks and nodes from the caller where the trace does not tell."""
    ranks, nodes = base.get("num_ranks"), base.get("num_nodes")
    for call in trace.calls:
        if call.num_ranks is None:
            call.num_ranks = ranks
        # A group that is a part of the job may lie on fewer nodes than the job.
        is_world = call.num_ranks is not None and call.num_ranks == (trace.world_size or ranks)
        if call.num_nodes is None and (nodes == 1 or is_world):
            call.num_nodes = nodes


def _steps_table(traces: Iterable[RankTrace], base: Mapping[str, Any]) -> pa.Table:
    rows = []
    for step in sorted(
        (step for trace in traces for step in trace.steps),
        key=lambda each: (each["source_file"], each["step"]),
    ):
        begun = _EPOCH + timedelta(microseconds=round(step["timestamp_us"]))
        told = {**step, "timestamp": begun, "source": CallSource.KINETO.value}
        row = {**told, **{name: base[name] for name in ("system", "sweep", "run")}}
        rows.append({name: row.get(name) for name in STEPS.names})
    return pa.Table.from_pylist(rows, schema=STEPS)
