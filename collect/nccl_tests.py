"""Makes measurements of what nccl-tests left, text or JSON.

    text ── output.py ──> rows (dicts) and runs ── facts of each run ──> measurements, NCCL's costs
    JSON ── read_json ──> the same

Nothing is guessed. A fact needs one value; where the output gives two, or a number that its own
bandwidths contradict, the column stays null and the report says why. The collective is told by the
program's name in the output, else the option, else columns and bandwidths of one only, else (with a
remark) the file's name. What the columns contradict is refused.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import polars as pl
import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dynamiccl.collect import nccl_log
from dynamiccl.collect.lines import opened, plain_lines
from dynamiccl.collect.output import (
    PER_ITERATION,
    ROW,
    RUN,
    FileReport,
    Row,
    Run,
    TextRuns,
    hosts_of,
    read_json,
)
from dynamiccl.datasets.schema import COSTS, MEASUREMENTS, QUIET, Source, Statistic, Status
from dynamiccl.datasets.store import check_slug, columns_table, scope_of, slug, trial_id
from dynamiccl.errors import MissingPath, OutputError, UserError
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.toml_table import Table, parse_toml
from dynamiccl.sizes import MAX_SIZE_BITS

Part = tuple[str, pa.Table]

#: About 25 MiB.
_PART_ROWS: Final = 65_536
CHUNK_ROWS: Final = 32_768

#: What repeats in nearly all rows is kept once.
_TYPES: Final[dict[str, Any]] = {
    **pl.Schema(MEASUREMENTS),
    **dict.fromkeys(("datatype", "reduction_op"), pl.Categorical),
    RUN: pl.UInt32,
}
_OPTIONAL: Final = (*PER_ITERATION, "iteration_times_us", "process_times_us")
_CHOICE: Final = (RUN, "size_bytes", "actual_algorithm", "actual_protocol", "actual_num_channels")
_BANDWIDTHS: Final = ("algbw_gbytes_per_s", "busbw_gbytes_per_s")
#: Equal here: repeats of one measurement.
_CELL: Final = (RUN, "size_bytes", "datatype", "in_place")

#: From here on the ratios of bus to algorithm bandwidth are alike.
_ALIKE_RANKS: Final = 257
#: (Has an operation, a root) -> collectives. Older releases print what one has; newer ones both,
#: `none` for no operation and -1 for no root. AlltoAll may have an empty column `redop`.
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


CollectiveName = Annotated[str, AfterValidator(lambda text: Collective.parse(text).wire)]
Count = Annotated[int, Field(ge=1, lt=1 << MAX_SIZE_BITS)]
_System = Annotated[str, AfterValidator(partial(check_slug, what="system"))]


class Known(BaseModel):
    """What a CSV, or the caller, says of rows. Raises UnknownName."""

    gpu: str | None = None
    num_nodes: Count | None = None
    nccl_version: Annotated[str, AfterValidator(lambda t: str(NcclVersion.parse(t)))] | None = None
    collective: CollectiveName | None = None
    algorithm: Annotated[str, AfterValidator(lambda t: Algorithm.parse(t).wire)] | None = None
    protocol: Annotated[str, AfterValidator(lambda t: Protocol.parse(t).wire)] | None = None
    num_channels: Count | None = None


class ImportOptions(Known):
    """What the caller knows; what a file itself says wins. Raises UserError, ValidationError."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Of a CSV it replaces the `system` column.
    system: _System | None = None
    #: None = the folder of a benchmark output, the stem of a CSV.
    sweep: Annotated[str, AfterValidator(partial(check_slug, what="sweep"))] | None = None
    num_ranks: Count | None = None
    systems_file: Path | None = None
    #: OURS=THEIRS,... of a CSV.
    foreign_columns: str | None = None

    @cached_property
    def facts(self) -> dict[str, Row]:
        """What the systems file says, by system; raises as `load_systems`."""
        return load_systems(self.systems_file)

    def columns(self, path: Path, described: str = "") -> Row:
        """System, sweep and facts of the system, for all rows of a file."""
        system = self.system or slug(described)
        folder = path.stem if described else path.resolve().parent.name
        facts = {"system": system, **self.facts.get(system, {})}
        return {"sweep": self.sweep or slug(folder), **facts}


