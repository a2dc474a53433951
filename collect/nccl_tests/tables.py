"""Makes measurement tables from parsed text output, in pieces of bounded size."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dynamiccl.collect.nccl_tests.cost_table import cost_rows
from dynamiccl.collect.nccl_tests.facts import RunFacts
from dynamiccl.collect.nccl_tests.parser import MISSING, ParsedText
from dynamiccl.collect.nccl_tests.resolve import ResolvedRun, resolve_run
from dynamiccl.collect.nccl_tests.settings import default_scope
from dynamiccl.collect.reports import FileReport, ImportOptions
from dynamiccl.datasets.rows import columns_table, trial_id
from dynamiccl.datasets.schema import MEASUREMENTS, QUIET, Source, Status

#: Rows in one part; all columns of them are about 50 MiB.
PART_ROWS: Final = 131_072


def text_tables(
    parsed: ParsedText,
    *,
    shared: RunFacts,
    base: dict[str, Any],
    options: ImportOptions,
    report: FileReport,
    source: Source = Source.NCCL_TESTS_TEXT,
) -> Iterator[pa.Table]:
    """Yield the measurements of one output in tables of at most `PART_ROWS` rows.

    `base` holds the columns that the whole file shares: system, sweep, source_file, topology facts,
    and `run` as the stem of the runs' names.
    """
    rows, resolved = _resolve(parsed, shared, options, report)
    if not len(rows):
        return
    rows = _without_copies(rows, parsed, report)
    cells, cell = _cells(rows)
    repeats = _occurrence(cell)
    facts = [
        None
        if known is None
        else {**base, **known.columns, "run": _run_name(base, parsed, run), "source": source.value}
        for known, run in zip(resolved, parsed.runs, strict=True)
    ]
    report.costs += _costs(parsed, shared, facts, report)
    trials = pa.array([_trial(parsed, facts, rows[i]) for i in cells])
    for start in range(0, len(rows), PART_ROWS):
        part = slice(start, start + PART_ROWS)
        columns = _columns(rows[part], parsed, facts, resolved)
        columns["trial"] = trials.take(pa.array(cell[part]))
        columns["repeat"] = pa.array(repeats[part])
        yield columns_table(columns, len(rows[part]))


def _costs(
    parsed: ParsedText,
    shared: RunFacts,
    facts: Sequence[Mapping[str, Any] | None],
    report: FileReport,
) -> list[dict[str, Any]]:
    """NCCL's cost table of each group for which exactly one was logged."""
    found: list[dict[str, Any]] = []
    for run, known in zip(parsed.runs, facts, strict=True):
        if known is None:
            continue
        log = run.costs if run.costs.tables else shared.costs
        table = log.only()
        if log.tables and table is None:
            report.remark("NCCL's cost tables left out: communicators logged different ones")
        found += [row for row in cost_rows(table or {}, known) if row not in found]
    return found


def rows_of(table: pa.Table, left_out: Collection[str] = ()) -> list[dict[str, Any]]:
    """The rows of a table as dicts for a journal: only columns that have a value.

    Most columns of a measurement are not known to a benchmark's output: those that are empty
    throughout are not looked at row by row.
    """
    known = [
        name
        for name, column in zip(table.column_names, table.columns, strict=True)
        if name not in left_out and column.null_count < len(column)
    ]
    rows: list[dict[str, Any]] = table.select(known).to_pylist()
    gaps = [name for name in known if table[name].null_count]
    for row in rows:
        for name in gaps:
            if row[name] is None:
                del row[name]
    return rows


def shared_facts(parsed: ParsedText) -> RunFacts:
    """The facts stated outside of runs with rows, merged."""
    shared = RunFacts(-1, "")
    for run in parsed.runs:
        if not run.rows:
            merge_facts(shared, run)
    return shared


