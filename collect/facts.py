"""What is known of each run of an nccl-tests output, and its rows as measurements.

The rule is that nothing is guessed. A fact needs one value; where the output gives two, or a
number that its own bandwidths contradict, the column stays null and the report says why.

The collective comes from, in this order:
1. the program's name inside the output (header, command line, or tail);
2. the columns and bandwidths, where they can be of one collective only;
3. the option `collective`, unless the columns contradict it: then the run is refused;
4. the name of the file, when it contains exactly one collective's name. This is reported.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final

import polars as pl
import pyarrow as pa

from dynamiccl.collect.columns import RUN, Row
from dynamiccl.collect.nccl_log import Choice, cost_rows, decision_rows, host_list
from dynamiccl.collect.output import FileReport, RankLine, Rejected, Run, TextRuns, read_json
from dynamiccl.collect.settings import (
    add_settings,
    collective_of_program,
    default_scope,
    requested_by,
)
from dynamiccl.datasets.rows import columns_table, measurements_table, trial_id
from dynamiccl.datasets.schema import (
    COSTS,
    DECISIONS,
    QUIET,
    Source,
    Statistic,
    Status,
)
from dynamiccl.errors import OutputError
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol

#: Rows of one table, by the kind of table; parts of a data set.
Part = tuple[str, pa.Table]

#: NCCL's log of the same run, beside the output: `x.log` and `x.nccl_debug.log`.
_COMPANION: Final = ".nccl_debug"
#: Rows in one part; all columns of them are about 50 MiB.
PART_ROWS: Final = 131_072
#: Rows that are held as dicts before they become columns.
CHUNK_ROWS: Final = 32_768
#: Bandwidths below this have too few digits for a ratio.
_MIN_BANDWIDTH: Final = 1.0
#: From so many ranks on the ratios of bus to algorithm bandwidth are alike.
_ALIKE_RANKS: Final = 257
#: GPUs of one host at most (DGX-2, HGX with 16).
_MOST_GPUS: Final = 16

#: Columns that every row has, and those that some outputs have.
_COLUMNS: Final[dict[str, Any]] = {
    RUN: pl.UInt32,
    "source_line": pl.Int64,
    "size_bytes": pl.Int64,
    "datatype": pl.Categorical,
    "reduction_op": pl.Categorical,
    "root": pl.Int32,
    "in_place": pl.Boolean,
    "time_us": pl.Float64,
    "algbw_gbytes_per_s": pl.Float64,
    "busbw_gbytes_per_s": pl.Float64,
    "wrong_values": pl.Int64,
}
_OPTIONAL: Final[dict[str, Any]] = {
    "time_min_us": pl.Float64,
    "time_max_us": pl.Float64,
    "time_p99_us": pl.Float64,
    "time_cv_percent": pl.Float64,
    "iteration_times_us": pl.List(pl.Float64),
    "process_times_us": pl.List(pl.Float64),
}
_BANDWIDTHS: Final = ("algbw_gbytes_per_s", "busbw_gbytes_per_s")
#: Columns that an output may fill with what is no number.
_FINITE: Final = (*_BANDWIDTHS, *(name for name, kind in _OPTIONAL.items() if kind == pl.Float64))
#: What makes two rows of a run repeats of one measurement.
_CELL: Final = (RUN, "size_bytes", "datatype", "in_place")

#: (Whether it has an operation, a root) -> the collectives whose rows are so. Older releases print
#: for Reduce `redop` and `root`, for AllReduce and ReduceScatter `redop` alone, for Broadcast
#: `root` alone, for AllGather and AlltoAll neither; newer ones both, `none` for no operation and -1
#: for no root. AlltoAll may name the column `redop` in its header and print nothing below it.
_BY_COLUMNS: Final = {
    (True, True): (Collective.Reduce,),
    (True, False): (Collective.AllReduce, Collective.ReduceScatter),
    (False, True): (Collective.Broadcast, Collective.Scatter, Collective.Gather),
    (False, False): (Collective.AllGather, Collective.AlltoAll, Collective.SendRecv),
}
_IN_FILE_NAME: Final = re.compile(
    r"(?<![a-z])(all[_-]?reduce|all[_-]?gather|reduce[_-]?scatter|all[_-]?to[_-]?all|send[_-]?recv"
    r"|broadcast|scatter|gather|reduce)(?![a-z])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What the caller knows about the files. What a file itself says wins, except where noted."""

    #: Hive directory. Benchmark output does not name its system, so it is required for it;
    #: for tidy CSV it replaces the file's own `system` column.
    system: str | None = None
    #: Hive directory; None = the folder of a benchmark output, the stem of a CSV file.
    sweep: str | None = None
    #: For output that does not name its collective. Used before the name of the file is.
    collective: str | None = None
    num_ranks: int | None = None
    #: NCCL's nNodes. Wins over the number of host names (NVL72, NCCL_HOSTID), not over NCCL's log.
    num_nodes: int | None = None
    nccl_version: str | None = None
    gpu: str | None = None
    #: Replaces the profile that is derived from NCCL_* settings shown in the output.
    launch_profile: str | None = None
    #: What was requested of NCCL, for output that does not show it.
    algorithm: str | None = None
    protocol: str | None = None
    num_channels: int | None = None
    #: TOML file with facts of known systems.
    systems_file: Path | None = None