class _SystemFacts(Table):
    model_config = ConfigDict(strict=True)

    #: New name, where the one in the data is unwieldy.
    name: _System | None = None
    compute_capability: float | None = Field(default=None, ge=3.0, le=100.0)
    nvlink_generation: int | None = Field(default=None, ge=0, le=100)
    nvlinks_per_gpu: int | None = Field(default=None, ge=0, le=1000)
    nvswitch: bool | None = None
    nic_kind: Literal["infiniband", "roce", "efa", "socket", "none"] | None = None
    nic_gbits_per_s: float | None = Field(default=None, ge=0.0)
    nics_per_node: int | None = Field(default=None, ge=0)
    cpu_vendor: Literal["intel", "amd", "arm"] | None = None


class _Systems(Table):
    systems: dict[str, _SystemFacts] = Field(default_factory=dict)


def load_systems(path: Path | None) -> dict[str, Row]:
    """Columns of each `[systems.NAME]`; raises MissingPath and UserError."""
    if path is None:
        return {}
    if not path.is_file():
        raise MissingPath("systems file", path, "write one with a [systems.NAME] table")
    try:
        found = parse_toml(_Systems, path.read_bytes(), where=str(path)).systems
    except UserError as error:
        keys = ", ".join(_SystemFacts.model_fields)
        raise UserError(f"{error}; write tables [systems.NAME] with any of {keys}") from error
    rows = {name: facts.model_dump(exclude_none=True) for name, facts in found.items()}
    return {name: {"system": row.pop("name", name), **row} for name, row in rows.items()}


def read_file(path: Path, run: str, options: ImportOptions, report: FileReport) -> Iterator[Part]:
    """Yield what a file tells. Raises OutputError without a row or costs, and as `read_json`."""
    base = {**options.columns(path), "run": run, "source_file": str(path)}
    if report.format == Source.NCCL_TESTS_JSON.value:
        halves, only = read_json(path, report)
        yield from _parts(_gathered([halves]), [only], base, options, report)
        return
    text_runs = TextRuns(report)
    with opened(path) as file:
        lines = plain_lines(file)
        rows = _gathered(chain(text_runs.rows(lines), _failed(text_runs.runs, report)))
    if not report.rows_read:
        if not any(run.nccl.costs for run in text_runs.runs):
            raise OutputError(_no_row(path, text_runs.runs, report))
        report.remark("no benchmark row; what NCCL logs of its costs is taken")
    yield from _parts(rows, text_runs.runs, base, options, report)


def _failed(runs: Sequence[Run], report: FileReport) -> Iterator[list[Row]]:
    """Rows without a time, for the sizes at which runs ended; the last one may go on."""
    for run in runs if report.rows_read else ():
        line = None if run.failure is None else run.failure[0]
        is_cut = bool(run.marks) and (run.most_bytes is not None or not (run.rows or run.torn))
        if is_cut and run.next_size and line is None and run is runs[-1]:
            report.remark(f"no end, and nothing from {run.next_size} bytes on: taken as going on")
        elif (line is not None or is_cut) and run.next_size:
            yield [{RUN: run.number, "source_line": line, "size_bytes": run.next_size}]


def _no_row(path: Path, runs: Sequence[Run], report: FileReport) -> str:
    failures = [run.failure for run in runs if run.failure is not None]
    if failures:
        number, line = min(failures)
        return f"{path}:{number}: no benchmark row; the run failed: {line[:300]}"
    if calls := sum(len(run.nccl.calls) for run in runs):
        return (
            f"{path} is NCCL's log of a job: {calls} calls with the config that ran and no time, "
            "and no cost table (NCCL_DEBUG_SUBSYS=INIT,TUNING): no measurement can be made of it"
        )
    torn = f", and this torn one: {report.rejected[0]}" if report.rejected else ""
    return (
        f"{path} holds no row of nccl-tests (size, count, type, ..., time, algbw, busbw){torn}; "
        "give the text that an nccl-tests program prints, its -J JSON, or a tidy CSV file"
    )


