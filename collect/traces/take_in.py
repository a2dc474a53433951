"""Import of the traces of all ranks of a job into the store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamiccl.collect.reports import FileReport
from dynamiccl.collect.traces.files import TraceFile
from dynamiccl.collect.traces.reader import read_files
from dynamiccl.datasets.provenance import program_record
from dynamiccl.datasets.store import write_part
from dynamiccl.errors import DataError


@dataclass(slots=True)
class TracesTaken:
    """Totals over the imported traces."""

    calls: int = 0
    #: Calls whose time is known from all their ranks.
    calls_timed: int = 0
    #: Records of single ranks, from which the calls were joined.
    records: int = 0
    steps: int = 0
    #: Reason why calls have no time -> number of calls.
    untimed: dict[str, int] = field(default_factory=dict)
    reports: list[FileReport] = field(default_factory=list)
    errors: list[DataError] = field(default_factory=list)


def take_in_traces(
    files: Sequence[TraceFile],
    hashes: Mapping[str, str],
    out_dir: Path,
    base: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> TracesTaken:
    """Write the calls and steps of `files` under `out_dir`; the same files give the same parts.

    Args:
        files: the traces of all ranks of one job.
        hashes: SHA-256 of the files on disk, by name.
        out_dir: the data directory.
        base: columns of all rows: `system`, `sweep`, `run`, and known numbers of ranks and nodes.
        progress: called with the number of traces done, and of all traces.
    """
    reports = [FileReport(path=each.name, format=each.source.value) for each in files]
    traces = read_files(files, reports, base, [], progress)
    record = program_record("import", files=dict(hashes))
    for kind, table in (("calls", traces.calls), ("steps", traces.steps)):
        if table.num_rows:
            write_part(out_dir, table, kind=kind, provenance=record)
    return TracesTaken(
        calls=traces.calls.num_rows,
        calls_timed=traces.calls.num_rows - traces.calls["time_us"].null_count,
        records=traces.records,
        steps=traces.steps.num_rows,
        untimed=dict(traces.untimed.most_common()),
        reports=reports,
        errors=traces.errors,
    )