@dataclass(frozen=True, slots=True)
class TextOutput:
    """Measurements of one output, one dict a row, and the rejected lines."""

    rows: list[Row]
    rejected: tuple[Rejected, ...]
    remarks: tuple[str, ...]


def parse_text(text: str, *, where: str, collective: Collective | None = None) -> TextOutput:
    """Read output that is at hand; one dict for each half of a row. Never raises for bad text.

    `where` names the output in reports. `collective` is what was started, for output that does not
    name its own. Identity columns (system, run, trial, ...) are the caller's to fill.

    >>> row = "1024 256 float sum -1 10.0 0.10 0.10 0 N/A N/A N/A N/A"
    >>> parse_text(row, where="doc", collective=Collective.AllReduce).rows[0]["time_us"]
    10.0
    """
    report = FileReport(path=where, format=Source.NCCL_TESTS_TEXT.value, most_rejected=len(text))
    text_runs = TextRuns(report)
    rows = [row for halves in text_runs.rows(text.splitlines()) for row in halves]
    found = _as_dicts(rows, text_runs.runs, report, collective, Source.NCCL_TESTS_TEXT)
    return TextOutput(found, tuple(report.rejected), tuple(report.remarks))


def companion_of(path: Path) -> Path:
    """Path of a run's NCCL log: `x.nccl_debug.log` beside `x.log`."""
    return path.with_name(f"{path.stem}{_COMPANION}{path.suffix}")


def main_of(companion: Path) -> Path | None:
    """The output file that an NCCL log belongs to by its name, or None."""
    if not companion.stem.endswith(_COMPANION):
        return None
    name = companion.stem.removesuffix(_COMPANION) + companion.suffix
    return companion.resolve().with_name(name)


def read_text(
    path: Path, base: Mapping[str, Any], options: ImportOptions, report: FileReport
) -> Iterator[Part]:
    """Yield what one output file tells, its companion log read with it.

    Raises OutputError, with the line that says why, when the file holds no row at all.
    """
    text_runs = TextRuns(report)
    with path.open(encoding="utf-8", errors="replace") as lines:
        frame = _gathered(text_runs.rows(lines))
    runs = text_runs.runs
    companion = companion_of(path)
    if not report.rows_read:
        yield from _log_alone(path, _merged(runs), base, options, report)
        return
    if companion.is_file():
        told = TextRuns(FileReport(path=str(companion), format="nccl-log"))
        with companion.open(encoding="utf-8", errors="replace") as lines:
            for _ in told.rows(lines):
                pass
        for run in runs:
            run.merge(_merged(told.runs))
        report.remark(f"NCCL's log {companion.name} read with it")
    shared = {**base, "source": Source.NCCL_TESTS_TEXT.value}
    yield from measurement_parts(frame, runs, shared, options, report)


def read_json_file(
    path: Path, base: Mapping[str, Any], options: ImportOptions, report: FileReport
) -> Iterator[Part]:
    """Yield what one file of nccl-tests' JSON tells; raises as `read_json`."""
    rows, run = read_json(path, report)
    shared = {**base, "source": Source.NCCL_TESTS_JSON.value}
    yield from measurement_parts(_gathered([rows]), [run], shared, options, report)


