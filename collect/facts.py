"""What is known of each run of an nccl-tests output: what it measured, where, and what was asked.

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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final

import polars as pl

from dynamiccl.collect.columns import RUN, Row
from dynamiccl.collect.nccl_log import Choice, host_list
from dynamiccl.collect.output import FileReport, RankLine, Run
from dynamiccl.collect.settings import (
    add_settings,
    collective_of_program,
    default_scope,
    requested_by,
)
from dynamiccl.datasets.schema import (
    Status,
)
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol

#: Bandwidths below this have too few digits for a ratio.
_MIN_BANDWIDTH: Final = 1.0
#: From so many ranks on the ratios of bus to algorithm bandwidth are alike.
_ALIKE_RANKS: Final = 257
_BANDWIDTHS: Final = ("algbw_gbytes_per_s", "busbw_gbytes_per_s")
#: GPUs of one host at most (DGX-2, HGX with 16).
_MOST_GPUS: Final = 16

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
            **(actual(choice) if choice else {}),
            "status": (Status.WRONG_VALUES if wrong else Status.OK).value,
        }
        del found[RUN]
        return {name: value for name, value in found.items() if value is not None}


def actual(choice: Choice) -> Row:
    """The columns of what NCCL ran."""
    ran = {f"actual_{name}": value for name, value in choice._asdict().items()}
    return {**ran, "verified": True}


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
    known = {}
    for run in runs:
        told = _evidence(rows, run)
        if told is not None or (run.died and not run.rows and run.first_bytes):
            collective = _collective(run, told, options, report, started)
            if collective is not None:
                known[run.number] = _facts(run, told, collective, options, report)
    return known


def _evidence(rows: pl.DataFrame, run: Run) -> Row | None:
    """What the rows of a run show: operations, roots, and the bandwidths with the most digits."""
    is_alone = rows[RUN].min() == rows[RUN].max() == run.number
    mine = rows if is_alone else rows.filter(pl.col(RUN) == run.number)
    if mine.is_empty():
        return None
    # From 10^4 on bandwidths are printed without decimals.
    exact = mine.select(pl.when(pl.col(_BANDWIDTHS[0]) < 1e4).then(_BANDWIDTHS[0])).to_series()
    best = exact.arg_max()
    return {
        "operations": set(mine["reduction_op"].unique().cast(pl.String)),
        "has_root": bool((mine["root"] >= 0).any()),
        **{name: 0.0 if best is None else mine[name][best] or 0.0 for name in _BANDWIDTHS},
    }


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
    operations = of_rows["operations"]
    found = _BY_COLUMNS[not operations <= {None, "none"}, of_rows["has_root"]]
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
    algbw, busbw = (float(of_rows[name]) for name in _BANDWIDTHS)
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
        algbw, busbw = (of_rows[name] for name in _BANDWIDTHS)
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


def group_facts(told: Run, options: ImportOptions, report: FileReport) -> Row:
    """The columns of the only communicator that a log without benchmark rows tells of."""
    ranks = _only(told.nccl.num_ranks) or options.num_ranks
    nodes = _only(told.nccl.num_nodes) or options.num_nodes
    return {
        "num_ranks": ranks,
        "num_nodes": nodes,
        "ranks_per_node": _per_node(ranks, nodes),
        "nccl_version": _only(told.nccl.versions) or options.nccl_version,
        "gpu": options.gpu,
        **_request(told, Collective.AllReduce, options, report),
    }
