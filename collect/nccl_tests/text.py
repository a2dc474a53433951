"""Reads text output of nccl-tests as measurements, from a file or a string.

lines     prefixes of launchers
layout    which column is which
parser    rows and runs of one output, in one pass
facts     what the lines around the rows say
resolve   what is therefore known: collective, ranks, nodes, versions, settings
tables    measurement tables
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from dynamiccl.collect.nccl_tests.cost_table import cost_rows
from dynamiccl.collect.nccl_tests.decisions import decision_rows
from dynamiccl.collect.nccl_tests.facts import RunFacts
from dynamiccl.collect.nccl_tests.names import program_of
from dynamiccl.collect.nccl_tests.parser import parse_lines
from dynamiccl.collect.nccl_tests.resolve import per_node
from dynamiccl.collect.nccl_tests.tables import merge_facts, rows_of, shared_facts, text_tables
from dynamiccl.collect.reports import FileReport, ImportOptions, Rejected
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.errors import OutputError
from dynamiccl.nccl import Collective

#: NCCL's log of the same run, beside the output: `x.log` and `x.nccl_debug.log`.
COMPANION_SUFFIX: Final = ".nccl_debug"
#: Columns that the caller of `parse_text` knows better than the output does.
_IDENTITY: Final = frozenset({"system", "sweep", "trial", "run", "repeat", "source_file"})


@dataclass(frozen=True, slots=True)
class TextOutput:
    """Measurements of one output, one dict a row, and the rejected lines."""

    rows: list[dict[str, Any]]
    rejected: tuple[Rejected, ...]
    remarks: tuple[str, ...]


def parse_text(text: str, *, where: str, collective: Collective | None = None) -> TextOutput:
    """Parse output that is at hand; one dict for each half of a row. Never raises for bad text.

    `where` names the output in reports. `collective` is for output that does not name its own.
    Identity columns (system, run, trial, ...) are the caller's to fill.

    >>> row = "1024 256 float sum -1 10.0 0.10 0.10 0 N/A N/A N/A N/A"
    >>> parse_text(row, where="doc", collective=Collective.AllReduce).rows[0]["time_us"]
    10.0
    """
    report = FileReport(path=where, format="nccl-tests-text")
    parsed = parse_lines(text.splitlines(), report)
    shared = shared_facts(parsed)
    if collective is not None:
        shared.programs.append(program_of(collective))
    base = {"run": "output", "system": "-", "sweep": "-"}
    tables = text_tables(parsed, shared=shared, base=base, options=ImportOptions(), report=report)
    rows = [row for table in tables for row in rows_of(table, _IDENTITY)]
    return TextOutput(rows, tuple(report.rejected), tuple(report.remarks))


def companion_of(path: Path) -> Path:
    """Path of a run's NCCL log: `x.nccl_debug.log` beside `x.log`."""
    return path.with_name(f"{path.stem}{COMPANION_SUFFIX}{path.suffix}")


def main_of(companion: Path) -> Path | None:
    """The output file that an NCCL log belongs to by its name, or None."""
    stem = companion.stem
    if not stem.endswith(COMPANION_SUFFIX):
        return None
    return companion.resolve().with_name(stem.removesuffix(COMPANION_SUFFIX) + companion.suffix)


def text_file_tables(
    path: Path, *, base: Mapping[str, Any], options: ImportOptions, report: FileReport
) -> Iterator[pa.Table]:
    """Yield the measurements of one output file, its companion log read with it.

    Raises OutputError, with the line that says why, when the file holds no row at all.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        parsed = parse_lines(lines, report)
    shared = shared_facts(parsed)
    if not report.rows_read:
        known = _group_alone(shared, base, options)
        report.costs += cost_rows(shared.costs.only() or {}, known)
        report.decisions += decision_rows(shared, known, options, report)
        if not (report.costs or report.decisions):
            raise OutputError(_no_row(path, shared, report))
        report.remark("no benchmark row; what NCCL logs of its costs and decisions is taken")
        return
    companion = companion_of(path)
    if companion.is_file():
        merge_facts(shared, _facts_of(companion))
        report.remark(f"NCCL's log {companion.name} read with it")
    yield from text_tables(parsed, shared=shared, base=dict(base), options=options, report=report)


def _group_alone(
    shared: RunFacts, base: Mapping[str, Any], options: ImportOptions
) -> dict[str, Any]:
    """The columns of the only communicator in a job's log."""
    ranks = next(iter(shared.nranks)) if len(shared.nranks) == 1 else options.num_ranks
    nodes = next(iter(shared.nnodes)) if len(shared.nnodes) == 1 else options.num_nodes
    version = next(iter(shared.nccl_versions)) if len(shared.nccl_versions) == 1 else None
    return {
        **base,
        "num_ranks": ranks,
        "num_nodes": nodes,
        "ranks_per_node": per_node(ranks, nodes),
        "launch_profile": options.launch_profile or DEFAULT_PROFILE,
        "nccl_version": version or options.nccl_version,
        "gpu": options.gpu,
    }


def _facts_of(companion: Path) -> RunFacts:
    with companion.open(encoding="utf-8", errors="replace") as lines:
        return shared_facts(parse_lines(lines, FileReport(path=str(companion), format="nccl-log")))


def _no_row(path: Path, shared: RunFacts, report: FileReport) -> str:
    if shared.failure is not None:
        _, number, line = shared.failure
        return f"{path}:{number}: no benchmark row; the run failed: {line[:300]}"
    if report.rejected:
        return f"{path} holds no whole benchmark row; first of the torn ones: {report.rejected[0]}"
    return (
        f"{path} holds no row of nccl-tests (size, count, type, ..., time, algbw, busbw); give the "
        "text that an nccl-tests program prints, its -J JSON, or a tidy CSV file"
    )