def parse_json(path: Path, collective: Collective) -> list[Row]:
    """The rows of a JSON file of the caller's own launch, as of `parse_text`.

    Raises as `read_json`, and OutputError where a result cannot be read.
    """
    report = FileReport(path=str(path), format=Source.NCCL_TESTS_JSON.value)
    rows, run = read_json(path, report)
    if report.rejected:
        raise OutputError(str(report.rejected[0]))
    return _as_dicts(rows, [run], report, collective, Source.NCCL_TESTS_JSON)


def _as_dicts(
    rows: list[Row],
    runs: Sequence[Run],
    report: FileReport,
    started: Collective | None,
    source: Source,
) -> list[Row]:
    """The rows with all that is known of their runs."""
    known = resolve_all(_gathered([rows]), runs, ImportOptions(), report, started=started)
    for facts in known.values():
        facts.columns["source"] = source.value
    return [known[row[RUN]].measurement(row) for row in rows if row[RUN] in known]


def _merged(runs: Iterable[Run]) -> Run:
    """What all runs of an output say, rows or not."""
    whole = Run(-1)
    for run in runs:
        whole.merge(run)
    return whole


def measurement_parts(
    rows: pl.DataFrame,
    runs: Sequence[Run],
    base: Mapping[str, Any],
    options: ImportOptions,
    report: FileReport,
) -> Iterator[Part]:
    """Yield the measurements of one output in tables of at most `PART_ROWS` rows, and its costs.

    `base` holds the columns that the whole file shares: system, sweep, source and topology facts,
    and `run` as the stem of the runs' names.
    """
    known = resolve_all(rows, runs, options, report)
    names = _run_names(str(base["run"]), [run for run in runs if run.rows or run.died])
    for number, facts in known.items():
        facts.columns = {**base, **facts.columns, "run": names[number]}
    unknown = rows.filter(~pl.col(RUN).is_in(list(known)))
    if unknown.height:
        lines = unknown.n_unique([RUN, "source_line"])
        report.drop("collective not known", lines)
        rows = rows.filter(pl.col(RUN).is_in(list(known)))
    rows = _without_copies(rows, runs, report)
    rows = rows.with_columns(repeat=pl.int_range(pl.len()).over(_CELL))
    for part in rows.iter_slices(PART_ROWS):
        yield "measurements", _table(part, known)
    failed = [row for run in runs if (row := _failed_row(run, known)) is not None]
    if failed:
        yield "measurements", measurements_table(failed)
    costs: list[Row] = []
    for run in runs:
        if run.number in known and run.rows:
            costs += [
                c for c in _costs_of(run, known[run.number].columns, report) if c not in costs
            ]
    if costs:
        yield "costs", pa.Table.from_pylist(costs, schema=COSTS)


def _gathered(rows: Iterable[list[Row]]) -> pl.DataFrame:
    """Rows as columns; the dicts live no longer than a chunk."""
    chunks = [pl.DataFrame(schema=_COLUMNS)]
    pending: list[Row] = []
    for several in rows:
        pending += several
        if len(pending) >= CHUNK_ROWS:
            chunks.append(_frame(pending))
            pending = []
    chunks.append(_frame(pending))
    return pl.concat(chunks, how="diagonal")


def _frame(rows: list[Row]) -> pl.DataFrame:
    has_more = max(map(len, rows), default=0) > len(_COLUMNS)
    frame = pl.DataFrame(rows, schema={**_COLUMNS, **_OPTIONAL} if has_more else _COLUMNS)
    return frame.drop(
        [name for name in _OPTIONAL if has_more and frame[name].null_count() == len(rows)]
    )


def _run_names(stem: str, runs: Sequence[Run]) -> dict[int, str]:
    if len(runs) == 1:
        return {runs[0].number: stem}
    return {run.number: f"{stem}.{place}" for place, run in enumerate(runs, 1)}