def _gathered(rows: Iterable[list[Row]]) -> pl.DataFrame:
    halves, chunks = chain.from_iterable(rows), list[pl.DataFrame]()
    while (chunk := list(islice(halves, CHUNK_ROWS))) or not chunks:
        if any("compute_alone_tflops" in half for half in chunk):
            raise OutputError(
                "these calls ran beside matrix products (dynamiccl.collect.beside), and no output "
                "says of which edge; 'dynamiccl-collect run' makes rows of such a launch"
            )
        has_more = any(len(half) > len(ROW) for half in chunk)
        names = (*ROW, *_OPTIONAL) if has_more else ROW
        chunks.append(pl.DataFrame(chunk, schema={name: _TYPES[name] for name in names}))
    return pl.concat(chunks, how="diagonal")


def _parts(
    rows: pl.DataFrame, runs: Sequence[Run], base: Row, options: ImportOptions, report: FileReport
) -> Iterator[Part]:
    """Yield the measurements of known runs in tables of `_PART_ROWS`, then costs."""
    known: dict[int, Row] = {}
    choices: list[tuple[Any, ...]] = []
    costs: list[Row] = []
    with_rows = rows[RUN].unique().sort().to_list()
    for run in runs:
        mine = rows if with_rows == [run.number] else rows.filter(pl.col(RUN) == run.number)
        told = _Facts(run, mine, options, report)
        if told.collective is None and not run.nccl.costs:
            continue
        facts = {**base, "source": report.format, **told.columns()}
        if told.collective is not None:
            place = f".{with_rows.index(run.number) + 1}" if len(with_rows) > 1 else ""
            known[run.number] = {**facts, "run": f"{base['run']}{place}"}
            choices += _choices(run, told.collective, facts["num_ranks"], report)
        costs += [cell for cell in _costs(run, facts, report) if cell not in costs]
    if len(known) < len(with_rows):
        rows = rows.filter(pl.col(RUN).is_in(list(known)))
    rows = rows.with_columns(repeat=pl.int_range(pl.len()).over(_CELL))
    ran = pl.DataFrame(choices, schema={name: _TYPES[name] for name in _CHOICE}, orient="row")
    for part in rows.iter_slices(_PART_ROWS):
        yield "measurements", _table(part, known, ran)
    if costs:
        report.costs = len(costs)
        yield "costs", pa.Table.from_pylist(costs, schema=COSTS)


def _choices(
    run: Run, collective: Collective, num_ranks: int | None, report: FileReport
) -> list[tuple[Any, ...]]:
    """What NCCL ran for each size (`_CHOICE`), where its log does not contradict itself."""
    choices, disagreeing = run.nccl.choices(collective, num_ranks)
    if disagreeing:
        sizes = ", ".join(map(str, disagreeing[:4]))
        report.remark(f"actual config left out where NCCL's log disagrees, at sizes {sizes}")
    return [(run.number, size, *choice) for size, choice in choices.items()]


def _costs(run: Run, facts: Row, report: FileReport) -> list[Row]:
    table = run.nccl.cost_table()
    if table and facts["is_default"]:
        return nccl_log.cost_rows(table, facts)
    if run.nccl.costs:
        why = "it is of what was forced, not NCCL's own" if table else "communicators differ"
        report.remark(f"NCCL's cost table left out: {why}")
    return []