def merge_facts(into: RunFacts, other: RunFacts) -> None:
    """Add another run's facts about the whole output; rank lists stay with their run."""
    into.programs += other.programs
    into.launched = into.launched or other.launched
    into.names_host_ids = into.names_host_ids or other.names_host_ids
    for name in ("per_process", "nranks", "nnodes", "nccl_versions", "cuda_versions", "words"):
        getattr(into, name).update(getattr(other, name))
    for setting, values in other.settings.items():
        into.settings.setdefault(setting, set()).update(values)
    into.tuning.merge(other.tuning)
    into.costs.tables += other.costs.tables
    if other.failure and (into.failure is None or other.failure < into.failure):
        into.failure = other.failure


def _resolve(
    parsed: ParsedText, shared: RunFacts, options: ImportOptions, report: FileReport
) -> tuple[npt.NDArray[Any], list[ResolvedRun | None]]:
    """Resolve each run, and drop the rows of runs whose collective is unknown."""
    resolved: list[ResolvedRun | None] = []
    unknown = []
    for run in parsed.runs:
        known = None
        mine = _rows_of(parsed.rows, run) if run.rows else parsed.rows[:0]
        if len(mine):
            known = resolve_run(run, shared, mine, parsed.words, options, report)
            if known is None:
                unknown.append(run.index)
                report.drop("collective not known", len(np.unique(mine["line"])))
        resolved.append(known)
    if not unknown:
        return parsed.rows, resolved
    return parsed.rows[~np.isin(parsed.rows["run"], unknown)], resolved


def _rows_of(rows: npt.NDArray[Any], run: RunFacts) -> npt.NDArray[Any]:
    """Rows of one run; no copy when all are."""
    mine = rows["run"] == run.index
    return rows if mine.all() else rows[mine]


def _without_copies(
    rows: npt.NDArray[Any], parsed: ParsedText, report: FileReport
) -> npt.NDArray[Any]:
    """Leave out rows printed again by another process: same numbers, in a run with two headers."""
    copied = [run.index for run in parsed.runs if run.copies > 1]
    if not copied:
        return rows
    report.remark("several processes wrote into one output; equal rows are taken once")
    seen: set[tuple[Any, ...]] = set()
    keep = np.ones(len(rows), dtype=bool)
    names = [name for name in rows.dtype.names or () if name not in {"line", "i_min"}]
    for index in np.flatnonzero(np.isin(rows["run"], copied)):
        key = tuple(str(rows[name][index]) for name in names)
        keep[index] = key not in seen
        seen.add(key)
    report.duplicates += int((~keep).sum())
    return rows[keep]