def _without_copies(rows: pl.DataFrame, runs: Iterable[Run], report: FileReport) -> pl.DataFrame:
    """Leave out rows printed again by another process: same numbers, in a run with two headers."""
    copies = [run.number for run in runs if run.rows and run.copies > 1]
    if not copies:
        return rows
    copied = pl.col(RUN).is_in(copies)
    report.remark("several processes wrote into one output; equal rows are taken once")
    numbers = pl.struct(pl.exclude("source_line"))
    kept = rows.filter(~copied | numbers.is_first_distinct())
    report.duplicates += rows.height - kept.height
    return kept


def with_trials(
    rows: pl.DataFrame, by: Sequence[str], columns_of: Callable[[Row], Row] = dict
) -> pl.DataFrame:
    """Add the id of each row's trial; `by` are the columns that tell them apart.

    `columns_of` gives all that is known of rows with these values.
    """
    cells = rows.select(by).unique(maintain_order=True)
    ids = [trial_id(columns_of(cell)) for cell in cells.to_dicts()]
    cells = cells.with_columns(trial=pl.Series(ids, dtype=pl.String))
    return rows.join(cells, on=by, how="left", nulls_equal=True, maintain_order="left")


def _table(rows: pl.DataFrame, known: Mapping[int, "Facts"]) -> pa.Table:
    """Measurements of some rows, with the columns that all rows of their run share."""
    told = [{RUN: number, **facts.columns} for number, facts in known.items()]
    ran = [
        {RUN: number, "size_bytes": size, **_actual(choice)}
        for number, facts in known.items()
        for size, choice in facts.choices.items()
    ]
    of_runs = pl.DataFrame(told, schema_overrides={RUN: pl.UInt32}, infer_schema_length=None)
    quiet = {"interference_kind": QUIET, "interference_level": 0.0}
    whole = with_trials(
        rows, _CELL, lambda cell: {**known[cell[RUN]].columns, **cell, **quiet}
    ).join(of_runs, on=RUN, how="left", maintain_order="left")
    if ran:
        choices = pl.DataFrame(ran, schema_overrides={RUN: pl.UInt32}, infer_schema_length=None)
        whole = whole.join(choices, on=[RUN, "size_bytes"], how="left", maintain_order="left")
        whole = whole.with_columns(pl.col("verified").fill_null(value=False))
    is_wrong = pl.col("wrong_values") > 0
    ok, wrong = pl.lit(Status.OK.value), pl.lit(Status.WRONG_VALUES.value)
    whole = whole.with_columns(
        pl.col(pl.Categorical).cast(pl.String),
        *(pl.when(pl.col(name).is_finite()).then(name) for name in _FINITE if name in rows),
        interference_level=0.0,
        status=pl.when(is_wrong).then(wrong).otherwise(ok),
    )
    return as_measurements(whole.drop(RUN))


def as_measurements(rows: pl.DataFrame) -> pa.Table:
    """A measurements table of columns of the schema; a missing one is neutral or null."""
    arrow = rows.to_arrow()
    return columns_table({name: arrow[name] for name in arrow.column_names}, arrow.num_rows)


def _actual(choice: Choice) -> Row:
    ran = {f"actual_{name}": value for name, value in choice._asdict().items()}
    return {**ran, "verified": True}


def _failed_row(run: Run, known: Mapping[int, "Facts"]) -> Row | None:
    """The row of a run that died before its first one: the first size that it was to measure."""
    if run.number not in known or run.rows or not run.died:
        return None
    assert run.failure is not None
    _, number, line = run.failure
    return {
        **known[run.number].columns,
        "size_bytes": run.first_bytes,
        "source_line": number,
        "interference_level": 0.0,
        "status": Status.FAILED.value,
        "statistic": Statistic.NONE.value,
        "reason": line[:300],
    }


def _costs_of(run: Run, known: Mapping[str, Any], report: FileReport) -> list[Row]:
    """NCCL's cost table of a run, if exactly one was logged of NCCL's own choice."""
    table = run.nccl.cost_table()
    if run.nccl.costs and table is None:
        report.remark("NCCL's cost tables left out: communicators logged different ones")
    if table and not known["is_default"]:
        report.remark("NCCL's cost table left out: it is of what was forced, not NCCL's own")
        return []
    rows = cost_rows(table or {}, known)
    report.costs += len(rows)
    return rows