def _table(rows: pl.DataFrame, known: Mapping[int, Row], ran: pl.DataFrame) -> pa.Table:
    quiet = {"interference_kind": QUIET, "interference_level": 0.0}
    cells = rows.select(_CELL).unique(maintain_order=True)
    trials = [trial_id({**known[cell[RUN]], **cell, **quiet}) for cell in cells.to_dicts()]
    cells = cells.with_columns(trial=pl.Series(trials, dtype=pl.String))
    told = [{RUN: number, **facts, **quiet} for number, facts in known.items()]
    of_runs = pl.DataFrame(told, schema_overrides={RUN: pl.UInt32}, infer_schema_length=None)
    whole = rows.join(cells, on=_CELL, how="left", nulls_equal=True, maintain_order="left")
    whole = whole.join(of_runs, on=RUN, how="left", maintain_order="left")
    whole = whole.join(ran, on=[RUN, "size_bytes"], how="left", maintain_order="left")
    is_wrong = pl.col("wrong_values").fill_null(0) > 0
    has_failed = pl.col("time_us").is_null()
    ok, wrong, failed = (pl.lit(s.value) for s in (Status.OK, Status.WRONG_VALUES, Status.FAILED))
    mean, none = pl.lit(Statistic.MEAN.value), pl.lit(Statistic.NONE.value)
    arrow = (
        whole.with_columns(
            pl.col(pl.Categorical).cast(pl.String),
            verified=pl.col("actual_algorithm").is_not_null(),
            reason=pl.when(has_failed).then("failure").otherwise("reason"),
            status=pl.when(has_failed).then(failed).when(is_wrong).then(wrong).otherwise(ok),
            statistic=pl.when(has_failed).then(none).otherwise(mean),
        )
        .drop(RUN, "failure")
        .to_arrow()
    )
    return columns_table({name: arrow[name] for name in arrow.column_names}, arrow.num_rows)