def _cells(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """First row of each distinct (run, size, type, place), and each row's position among these."""
    _, size = np.unique(rows["size"], return_inverse=True)
    key = rows["run"].astype(np.int64)
    for part, span in (
        (size, int(size.max()) + 1),
        (rows["datatype"].astype(np.int64) + 1, int(rows["datatype"].max()) + 2),
        (rows["in_place"].astype(np.int64) + 1, 3),
    ):
        key = key * span + part
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def _occurrence(cell: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """How many earlier rows have the same cell; 0 for the first."""
    order = np.argsort(cell, kind="stable")
    ordered = cell[order]
    starts = np.r_[True, ordered[1:] != ordered[:-1]]
    first = np.maximum.accumulate(np.where(starts, np.arange(len(cell)), 0))
    occurrence = np.empty(len(cell), dtype=np.int64)
    occurrence[order] = np.arange(len(cell)) - first
    return occurrence


def _run_name(base: dict[str, Any], parsed: ParsedText, run: RunFacts) -> str:
    with_rows = [r.index for r in parsed.runs if r.rows]
    if run.index not in with_rows or len(with_rows) == 1:
        return str(base["run"])
    return f"{base['run']}.{with_rows.index(run.index) + 1}"


def _trial(parsed: ParsedText, facts: list[dict[str, Any] | None], row: npt.NDArray[Any]) -> str:
    known = dict(facts[int(row["run"])] or {})
    known["size_bytes"] = int(row["size"])
    known["datatype"] = _word(parsed, int(row["datatype"]))
    known["in_place"] = _place(int(row["in_place"]))
    known["interference_kind"], known["interference_level"] = QUIET, 0.0
    return trial_id(known)


def _word(parsed: ParsedText, code: int) -> str | None:
    return None if code < 0 else parsed.words[code]


def _place(code: int) -> bool | None:
    return None if code < 0 else bool(code)


def _columns(
    rows: npt.NDArray[Any],
    parsed: ParsedText,
    facts: list[dict[str, Any] | None],
    resolved: list[ResolvedRun | None],
) -> dict[str, pa.Array]:
    wrong = rows["wrong"]
    bad = wrong > 0
    status = pa.array([Status.OK.value, Status.WRONG_VALUES.value])
    words = pa.array([*parsed.words, None], type=pa.string())
    columns = _shared_columns(rows, facts)
    columns |= {
        "source_line": _with_nulls(rows["line"], rows["line"] < 0, pa.int64()),
        "size_bytes": pa.array(rows["size"]),
        "datatype": _words(words, rows["datatype"]),
        "reduction_op": _words(words, rows["redop"]),
        "root": _with_nulls(rows["root"], rows["root"] == MISSING, pa.int64()),
        "in_place": _with_nulls(rows["in_place"] > 0, rows["in_place"] < 0, pa.bool_()),
        "interference_level": pa.array(np.zeros(len(rows))),
        "status": status.take(pa.array(bad.astype(np.int8))),
        "time_us": pa.array(rows["time"]),
        "wrong_values": _with_nulls(wrong, wrong == MISSING, pa.int64()),
    }
    for name, source in (
        ("algbw_gbytes_per_s", "algbw"),
        ("busbw_gbytes_per_s", "busbw"),
        ("time_min_us", "i_min"),
        ("time_max_us", "i_max"),
        ("time_p99_us", "i_p99"),
        ("time_cv_percent", "i_cv"),
    ):
        columns[name] = _with_nulls(rows[source], ~np.isfinite(rows[source]), pa.float64())
    return columns | _actual(rows, resolved)


def _words(words: pa.Array, codes: npt.NDArray[Any]) -> pa.Array:
    """The word of each code; code -1 is null, which is the last word."""
    return words.take(pa.array(np.where(codes < 0, len(words) - 1, codes)))


def _with_nulls(
    values: npt.NDArray[Any], null: npt.NDArray[np.bool_], kind: pa.DataType
) -> pa.Array:
    return pa.array(values, mask=null).cast(kind)


def _shared_columns(
    rows: npt.NDArray[Any], facts: list[dict[str, Any] | None]
) -> dict[str, pa.Array]:
    """Columns that are constant within a run."""
    names = sorted({name for known in facts if known for name in known})
    take = pa.array(rows["run"])
    columns = {}
    for name in names:
        values = [None if known is None else known.get(name) for known in facts]
        columns[name] = columns_array(name, values).take(take)
    profiles = [
        None if known is None else default_scope(str(known["launch_profile"])) for known in facts
    ]
    columns["default_scope"] = columns_array("default_scope", profiles).take(take)
    return columns


def columns_array(name: str, values: list[Any]) -> pa.Array:
    """Values of one measurement column as an Arrow array of the schema's type."""
    return pa.array(values, type=MEASUREMENTS.field(name).type)


def _actual(rows: npt.NDArray[Any], resolved: list[ResolvedRun | None]) -> dict[str, pa.Array]:
    """The `actual_*` columns and `verified`, where NCCL's log tells what ran."""
    if not any(known and known.choices for known in resolved):
        return {}
    found = []
    for run, size in zip(rows["run"].tolist(), rows["size"].tolist(), strict=True):
        known = resolved[run]
        found.append(known.choices.get(size) if known else None)
    return {
        "actual_algorithm": pa.array([c.algorithm.wire if c else None for c in found], pa.string()),
        "actual_protocol": pa.array([c.protocol.wire if c else None for c in found], pa.string()),
        "actual_num_channels": pa.array([c.num_channels if c else None for c in found], pa.int64()),
        "verified": pa.array([c is not None for c in found]),
    }