def _log_alone(
    path: Path,
    told: Run,
    base: Mapping[str, Any],
    options: ImportOptions,
    report: FileReport,
) -> Iterator[Part]:
    """What a job's log without benchmark rows tells of its only communicator."""
    ranks = _only(told.nccl.num_ranks) or options.num_ranks
    nodes = _only(told.nccl.num_nodes) or options.num_nodes
    known: Row = {
        **base,
        "num_ranks": ranks,
        "num_nodes": nodes,
        "ranks_per_node": _per_node(ranks, nodes),
        "nccl_version": _only(told.nccl.versions) or options.nccl_version,
        "gpu": options.gpu,
        **_request(told, Collective.AllReduce, options, report),
    }
    costs = _costs_of(told, known, report)
    decisions = list(_decisions(told, known, options, report))
    report.decisions += len(decisions)
    if not costs and not decisions:
        raise OutputError(_no_row(path, told, report))
    report.remark("no benchmark row; what NCCL logs of its costs and decisions is taken")
    if costs:
        yield "costs", pa.Table.from_pylist(costs, schema=COSTS)
    if decisions:
        yield "decisions", pa.Table.from_pylist(decisions, schema=DECISIONS)


def _decisions(told: Run, known: Row, options: ImportOptions, report: FileReport) -> Iterator[Row]:
    """What NCCL ran for each size, where the one group is known that it ran it for.

    Sizes for which different things ran are left out, and the report says how many. Lines of NCCL
    2.20 to 2.22 do not name their collective: they are those of `options.collective`.
    """
    log = told.nccl
    unnamed = any(call.collective is None for call in log.calls)
    named = {call.collective for call in log.calls if call.collective is not None}
    if unnamed and options.collective is not None:
        named.add(Collective.parse(options.collective))
    ranks = ", ".join(map(str, sorted(log.num_ranks)))
    for is_so, why in (
        (len(log.num_ranks) > 1, f"communicators of {ranks} ranks made them"),
        (known["num_ranks"] is None, "say of how many ranks they are (--ranks)"),
        (not known["is_default"], "settings forced them"),
        (unnamed and not named, "they name no collective, say which (--collective)"),
    ):
        if log.calls and is_so:
            report.remark(f"NCCL's decisions left out: {why}")
            return
    for collective in sorted(named):
        choices, differing = log.choices(collective, known["num_ranks"])
        if differing:
            report.remark(
                f"{collective.wire}: sizes for which NCCL ran different things, or none of its "
                f"configs, left out: {len(differing)}"
            )
        yield from decision_rows(choices, collective, known)


def _no_row(path: Path, told: Run, report: FileReport) -> str:
    if told.failure is not None:
        _, number, line = told.failure
        return f"{path}:{number}: no benchmark row; the run failed: {line[:300]}"
    if report.rejected:
        return f"{path} holds no whole benchmark row; first of the torn ones: {report.rejected[0]}"
    if report.remarks:
        return f"{path} holds no row of nccl-tests; {'; '.join(report.remarks)}"
    return (
        f"{path} holds no row of nccl-tests (size, count, type, ..., time, algbw, busbw); give the "
        "text that an nccl-tests program prints, its -J JSON, or a tidy CSV file"
    )


@dataclass(slots=True)
class Facts:
    """What is known of one run: the columns that all of its rows share, and what NCCL ran."""

    columns: Row
    #: By size, where NCCL's log says so without contradiction.
    choices: Mapping[int, Choice] = field(default_factory=dict)

    def measurement(self, row: Row) -> Row:
        """A row of the run with all that is known of it."""
        choice = self.choices.get(row["size_bytes"])
        wrong = (row["wrong_values"] or 0) > 0
        found = {
            "verified": False,
            **self.columns,
            **row,
            **(_actual(choice) if choice else {}),
            "status": (Status.WRONG_VALUES if wrong else Status.OK).value,
        }
        del found[RUN]
        return {name: value for name, value in found.items() if value is not None}