class _Facts:
    def __init__(
        self, run: Run, rows: pl.DataFrame, options: ImportOptions, report: FileReport
    ) -> None:
        self._run, self._options, self._remark = run, options, report.remark
        self._file_name = Path(report.path).name.lower()
        self._rows = _evidence(rows) if rows.height else None
        self.collective: Collective | None = None
        is_told = bool(run.marks or run.commands)
        if is_told and run.failure is not None:
            number, line = run.failure
            how = "behind a row" if run.rows else "before its first row"
            how += f", at {run.next_size} bytes" if run.rows and run.next_size else ""
            self._remark(f"line {number}: a run failed {how}: {line[:200]}")
        elif is_told and not (run.rows or run.torn):
            self._remark(f"a run of {self._program or 'a benchmark'} has no row, and no word why")
        if self._rows is None:
            return
        found = self._collective(self._rows)
        if max(run.marks.values(), default=1) > 1:
            found = (
                "several processes wrote into one output, or a run ended without a word: import "
                "that of each by itself"
            )
        if isinstance(found, Collective):
            self.collective = found
        else:
            report.drop(found, rows["source_line"].n_unique())
            self._rows = None

    def columns(self) -> Row:
        """Without rows, those that NCCL's log tells of its communicator."""
        run, options, ranks = self._run, self._options, self._run.ranks
        num_ranks = self._num_ranks()
        num_nodes = self._num_nodes(num_ranks)
        request = self._request()
        shown = [name for name in run.in_force if not name.startswith("--")]
        if self._rows and request["is_default"] and not shown:
            self._remark(
                "the output shows no NCCL_* setting: taken as NCCL's own choice (say what was "
                "forced with --algorithm, --protocol, --channels)"
            )
        failed = run.failure[1][:200] if run.failure else "no row, and no word why"
        wrong = f"the run reports {run.out_of_bounds} values out of bounds"
        if run.out_of_bounds:
            self._remark(wrong)
        return {
            "collective": None if self.collective is None else self.collective.wire,
            "gpu": self._one({r.gpu for r in ranks if r.gpu}, "GPU model", options.gpu),
            "nccl_version": self._one(run.nccl.versions, "NCCL version", options.nccl_version),
            "nccl_tests_version": self._one(run.tests_versions, "nccl-tests version"),
            "cuda_version": self._one(run.nccl.cuda_versions, "CUDA version"),
            **request,
            "num_ranks": num_ranks,
            "num_hosts": len({r.host for r in ranks}) if ranks and num_ranks else None,
            "num_nodes": num_nodes,
            "hosts": hosts_of(ranks) if run.listed else None,
            "ranks_per_node": ranks_per_node(num_ranks, num_nodes),
            "reason": wrong if run.out_of_bounds else None,
            "failure": failed,
        }

    @property
    def _program(self) -> str | None:
        commands = self._run.commands
        return self._run.program or (min(commands) if len(commands) == 1 else None)

    def _collective(self, rows: Row) -> Collective | str:
        asked, possible = self._options.collective, _by_columns(rows)
        if self._program is not None:
            return self._named(self._program, rows, possible)
        if asked is not None:
            names = _listed(possible) or "no collective with such bandwidths"
            contradicted = f"the columns are of {names}, not of {asked}: correct --collective"
            return next((each for each in possible if each.wire == asked), contradicted)
        in_name = {m[1] for m in _IN_FILE_NAME.finditer(self._file_name)}
        how = "taken from the file's name"
        if len(possible) == 1:
            how = "follows from the columns"
        elif len(in_name) == 1:
            possible = [each for each in possible if each is Collective.parse(*in_name)]
        if len(possible) != 1:
            return f"collective not known: name it with --collective ({_listed(Collective)})"
        self._remark(f"collective {possible[0].wire} {how}")
        return possible[0]

    def _named(self, program: str, rows: Row, possible: Sequence[Collective]) -> Collective | str:
        told, asked = nccl_log.named(Collective, program), self._options.collective
        if told is None:
            return f"'{program}' is no collective of NCCL's that DynamICCL tunes"
        logged = self._run.nccl.num_ranks
        count = self._run.listed or (min(logged) if len(logged) == 1 else 0)
        others = [each for each in possible if count and _fits(rows, each, count)]
        is_other = bool(others) and not _fits(rows, told, count)
        is_possible = _fits(rows, told, *range(1, _ALIKE_RANKS)) and _may_have(rows, told)
        if is_other or not is_possible:
            algbw, busbw = (rows[name] for name in _BANDWIDTHS)
            where = f" on {count} ranks" if count else ""
            return (
                f"the output calls itself {told.wire}, and busbw {busbw} of algbw {algbw}{where} "
                f"is of {_listed(others or possible) or 'none'}"
            )
        if asked not in {None, told.wire}:
            self._remark(f"the output says {told.wire}; the option's {asked} was not used")
        return told

    def _num_ranks(self) -> int | None:
        run, rows, collective = self._run, self._rows, self.collective
        counted = {len(run.ranks)} if run.ranks else run.nccl.num_ranks
        asked = self._options.num_ranks
        found: int | None = self._one(counted, "number of ranks", asked) or asked
        if found is None:
            why = "not known: the output lists none; say --ranks, --nodes"
        elif run.ranks and not run.listed:
            why = "left out: the list of ranks is not complete, or of several communicators"
        elif rows and collective is not None and not _fits(rows, collective, found):
            algbw, busbw = (rows[name] for name in _BANDWIDTHS)
            expected = algbw * collective.bus_factor(found)
            why = f"left out: {found} would make busbw {expected:.2f} of algbw {algbw}, not {busbw}"
        else:
            return found
        self._remark(f"number of ranks {why}")
        return None

    def _num_nodes(self, num_ranks: int | None) -> int | None:
        """NCCL's nNodes: from its log, the caller (NVL72, NCCL_HOSTID), or the hosts."""
        ranks, nodes = self._run.ranks, self._run.nccl.num_nodes
        asked = self._options.num_nodes
        told: int | None = self._one(nodes, "number of nodes", asked) or asked
        if told and num_ranks and num_ranks < told:
            self._remark(f"number of nodes left out: {num_ranks} ranks cannot be on {told}")
            return None
        if told is not None or num_ranks is None:
            return told
        if not ranks:
            return 1 if num_ranks == 1 else None
        if len({(line.host, line.device, line.bus_id) for line in ranks}) == len(ranks):
            return len({line.host for line in ranks})
        why = "ranks show the same GPU, so hosts may not be NCCL's nodes; say --nodes"
        self._remark(f"number of nodes left out: {why}")
        return None

    def _request(self) -> Row:
        settings, options = self._settings(), self._options
        # A job's costs are of all collectives.
        asked_of = Collective.AllReduce if self.collective is None else self.collective
        of_config = {"algorithm", "protocol", "num_channels"}
        told = options.model_dump(include=of_config, exclude_none=True)
        if told and not asked_of.tunable:
            self._remark(f"{asked_of.wire} has no algorithms: {', '.join(told)} not used")
            told = {}
        in_name = nccl_log.NAMES_A_CHOICE.search(self._file_name.upper())
        is_told = bool(told or self._run.commands or settings.keys() & nccl_log.CHOICE)
        if in_name and asked_of.tunable and not is_told:
            settings["NCCL_ALGO"] = None
            why = f"the file's name says {in_name[0]}, and the output nothing of it"
            self._remark(f"{why}: the config is not known (say it with --algorithm, --protocol)")
        columns = nccl_log.requested_by(settings, asked_of)
        for name, value in told.items():
            if not columns[f"requested_{name}"]:
                columns |= {f"requested_{name}": value, "is_default": False}
        return {**columns, "default_scope": scope_of(columns["launch_profile"])}

    def _settings(self) -> nccl_log.Settings:
        settings = self._run.in_force
        for name, value in settings.items():
            if value is None:
                self._remark(f"{name} cannot be read, or is two things: the config is not known")
            elif "~" in value or value == "?":
                how = "a digest" if "~" in value else "?, since its value is not shown,"
                self._remark(f"{name} is kept as {how} in the launch profile")
        if rccl := settings.get("--rccl"):
            self._remark(f"RCCL {rccl} is kept in the launch profile; it is no release of NCCL's")
        return settings

    def _one(self, values: Collection[Any], what: str, asked: Any = None) -> Any:
        if len(values) < 2 or asked in values:
            told = asked if asked in values else next(iter(values), asked)
            if asked not in {None, told}:
                self._remark(f"{what}: the output says {told}; the option's {asked} was not used")
            return told
        listed = ", ".join(map(str, sorted(values)[:4]))
        self._remark(f"{what} left out: the output names several ({listed})")
        return None


