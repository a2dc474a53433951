"""Makes measurements of what nccl-tests left, text or JSON.

    text ── output.py ──> rows (dicts) and runs ── facts of each run ──> measurements, NCCL's costs
    JSON ── read_json ──> the same

The rule is that nothing is guessed. A fact needs one value; where the output gives two, or a
number that its own bandwidths contradict, the column stays null and the report says why. The
collective comes from, in this order:
1. the program's name inside the output (header, tail, or the one command shown);
2. the columns and bandwidths, where they can be of one collective only;
3. the option `collective`, unless the columns contradict it: then the run is refused;
4. the name of the file, when it contains exactly one collective's name. This is reported.

Rows become columns a chunk at a time, since there may be millions.
"""

import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import polars as pl
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynamiccl.collect.nccl_log import (
    add_settings,
    cost_rows,
    named,
    requested_by,
)
from dynamiccl.collect.output import (
    PER_ITERATION,
    RUN,
    FileReport,
    Row,
    Run,
    TextRuns,
    hosts_of,
    read_json,
)
from dynamiccl.datasets.rows import columns_table, trial_id
from dynamiccl.datasets.schema import COSTS, DEFAULT_PROFILE, QUIET, DefaultScope, Source, Status
from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import MissingPath, OutputError, UserError
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.toml_table import first_problem

#: Rows of one table, by the kind of table; parts of a data set.
Part = tuple[str, pa.Table]

#: Rows in one part; all columns of them are about 50 MiB.
PART_ROWS: Final = 131_072
#: Rows that are held as dicts before they become columns.
CHUNK_ROWS: Final = 32_768

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
    **dict.fromkeys(PER_ITERATION, pl.Float64),
    "iteration_times_us": pl.List(pl.Float64),
    "process_times_us": pl.List(pl.Float64),
}
_BANDWIDTHS: Final = ("algbw_gbytes_per_s", "busbw_gbytes_per_s")
#: Columns that an output may fill with what is no number.
_FINITE: Final = (*_BANDWIDTHS, *PER_ITERATION)
#: What makes two rows of a run repeats of one measurement.
_CELL: Final = (RUN, "size_bytes", "datatype", "in_place")

#: Bandwidths below this have too few digits for a ratio.
_MIN_BANDWIDTH: Final = 1.0
#: From so many ranks on the ratios of bus to algorithm bandwidth are alike.
_ALIKE_RANKS: Final = 257
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

        [systems."b300-nvlink"]
        name = "b300"                  # optional: rename the system
        compute_capability = 10.3
        nvswitch = true
        nic_kind = "none"

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


# --- One file ---


def read_file(
    path: Path, base: Mapping[str, Any], options: ImportOptions, report: FileReport
) -> Iterator[Part]:
    """Yield what one file tells: text of nccl-tests or a log of NCCL's, or JSON (`report.format`).

    Raises OutputError, with the line that says why, when it holds no row and no cost table, and
    what `read_json` raises.
    """
    if report.format == Source.NCCL_TESTS_JSON.value:
        halves, run = read_json(path, report)
        yield from _parts(_gathered([halves]), [run], base, options, report)
        return
    text_runs = TextRuns(report)
    with path.open(encoding="utf-8", errors="replace") as lines:
        rows = _gathered(text_runs.rows(lines))
    if not report.rows_read:
        if not any(run.nccl.costs for run in text_runs.runs):
            raise OutputError(_no_row(path, text_runs.runs, report))
        report.remark("no benchmark row; what NCCL logs of its costs is taken")
    yield from _parts(rows, text_runs.runs, base, options, report)


def _no_row(path: Path, runs: Iterable[Run], report: FileReport) -> str:
    failures = [run.failure for run in runs if run.failure is not None]
    if failures:
        number, line = min(failures)
        return f"{path}:{number}: no benchmark row; the run failed: {line[:300]}"
    if report.rejected:
        return f"{path} holds no whole benchmark row; first of the torn ones: {report.rejected[0]}"
    return (
        f"{path} holds no row of nccl-tests (size, count, type, ..., time, algbw, busbw); give the "
        "text that an nccl-tests program prints, its -J JSON, or a tidy CSV file"
    )