def resolve_all(
    rows: pl.DataFrame,
    runs: Iterable[Run],
    options: ImportOptions,
    report: FileReport,
    *,
    started: Collective | None = None,
) -> dict[int, Facts]:
    """What is known of each run with rows, or that died before its first, by its number.

    A run whose collective cannot be known is left out, and the report says so. `started` is what
    the caller ran, for output that does not name it.
    """
    # From 10^4 on bandwidths are printed without decimals.
    exact = pl.struct(_BANDWIDTHS).filter(pl.col(_BANDWIDTHS[0]) < 1e4)
    evidence = rows.group_by(RUN).agg(
        operations=pl.col("reduction_op").cast(pl.String).unique(),
        has_root=(pl.col("root") >= 0).any(),
        best=exact.sort_by(exact.struct.field(_BANDWIDTHS[0])).last(),
    )
    of_rows = {row[RUN]: row for row in evidence.to_dicts()}
    known = {}
    for run in runs:
        told = of_rows.get(run.number)
        if told is not None or (run.died and not run.rows and run.first_bytes):
            collective = _collective(run, told, options, report, started)
            if collective is not None:
                known[run.number] = _facts(run, told, collective, options, report)
    return known


def _facts(
    run: Run,
    of_rows: Row | None,
    collective: Collective,
    options: ImportOptions,
    report: FileReport,
) -> Facts:
    num_ranks = _num_ranks(run, options, report)
    if of_rows is not None and num_ranks is not None:
        num_ranks = _checked_ranks(of_rows, num_ranks, collective, report)
    num_nodes = _num_nodes(run, num_ranks, options, report)
    groups = {line.group for line in run.ranks}
    #: One communicator: the hosts listed are its own.
    is_alone = bool(run.ranks) and run.copies == 1 and len(groups) == 1
    choices, disagreeing = run.nccl.choices(collective, num_ranks)
    if disagreeing:
        listed = ", ".join(str(size) for size in disagreeing[:4])
        report.remark(f"actual config left out where NCCL's log disagrees, at sizes {listed}")
    request = _request(run, collective, options, report)
    if request["is_default"] and not (run.settings or run.nccl.settings):
        report.remark(
            "the output shows no NCCL_* setting: taken as NCCL's own choice (say what was forced "
            "with the options algorithm, protocol, num_channels)"
        )
    version = options.nccl_version
    columns = {
        "collective": collective.wire,
        "gpu": _one({r.gpu for r in run.ranks if r.gpu}, "GPU model", report) or options.gpu,
        "nccl_version": _one(run.nccl.versions, "NCCL version", report)
        or (None if version is None else str(NcclVersion.parse(version))),
        "nccl_tests_version": _one(run.tests_versions, "nccl-tests version", report),
        "cuda_version": _one(run.nccl.cuda_versions, "CUDA version", report),
        **request,
        "num_ranks": num_ranks,
        "num_hosts": len({r.host for r in run.ranks}) if is_alone and num_ranks else None,
        "num_nodes": num_nodes,
        "hosts": hosts_of(run.ranks) if is_alone else None,
        "ranks_per_node": _per_node(num_ranks, num_nodes),
        # Communicators that ran at the same time (NCCL_TESTS_SPLIT).
        "num_comms": len(groups) if len(groups) > 1 and run.copies == 1 else None,
    }
    if run.out_of_bounds:
        columns["reason"] = f"the run reports {run.out_of_bounds} values out of bounds"
        report.remark(f"a run reports {run.out_of_bounds} values out of bounds (FAILED)")
    return Facts(columns, choices)


def hosts_of(ranks: Iterable[RankLine]) -> str | None:
    """The hosts in rank order, as a short host list; None without any."""
    return host_list(line.host for line in sorted(ranks, key=lambda line: line.rank)) or None


def _per_node(num_ranks: int | None, num_nodes: int | None) -> int | None:
    """Ranks per node, when all nodes have equally many; else None."""
    if not num_ranks or not num_nodes or num_ranks % num_nodes:
        return None
    return num_ranks // num_nodes


def _only(values: Collection[Any]) -> Any:
    """The one value; None where there is none, or several."""
    return next(iter(values)) if len(values) == 1 else None


def _one(values: set[str], what: str, report: FileReport) -> str | None:
    """The one value; where the output names several, the report says so."""
    if len(values) > 1:
        listed = ", ".join(sorted(values)[:4])
        report.remark(f"{what} left out: the output names several ({listed})")
    one: str | None = _only(values)
    return one