def ranks_per_node(num_ranks: int | None, num_nodes: int | None) -> int | None:
    """None where nodes have unequal numbers."""
    if not num_ranks or not num_nodes or num_ranks % num_nodes:
        return None
    return num_ranks // num_nodes


def _evidence(rows: pl.DataFrame) -> Row:
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


def _by_columns(rows: Row) -> list[Collective]:
    operations = rows["operations"]
    found = _BY_COLUMNS[not operations <= {None, "none"}, rows["has_root"]]
    if rows["has_root"] and operations == {None}:
        # Older columns: only Broadcast had a root and no operation.
        found = (Collective.Broadcast,)
    return [each for each in found if _fits(rows, each, *range(1, _ALIKE_RANKS))]


def _may_have(rows: Row, told: Collective) -> bool:
    """Some releases print `sum` for SendRecv."""
    if told in _BY_COLUMNS[True, True] + _BY_COLUMNS[True, False]:
        return bool(rows["operations"] != {"none"})
    may_print_one = told not in {Collective.Broadcast, Collective.AllGather}
    return may_print_one or rows["operations"] <= {None, "none"}


def _fits(rows: Row, collective: Collective, *nums_ranks: int) -> bool:
    """Whether the bandwidths are of one of these numbers of ranks, within two decimals."""
    algbw, busbw = (float(rows[name]) for name in _BANDWIDTHS)
    factors = map(collective.bus_factor, nums_ranks)
    return any(
        abs(busbw - algbw * factor) <= 0.006 * (1.0 + factor) + 0.01 * algbw for factor in factors
    )