def _parts(
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
    resolver = _Facts(options, report)
    known = resolver.of_runs(rows, runs)
    with_rows = [run.number for run in runs if run.rows]
    for number, facts in known.items():
        place = f".{with_rows.index(number) + 1}" if len(with_rows) > 1 else ""
        known[number] = {**base, "source": report.format, **facts, "run": f"{base['run']}{place}"}
    rows = rows.filter(pl.col(RUN).is_in(list(known)))
    rows = rows.with_columns(repeat=pl.int_range(pl.len()).over(_CELL))
    choices = _choices_of_runs(runs, known, report)
    for part in rows.iter_slices(PART_ROWS):
        if part.height:
            yield "measurements", _table(part, known, choices)
    costs: list[Row] = []
    for run in runs:
        if run.nccl.costs:
            told = known.get(run.number) or {**base, **resolver.facts(run, None, None)}
            costs += [cell for cell in _costs_of(run, told, report) if cell not in costs]
    if costs:
        report.costs = len(costs)
        yield "costs", pa.Table.from_pylist(costs, schema=COSTS)


def _gathered(rows: Iterable[list[Row]]) -> pl.DataFrame:
    """Rows as columns; the dicts live no longer than a chunk."""
    chunks, pending = list[pl.DataFrame](), list[Row]()
    for several in rows:
        pending += several
        if len(pending) >= CHUNK_ROWS:
            chunks.append(_frame(pending))
            pending = []
    return pl.concat([*chunks, _frame(pending)], how="diagonal")


def _frame(rows: list[Row]) -> pl.DataFrame:
    has_more = max(map(len, rows), default=0) > len(_COLUMNS)
    return pl.DataFrame(rows, schema={**_COLUMNS, **_OPTIONAL} if has_more else _COLUMNS)


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


def _table(rows: pl.DataFrame, known: Mapping[int, Row], choices: pl.DataFrame) -> pa.Table:
    """Measurements of some rows, with the columns of their run and what NCCL ran."""
    quiet = {"interference_kind": QUIET, "interference_level": 0.0}
    rows = with_trials(rows, _CELL, lambda cell: {**known[cell[RUN]], **cell, **quiet})
    told = [{RUN: number, **facts} for number, facts in known.items()]
    of_runs = pl.DataFrame(told, schema_overrides={RUN: pl.UInt32}, infer_schema_length=None)
    whole = rows.join(of_runs, on=RUN, how="inner", maintain_order="left")
    whole = whole.join(choices, on=[RUN, "size_bytes"], how="left", maintain_order="left")
    is_wrong = pl.col("wrong_values").fill_null(0) > 0
    ok, wrong = pl.lit(Status.OK.value), pl.lit(Status.WRONG_VALUES.value)
    whole = whole.with_columns(
        pl.col(pl.Categorical).cast(pl.String),
        *(pl.when(pl.col(name).is_finite()).then(name) for name in _FINITE if name in rows),
        verified=pl.col("actual_algorithm").is_not_null(),
        status=pl.when(is_wrong).then(wrong).otherwise(ok),
        interference_level=0.0,
    )
    return as_measurements(whole.drop(RUN))


def as_measurements(rows: pl.DataFrame) -> pa.Table:
    """A measurements table of columns of the schema; a missing one is neutral or null."""
    arrow = rows.to_arrow()
    return columns_table({name: arrow[name] for name in arrow.column_names}, arrow.num_rows)


def _costs_of(run: Run, known: Mapping[str, Any], report: FileReport) -> list[Row]:
    """NCCL's cost table of a run, if exactly one was logged of NCCL's own choice."""
    table = run.nccl.cost_table()
    if table and known["is_default"]:
        return cost_rows(table, known)
    forced = "it is of what was forced, not NCCL's own"
    why = forced if table else "communicators logged different ones"
    report.remark(f"NCCL's cost table left out: {why}")
    return []


# --- What is known of a run ---


class _Facts:
    """The columns that all rows of a run share.

    A run that cannot be told what it is of is left out, and the report counts its rows; so it is
    with one that failed before its first.
    """

    def __init__(self, options: ImportOptions, report: FileReport) -> None:
        self._options, self._report = options, report
        self._remark = report.remark

    def of_runs(self, rows: pl.DataFrame, runs: Iterable[Run]) -> dict[int, Row]:
        """The columns by the number of the run."""
        known: dict[int, Row] = {}
        for run in runs:
            if not run.rows:
                if run.began and run.failure is not None:
                    number, line = run.failure
                    self._remark(f"line {number}: a run failed before its first row: {line[:200]}")
                continue
            is_alone = rows[RUN].min() == rows[RUN].max() == run.number
            mine = rows if is_alone else rows.filter(pl.col(RUN) == run.number)
            if mine.is_empty():
                continue
            told = _evidence(mine)
            found = self._collective(run, told)
            if max(run.marks.values(), default=1) > 1:
                found = "several processes wrote into one output: import that of each by itself"
            if isinstance(found, Collective):
                known[run.number] = self.facts(run, told, found)
            else:
                self._report.drop(found, mine["source_line"].n_unique())
        return known

    def facts(self, run: Run, of_rows: Row | None, collective: Collective | None) -> Row:
        """The columns of a run; without rows, those that NCCL's log tells of its communicator."""
        option = self._options.nccl_version
        version = option and str(NcclVersion.parse(option))
        num_ranks = self._num_ranks(run, of_rows, collective)
        num_nodes = self._num_nodes(run, num_ranks)
        request = self._request(run, collective)
        if of_rows and request["is_default"] and not (run.settings or run.nccl.settings):
            self._remark(
                "the output shows no NCCL_* setting: taken as NCCL's own choice (say what was "
                "forced with the options algorithm, protocol, num_channels)"
            )
        out_of_bounds = None
        if run.out_of_bounds:
            out_of_bounds = f"the run reports {run.out_of_bounds} values out of bounds"
            self._remark(out_of_bounds)
        return {
            "collective": None if collective is None else collective.wire,
            "gpu": self._one({r.gpu for r in run.ranks if r.gpu}, "GPU model") or self._options.gpu,
            "nccl_version": self._one(run.nccl.versions, "NCCL version") or version,
            "nccl_tests_version": self._one(run.tests_versions, "nccl-tests version"),
            "cuda_version": self._one(run.nccl.cuda_versions, "CUDA version"),
            **request,
            "num_ranks": num_ranks,
            "num_hosts": len({r.host for r in run.ranks}) if run.ranks and num_ranks else None,
            "num_nodes": num_nodes,
            "hosts": hosts_of(run.ranks) if len({r.group for r in run.ranks}) == 1 else None,
            "ranks_per_node": ranks_per_node(num_ranks, num_nodes),
            "reason": out_of_bounds,
        }

    def _collective(self, run: Run, of_rows: Row) -> Collective | str:
        """What a run measured, or why that is not known."""
        option = self._options.collective
        asked = None if option is None else Collective.parse(option)
        program = run.program or (min(run.commands) if len(run.commands) == 1 else None)
        if program is not None:
            told = named(Collective, program)
            if told is None:
                return f"'{program}' is no collective of NCCL's that DynamICCL tunes"
            if asked not in {None, told}:
                self._remark(f"the output says {told.wire}; the option's {asked} was not used")
            return told
        possible = _by_columns(of_rows)
        if asked is not None:
            names = _listed(possible) or "no collective with such bandwidths"
            contradicted = f"the columns are of {names}, not of {asked.wire}: correct --collective"
            return asked if asked in possible else contradicted
        names_in_file = {m[1] for m in _IN_FILE_NAME.finditer(Path(self._report.path).name.lower())}
        fitting = {Collective.parse(name) for name in names_in_file}.intersection(possible)
        if len(possible) == 1 or (len(fitting) == len(names_in_file) == 1):
            [found] = possible if len(possible) == 1 else fitting
            how = "follows from the columns" if len(possible) == 1 else "taken from the file's name"
            self._remark(f"collective {found.wire} {how}")
            return found
        return f"collective not known: name it with --collective ({_listed(Collective)})"

    def _num_ranks(
        self, run: Run, of_rows: Row | None, collective: Collective | None
    ) -> int | None:
        """The number of ranks, unless the list lacks one or the bandwidths contradict it."""
        ranks = {line.rank for line in run.ranks}
        found: int | None = len(ranks) or self._one(run.nccl.num_ranks, "number of ranks")
        found = found or self._options.num_ranks
        if found is None:
            self._remark("number of ranks not known: the output lists none; say --ranks, --nodes")
        elif any(line.group != run.ranks[0].group for line in run.ranks):
            self._remark("number of ranks left out: several communicators ran at the same time")
        elif ranks and not len(ranks) == len(run.ranks) == max(ranks) + 1:
            self._remark("number of ranks left out: the list of ranks is not complete")
        elif of_rows and collective is not None and not _ratio_fits(of_rows, collective, found):
            algbw, busbw = (of_rows[name] for name in _BANDWIDTHS)
            expected = algbw * collective.bus_factor(found)
            self._remark(
                f"number of ranks left out: {found} would make busbw {expected:.2f} of algbw "
                f"{algbw}, and the output says {busbw}"
            )
        else:
            return found
        return None

    def _num_nodes(self, run: Run, num_ranks: int | None) -> int | None:
        """NCCL's nNodes: from its log, from the caller, or the number of hosts.

        Ranks that seem to share a GPU have host ids of their own (NCCL_HOSTID), or each sees its
        own GPU only: then hosts may not be nodes.
        """
        told: int | None = self._one(run.nccl.num_nodes, "number of nodes")
        told = told or self._options.num_nodes
        if told is not None or num_ranks is None:
            return told
        if not run.ranks:
            return 1 if num_ranks == 1 else None
        gpus = {(line.host, line.device, line.bus_id) for line in run.ranks}
        if len(gpus) < len(run.ranks):
            self._remark(
                "number of nodes left out: ranks show the same GPU, so hosts may not be NCCL's "
                "nodes; say --nodes"
            )
            return None
        return len({line.host for line in run.ranks})

    def _request(self, run: Run, collective: Collective | None) -> Row:
        """The requested config and the profile, as shell, NCCL's log, or else the caller say."""
        settings = dict(run.settings)
        add_settings(settings, run.nccl.settings)
        # The costs of a job's log are of all collectives; AllReduce stands for them.
        asked_of = Collective.AllReduce if collective is None else collective
        columns = requested_by(settings, asked_of, sorted(run.words))
        algorithm, protocol = self._options.algorithm, self._options.protocol
        told = {
            "requested_algorithm": algorithm and Algorithm.parse(algorithm).wire,
            "requested_protocol": protocol and Protocol.parse(protocol).wire,
            "requested_num_channels": self._options.num_channels,
        }
        asked = {name: value for name, value in told.items() if value and not columns[name]}
        columns |= {**asked, "is_default": columns["is_default"] and not asked}
        if self._options.launch_profile is not None:
            columns["launch_profile"] = self._options.launch_profile
        for name, value in settings.items():
            if value is None:
                self._remark(f"{name} cannot be read, or is two things: the config is not known")
        is_untouched = columns["launch_profile"] == DEFAULT_PROFILE
        scope = DefaultScope.UNTOUCHED if is_untouched else DefaultScope.PROFILE
        return {**columns, "default_scope": scope.value}

    def _one(self, values: Collection[Any], what: str) -> Any:
        """The one value; None where there is none, or several, which the report says."""
        if len(values) > 1:
            listed = ", ".join(map(str, sorted(values)[:4]))
            self._remark(f"{what} left out: the output names several ({listed})")
        return next(iter(values)) if len(values) == 1 else None


def ranks_per_node(num_ranks: int | None, num_nodes: int | None) -> int | None:
    """When all nodes have equally many; else None."""
    if not num_ranks or not num_nodes or num_ranks % num_nodes:
        return None
    return num_ranks // num_nodes


def _evidence(rows: pl.DataFrame) -> Row:
    """What the rows of a run show: operations, roots, and the bandwidths with the most digits."""
    # From 10^4 on bandwidths are printed without decimals.
    exact = rows.select(pl.when(pl.col(_BANDWIDTHS[0]) < 1e4).then(_BANDWIDTHS[0])).to_series()
    best = exact.arg_max()
    return {
        "operations": set(rows["reduction_op"].unique().cast(pl.String)),
        "has_root": bool((rows["root"] >= 0).any()),
        **{name: 0.0 if best is None else rows[name][best] or 0.0 for name in _BANDWIDTHS},
    }


def _listed(collectives: Iterable[Collective]) -> str:
    return " or ".join(sorted(each.wire for each in collectives))


def _by_columns(of_rows: Row) -> list[Collective]:
    """The collectives that rows can be of, by their columns and the ratio of their bandwidths."""
    operations = of_rows["operations"]
    found = _BY_COLUMNS[not operations <= {None, "none"}, of_rows["has_root"]]
    if of_rows["has_root"] and operations == {None}:
        # Older columns, when nothing but Broadcast had a root and no operation.
        found = (Collective.Broadcast,)
    ranks = range(1, _ALIKE_RANKS)
    return [each for each in found if any(_ratio_fits(of_rows, each, count) for count in ranks)]


def _ratio_fits(of_rows: Row, collective: Collective, num_ranks: int) -> bool:
    """Whether the bandwidths are of so many ranks, where they have digits enough to tell."""
    algbw, busbw = (float(of_rows[name]) for name in _BANDWIDTHS)
    expected = algbw * collective.bus_factor(num_ranks)
    return algbw < _MIN_BANDWIDTH or abs(busbw - expected) <= 0.01 + 0.01 * algbw


def _choices_of_runs(
    runs: Iterable[Run], known: Mapping[int, Row], report: FileReport
) -> pl.DataFrame:
    """What NCCL ran for each size of each run, where its log says so without contradiction."""
    found: list[tuple[Any, ...]] = []
    for run in runs:
        if run.number in known and run.nccl.calls:
            facts = known[run.number]
            collective = Collective.parse(facts["collective"])
            choices, disagreeing = run.nccl.choices(collective, facts["num_ranks"])
            if disagreeing:
                sizes = ", ".join(str(size) for size in disagreeing[:4])
                report.remark(
                    f"actual config left out where NCCL's log disagrees, at sizes {sizes}"
                )
            found += [(run.number, size, *choice) for size, choice in choices.items()]
    schema = {
        RUN: pl.UInt32,
        "size_bytes": pl.Int64,
        "actual_algorithm": pl.String,
        "actual_protocol": pl.String,
        "actual_num_channels": pl.Int64,
    }
    return pl.DataFrame(found, schema=schema, orient="row")