def _collective(
    run: Run,
    of_rows: Row | None,
    options: ImportOptions,
    report: FileReport,
    started: Collective | None,
) -> Collective | None:
    asked = None if options.collective is None else Collective.parse(options.collective)
    if run.programs:
        found = collective_of_program(run.programs[0])
        if found is None:
            report.remark(f"'{run.programs[0]}' is no collective of NCCL's that DynamICCL tunes")
        elif asked not in {None, found}:
            report.remark(f"the output says {found.wire}; the option's {asked} was not used")
        return found
    if started is not None or of_rows is None:
        return asked if started is None else started
    possible = _by_columns(of_rows)
    if asked is None:
        return _unnamed(possible, report)
    if asked not in possible:
        report.contradiction = f"the columns are {_listed(possible)}, not of {asked.wire}"
        return None
    return asked


def _by_columns(of_rows: Row) -> list[Collective]:
    """The collectives that rows can be of, by their columns and the ratio of their bandwidths."""
    operations = set(of_rows["operations"])
    found = _BY_COLUMNS[not operations <= {None, "none"}, bool(of_rows["has_root"])]
    if of_rows["has_root"] and operations == {None}:
        # Older columns, when nothing but Broadcast had a root and no operation.
        found = (Collective.Broadcast,)
    return [
        each
        for each in found
        if any(_ratio_fits(of_rows, each.bus_factor(ranks)) for ranks in range(1, _ALIKE_RANKS))
    ]


def _ratio_fits(of_rows: Row, factor: float) -> bool:
    """Whether bus / algorithm bandwidth is `factor`, where they have digits enough to tell."""
    best = of_rows["best"] or {}
    algbw, busbw = (float(best.get(name) or 0.0) for name in _BANDWIDTHS)
    return algbw < _MIN_BANDWIDTH or abs(busbw - algbw * factor) <= 0.01 + 0.01 * algbw


def _unnamed(possible: Sequence[Collective], report: FileReport) -> Collective | None:
    if len(possible) == 1:
        report.remark(f"collective {possible[0].wire} follows from the columns")
        return possible[0]
    name = PurePath(report.path).name
    found = collective_in_file_name(name)
    if found is not None and found not in possible:
        report.remark(f"the file's name says {found.wire}, but the columns are {_listed(possible)}")
        return None
    if found is not None:
        report.remark(f"collective {found.wire} taken from the file's name")
    return found


def collective_in_file_name(name: str) -> Collective | None:
    """The one collective that a file name contains, or None when it is none or several.

    >>> collective_in_file_name("superbenchmark_reducescatter.log").wire
    'ReduceScatter'
    >>> collective_in_file_name("allreduce_and_allgather.log") is None
    True
    """
    found = {Collective.parse(m.group(1)) for m in _IN_FILE_NAME.finditer(name.lower())}
    return found.pop() if len(found) == 1 else None


def _listed(possible: Sequence[Collective]) -> str:
    names = " or ".join(sorted(each.wire for each in possible))
    return f"of {names}" if names else "of no collective with such bandwidths"


def _num_ranks(run: Run, options: ImportOptions, report: FileReport) -> int | None:
    if run.ranks:
        return _listed_ranks(run, report)
    told: int | None = _only(run.nccl.num_ranks) or options.num_ranks
    of_process = _only(run.per_process)
    if told is None and of_process is not None and _one_process(run, of_process):
        return int(of_process)
    return told


def _one_process(run: Run, num_ranks: int) -> bool:
    """Whether one process drove all ranks: no sign of a launcher, and GPUs for all of them."""
    launched = run.launched or run.stream or run.copies > 1
    return num_ranks == 1 or (not launched and num_ranks in run.per_process)


def _listed_ranks(run: Run, report: FileReport) -> int | None:
    """Ranks of one communicator from the `# Rank` lines, unless a line is missing.

    With NCCL_TESTS_SPLIT there are several groups, each a communicator. Outputs of several
    processes in one another list every rank more than once.
    """
    groups = Counter(group for group, _ in {(line.group, line.rank) for line in run.ranks})
    ranks = {line.rank for line in run.ranks}
    per_process = next(iter(run.per_process), 1) or 1
    count = _only(set(groups.values()))
    whole = len(groups) > 1 or ranks == set(range(len(ranks)))
    if count and whole and len(ranks) % per_process == 0:
        return int(count)
    report.remark("number of ranks left out: the list of ranks is not complete")
    return None


