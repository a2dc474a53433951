"""Reads what nccl-tests left into measurements: text or JSON, and NCCL's log beside it.

    text ── output.py ──> rows (dicts) and runs ── facts.py ──> columns of each run ──> measurements
    JSON ── read_json ──> the same

The rows of a launch of ours stay dicts (`parse_text`, `parse_json`). Those of a file to import
become columns a chunk at a time (`read_text`, `read_json_file`), since there may be millions. What
NCCL's log tells of its costs, and of a job without a benchmark of its decisions, comes with them.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa

from dynamiccl.collect.columns import RUN, Row, Torn
from dynamiccl.collect.facts import Facts, ImportOptions, actual, group_facts, resolve_all
from dynamiccl.collect.nccl_log import cost_rows, decision_rows
from dynamiccl.collect.output import FileReport, RankLine, Rejected, Run, TextRuns
from dynamiccl.collect.settings import kept
from dynamiccl.datasets.rows import columns_table, measurements_table, trial_id
from dynamiccl.datasets.schema import COSTS, DECISIONS, QUIET, Source, Statistic, Status
from dynamiccl.errors import CorruptFile, OutputError, UnknownName
from dynamiccl.nccl import Collective, NcclVersion
from dynamiccl.sizes import MAX_SIZE_BITS

#: Rows of one table, by the kind of table; parts of a data set.
Part = tuple[str, pa.Table]

#: NCCL's log of the same run, beside the output: `x.log` and `x.nccl_debug.log`.
_COMPANION: Final = ".nccl_debug"
#: Rows in one part; all columns of them are about 50 MiB.
PART_ROWS: Final = 131_072
#: Rows that are held as dicts before they become columns.
CHUNK_ROWS: Final = 32_768
#: Versions of nccl-tests' JSON that are known.
JSON_VERSIONS: Final = (1, 2, 3)
_JSON_TIMES: Final = (
    ("min_us", "time_min_us"),
    ("max_us", "time_max_us"),
    ("p99_us", "time_p99_us"),
    ("cv_pct", "time_cv_percent"),
)

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
#: Columns that an output may fill with what is no number.
_FINITE: Final = ("algbw_gbytes_per_s", "busbw_gbytes_per_s", *list(_OPTIONAL)[:4])
#: What makes two rows of a run repeats of one measurement.
_CELL: Final = (RUN, "size_bytes", "datatype", "in_place")


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
    companion = path.with_name(f"{path.stem}{_COMPANION}{path.suffix}")
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
        {RUN: number, "size_bytes": size, **actual(choice)}
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
    known = {**base, **group_facts(told, options, report)}
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


def read_json(path: Path, report: FileReport) -> tuple[list[Row], Run]:
    """The rows of nccl-tests' JSON output (`-J`, since 2.17.3), versions 1 to 3, and their run.

    Written after the format in nccl-tests' sources (`src/util.cu`, 2.17.3 to 2.19.6): booleans are
    the strings "true" and "false", a number that is not one is "nan", version 1 misspells
    `average_bus_bandwidith`, and a crash leaves the text cut off.

    Raises CorruptFile with the byte offset when the text is cut off or no JSON, and OutputError
    when it is another kind of JSON or a version that is not known.
    """
    content = _json_content(path)
    run = _json_run(content)
    rows: list[Row] = []
    for number, result in enumerate(content["results"]):
        try:
            halves = _json_halves(result)
        except Torn as error:
            told = f"results[{number}]: {error}"
            report.reject(number + 1, told, json.dumps(result)[:200])
            continue
        report.rows_read += 1
        run.rows += 1
        if _whole(result["size"]) == 0:
            report.drop("size 0")
            continue
        if not halves:
            report.drop("no time")
        rows += halves
    for key in ("average_bus_bandwidth", "average_bus_bandwidith"):
        if str(_object(content.get(key)).get("okay")).lower() == "false":
            report.remark("average bus bandwidth below NCCL_TESTS_MIN_BW (FAILED)")
    return rows, run


def _json_content(path: Path) -> dict[str, Any]:
    text = path.read_bytes().decode("utf-8", errors="replace")
    try:
        content = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode())
        raise CorruptFile(
            f"{path} is not whole JSON: {error.msg} at byte {offset} of {len(text.encode())}; a "
            "crashed benchmark leaves it cut off: import its text output instead"
        ) from error
    except RecursionError as error:
        raise CorruptFile(f"{path} is nested too deeply to be a benchmark's output") from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), list):
        raise OutputError(f"{path} is JSON, but not of nccl-tests: it has no list 'results'")
    version = content.get("version")
    if version not in JSON_VERSIONS:
        raise OutputError(
            f"{path} is nccl-tests JSON version {version!r}; known are "
            f"{', '.join(map(str, JSON_VERSIONS))}: import the text output instead"
        )
    return content


def _json_run(content: Mapping[str, Any]) -> Run:
    run = Run(0)
    arguments, config = _list(content.get("args")), _object(content.get("config"))
    if arguments:
        run.name_program(f"{arguments[0]} ")
    # `env` is the whole environment of whoever ran it: only the listed settings are kept.
    environment = [str(item).partition("=") for item in _list(content.get("env"))]
    run.settings = kept((name, value) for name, _, value in environment)
    run.nccl.names_host_ids = any(name == "NCCL_HOSTID" for name, _, _ in environment)
    with suppress(UnknownName):
        run.nccl.versions.add(str(NcclVersion.parse(str(content.get("nccl_version")))))
    run.out_of_bounds = _whole(_object(content.get("out_of_bounds")).get("count")) or 0
    # As the text has them.
    run.note(
        f"nThread {config.get('nthreads')} nGpus {config.get('ngpus')} minBytes "
        f"agg iters: {config.get('aggregated_iterations')} graph: {config.get('graph')} "
        f"unalign: {config.get('unalign')}",
        0,
    )
    if str(config.get("blocking_collectives")).lower() == "true":
        run.words.add("blocking")
    run.ranks = [_json_rank(_object(device)) for device in _list(config.get("devices")) if device]
    process = next(iter(run.per_process), 1)
    if len(run.ranks) == 1 and 1 < process <= 1024:
        # Without MPI only rank 0 is listed; the process drives consecutive devices of its host.
        only = run.ranks[0]
        run.ranks = [replace(only, rank=i, device=only.device + i) for i in range(process)]
    return run


def _json_rank(device: Mapping[str, Any]) -> RankLine:
    return RankLine(
        _whole(device.get("rank")) or 0,
        _whole(device.get("group")) or 0,
        str(device.get("hostname")),
        _whole(device.get("device")) or 0,
        str(device.get("device_info") or ""),
        str(device.get("device_hex") or ""),
        _whole(device.get("pid")),
    )


def _json_halves(result: object) -> list[Row]:
    if not isinstance(result, dict):
        raise Torn("not an object")
    size, root = _whole(result.get("size")), _whole(result.get("root"))
    if size is None or size < 0 or size >> MAX_SIZE_BITS:
        raise Torn(f"size {result.get('size')!r} is no number of bytes")
    if root is not None and not -1 <= root < 1 << 30:
        raise Torn(f"root {root} is no rank")
    words = (result.get("type"), result.get("redop"))
    datatype, redop = (word if isinstance(word, str) else None for word in words)
    halves = []
    for in_place, name in ((False, "out_of_place"), (True, "in_place")):
        timing, each = _object(result.get(name)), _object(result.get(f"{name}_per_iter"))
        if "cpu_time" in timing:
            raise Torn("cpu_time (-C) is the cost of the launch and not the time of the call")
        time_us, wrong = _number(timing.get("time")), _whole(timing.get("nwrong"))
        if not time_us or time_us < 0.0:
            continue
        half = {
            RUN: 0,
            "source_line": None,
            "size_bytes": size,
            "datatype": datatype,
            "reduction_op": redop,
            "root": root,
            "in_place": in_place,
            "time_us": time_us,
            "algbw_gbytes_per_s": _number(timing.get("alg_bw")),
            "busbw_gbytes_per_s": _number(timing.get("bus_bw")),
            "wrong_values": wrong if wrong is not None and 0 <= wrong < 1 << 62 else None,
            **{column: _number(each.get(key)) for key, column in _JSON_TIMES},
            "iteration_times_us": _numbers(each.get("times_us")),
            "process_times_us": _process_means(each.get("per_process_max_times_us")),
        }
        halves.append(half)
    return halves


def _process_means(listed: object) -> list[float | None] | None:
    """The mean time of each process over its iterations."""
    means: list[float | None] = []
    for process in _list(listed):
        known = [time for time in _numbers(process) or () if time is not None]
        means.append(sum(known) / len(known) if known else None)
    return means or None


def _numbers(listed: object) -> list[float | None] | None:
    return [_number(value) for value in listed] if isinstance(listed, list) else None


def _number(value: object) -> float | None:
    """A finite number, or None for what nccl-tests writes as "nan", null and everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: object) -> int | None:
    number = _number(value)
    if number is None or number != int(number):
        return None
    return value if isinstance(value, int) else int(number)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