def _checked_ranks(
    of_rows: Row, num_ranks: int, collective: Collective, report: FileReport
) -> int | None:
    """The number of ranks, or None when the run's own bandwidths contradict it."""
    if num_ranks > 0 and _ratio_fits(of_rows, collective.bus_factor(num_ranks)):
        return num_ranks
    if num_ranks > 0:
        algbw, busbw = (of_rows["best"][name] for name in _BANDWIDTHS)
        expected = algbw * collective.bus_factor(num_ranks)
        report.remark(
            f"number of ranks left out: {num_ranks} would make busbw {expected:.2f} of algbw "
            f"{algbw}, and the output says {busbw}"
        )
    return None


def _num_nodes(
    run: Run, num_ranks: int | None, options: ImportOptions, report: FileReport
) -> int | None:
    """NCCL's nNodes: from its log, from the caller, or the number of hosts."""
    if len(run.nccl.num_nodes) == 1:
        return next(iter(run.nccl.num_nodes))
    if options.num_nodes is not None or num_ranks is None:
        return options.num_nodes
    if not run.ranks:
        return 1 if _one_process(run, num_ranks) else None
    # Of several communicators each has so many hosts, if all have equally many.
    groups: dict[int, set[str]] = {}
    for line in run.ranks:
        groups.setdefault(line.group, set()).add(line.host)
    hosts: int | None = _only({len(each) for each in groups.values()})
    gpus = {(line.host, line.device, line.bus_id) for line in run.ranks}
    if run.copies > 1 or hosts is None or len(gpus) == len(run.ranks):
        return hosts if run.copies == 1 else None
    if _are_apart(run):
        report.remark(
            "ranks of one host show the same GPU and have processes of their own: taken for GPUs "
            "apart, each alone in its process's sight, and hosts for nodes (else say --nodes)"
        )
        return hosts
    report.remark(
        "number of nodes left out: ranks share a GPU, so hosts are not NCCL's nodes; say --nodes"
    )
    return None


def _are_apart(run: Run) -> bool:
    """Whether ranks that seem to share a GPU have one each (each sees only its own).

    Where the bus id names the PCI domain too, equal ids are one GPU. Before nccl-tests 2.15 it is
    the bus alone, which each of the GPUs of a GH200 node calls 1.

    NCCL refuses two ranks on a GPU of one host ("Duplicate GPU detected", `src/init.cc`, 2.10 to
    2.30), unless NCCL_HOSTID makes hosts of them. Without a sign of that, as many processes on
    each host as a machine may have GPUs are what a job with one visible GPU for each rank prints.
    """
    if run.nccl.names_host_ids or any(":" in line.bus_id for line in run.ranks):
        return False
    pids = {(line.host, line.pid) for line in run.ranks if line.pid is not None}
    per_host = set(Counter(line.host for line in run.ranks).values())
    return len(pids) == len(run.ranks) and len(per_host) == 1 and max(per_host) <= _MOST_GPUS


def _request(run: Run, collective: Collective, options: ImportOptions, report: FileReport) -> Row:
    """The requested config and the profile: as the shell and NCCL's log say, else the caller."""
    settings = dict(run.settings)
    add_settings(settings, run.nccl.settings)
    columns = requested_by(settings, collective, sorted(run.words))
    algorithm, protocol = options.algorithm, options.protocol
    for name, asked in (
        ("requested_algorithm", algorithm and Algorithm.parse(algorithm).wire),
        ("requested_protocol", protocol and Protocol.parse(protocol).wire),
        ("requested_num_channels", options.num_channels),
    ):
        if asked and not columns[name]:
            columns |= {name: asked, "is_default": False}
    if options.launch_profile is not None:
        columns["launch_profile"] = options.launch_profile
    for name, value in settings.items():
        if value is None:
            report.remark(f"{name} cannot be read, or is two things: the config is not known")
    return {**columns, "default_scope": default_scope(columns["launch_profile"])}
