"""Resolves collective, ranks, nodes and versions of each run from the facts in its output.

The rule is that nothing is guessed. A fact needs one value; where the output gives two, or a
number that its own bandwidths contradict, the column stays null and the report says why.

The collective comes from, in this order:
1. the program's name inside the output (header, command line, or tail);
2. the columns and bandwidths, where they can be of one collective only (`by_columns`);
3. the option `collective`, unless the columns contradict it: then the run is refused;
4. the name of the file, when it contains exactly one collective's name. This is reported.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.nccl_tests.by_columns import collectives_by_columns
from dynamiccl.collect.nccl_tests.facts import RunFacts, hosts_of
from dynamiccl.collect.nccl_tests.names import collective_in_file_name, collective_of_program
from dynamiccl.collect.nccl_tests.settings import Requested, requested_by
from dynamiccl.collect.nccl_tests.tuning import Choice, TuningLog
from dynamiccl.collect.reports import FileReport, ImportOptions
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol

#: Bandwidths below this have too few digits for a ratio.
_MIN_BANDWIDTH: Final = 1.0
#: Half of the last printed digit.
_HALF_DIGIT: Final = 0.005
#: GPUs of one host at most (DGX-2, HGX with 16).
_MOST_GPUS: Final = 16


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """The columns that all rows of one run share."""

    collective: Collective
    columns: dict[str, Any]
    #: What NCCL ran, by size, where its log says so without contradiction.
    choices: dict[int, Choice] = field(default_factory=dict)


def resolve_run(
    run: RunFacts,
    shared: RunFacts,
    rows: npt.NDArray[Any],
    words: list[str],
    options: ImportOptions,
    report: FileReport,
) -> ResolvedRun | None:
    """Resolve one run with rows; None when its collective cannot be known (reported).

    `words` are those that the rows count. `shared` holds what was said outside the runs: other
    streams, lines before the first header, a companion log.
    """
    possible = collectives_by_columns(rows, words)
    collective = _collective(run, shared, possible, options, report)
    if collective is None:
        return None
    num_ranks = _num_ranks(run, shared, options, report)
    num_ranks = _checked_ranks(num_ranks, collective, rows, report)
    num_nodes = _num_nodes(run, shared, num_ranks, options, report)
    columns = {
        **_environment(run, shared, options, report),
        **_request_columns(run, shared, collective, options, report),
        "collective": collective.wire,
        "num_ranks": num_ranks,
        "num_hosts": None if num_ranks is None else _num_hosts(run),
        "num_nodes": num_nodes,
        "hosts": hosts_of(run.ranks) if _num_hosts(run) else None,
        "ranks_per_node": per_node(num_ranks, num_nodes),
        "num_comms": _num_comms(run),
    }
    if run.out_of_bounds:
        columns["reason"] = f"the run reports {run.out_of_bounds} values out of bounds"
        report.remark(f"a run reports {run.out_of_bounds} values out of bounds (FAILED)")
    return ResolvedRun(collective, columns, _choices(run, shared, collective, num_ranks, report))


def _environment(
    run: RunFacts, shared: RunFacts, options: ImportOptions, report: FileReport
) -> dict[str, Any]:
    gpus = {line.gpu for line in run.ranks if line.gpu}
    version = _one(run.nccl_versions | shared.nccl_versions, "NCCL version", report)
    return {
        "gpu": _one(gpus, "GPU model", report) or options.gpu,
        "nccl_version": version or _version(options.nccl_version),
        "nccl_tests_version": _one(run.tests_versions, "nccl-tests version", report),
        "cuda_version": _one(run.cuda_versions | shared.cuda_versions, "CUDA version", report),
    }


def _request_columns(
    run: RunFacts,
    shared: RunFacts,
    collective: Collective,
    options: ImportOptions,
    report: FileReport,
) -> dict[str, Any]:
    requested = _requested(run, shared, collective, options, report)
    return {
        "launch_profile": options.launch_profile or requested.launch_profile,
        "is_default": requested.is_default,
        "requested_algorithm": requested.algorithm,
        "requested_protocol": requested.protocol,
        "requested_num_channels": requested.num_channels,
    }


def per_node(num_ranks: int | None, num_nodes: int | None) -> int | None:
    """Ranks per node, when all nodes have equally many; else None."""
    if not num_ranks or not num_nodes or num_ranks % num_nodes:
        return None
    return num_ranks // num_nodes


def _version(text: str | None) -> str | None:
    return None if text is None else str(NcclVersion.parse(text))


def _one(values: set[str], what: str, report: FileReport) -> str | None:
    if len(values) > 1:
        listed = ", ".join(sorted(values)[:4])
        report.remark(f"{what} left out: the output names several ({listed})")
    return next(iter(values)) if len(values) == 1 else None


def _collective(
    run: RunFacts,
    shared: RunFacts,
    possible: frozenset[Collective],
    options: ImportOptions,
    report: FileReport,
) -> Collective | None:
    named = next(iter([*run.programs, *shared.programs]), None)
    asked = None if options.collective is None else Collective.parse(options.collective)
    if named is not None:
        found = collective_of_program(named)
        if found is None:
            report.remark(f"'{named}' is no collective of NCCL's that DynamICCL tunes")
        elif asked not in {None, found}:
            report.remark(f"the output says {found.wire}; the option's {asked} was not used")
        return found
    if asked is not None and asked not in possible:
        report.contradictions.append(f"the columns are {_of(possible)}, not of {asked.wire}")
        return None
    return asked or _unnamed(possible, report)


def _unnamed(possible: frozenset[Collective], report: FileReport) -> Collective | None:
    if len(possible) == 1:
        (only,) = possible
        report.remark(f"collective {only.wire} follows from the columns")
        return only
    found = collective_in_file_name(PurePath(report.path).name)
    if found is None:
        return None
    if found not in possible:
        report.remark(f"the file's name says {found.wire}, but the columns are {_of(possible)}")
        return None
    report.remark(f"collective {found.wire} taken from the file's name")
    return found


def _of(possible: frozenset[Collective]) -> str:
    names = " or ".join(sorted(each.wire for each in possible))
    return f"of {names}" if names else "of no collective with such bandwidths"


def _num_ranks(
    run: RunFacts, shared: RunFacts, options: ImportOptions, report: FileReport
) -> int | None:
    if run.ranks:
        return _listed_ranks(run, report)
    nranks = run.nranks | shared.nranks
    if len(nranks) == 1:
        return next(iter(nranks))
    if options.num_ranks is not None:
        return options.num_ranks
    per_process = run.per_process or shared.per_process
    only = next(iter(per_process)) if len(per_process) == 1 else None
    return only if only is not None and _one_process(run, shared, only) else None


def _one_process(run: RunFacts, shared: RunFacts, num_ranks: int) -> bool:
    """Whether one process drove all ranks: no sign of a launcher, and GPUs for all of them."""
    launched = run.launched or shared.launched or run.stream or run.copies > 1
    return num_ranks == 1 or (not launched and num_ranks in (run.per_process | shared.per_process))


def _listed_ranks(run: RunFacts, report: FileReport) -> int | None:
    """Ranks of one communicator from the `# Rank` lines, unless a line is missing.

    With NCCL_TESTS_SPLIT there are several groups, each a communicator. Outputs of several
    processes in one another list every rank more than once.
    """
    groups = Counter(line.group for line in set(_identities(run)))
    sizes = set(groups.values())
    ranks = {line.rank for line in run.ranks}
    per_process = next(iter(run.per_process), 1) or 1
    count = sizes.pop() if len(sizes) == 1 else 0
    whole = len(groups) > 1 or ranks == set(range(len(ranks)))
    if count and whole and len(ranks) % per_process == 0:
        return count
    report.remark("number of ranks left out: the list of ranks is not complete")
    return None


def _identities(run: RunFacts) -> list[Any]:
    """Rank lines without the fields that differ between processes listing the same rank."""
    first: dict[tuple[int, int], Any] = {}
    for line in run.ranks:
        first.setdefault((line.group, line.rank), line)
    return list(first.values())


def _checked_ranks(
    num_ranks: int | None, collective: Collective, rows: npt.NDArray[Any], report: FileReport
) -> int | None:
    """The number of ranks, or None when the run's own bandwidths contradict it."""
    if num_ranks is None or num_ranks < 1 or not len(rows):
        return None
    best = rows[int(np.argmax(np.where(rows["algbw"] < 1e4, rows["algbw"], 0.0)))]
    algbw, busbw = float(best["algbw"]), float(best["busbw"])
    if algbw < _MIN_BANDWIDTH:
        return num_ranks
    expected = algbw * collective.bus_factor(num_ranks)
    if abs(busbw - expected) <= 2 * _HALF_DIGIT + 0.01 * algbw:
        return num_ranks
    report.remark(
        f"number of ranks left out: {num_ranks} would make busbw {expected:.2f} of algbw {algbw}, "
        f"and the output says {busbw}"
    )
    return None


def _num_nodes(
    run: RunFacts,
    shared: RunFacts,
    num_ranks: int | None,
    options: ImportOptions,
    report: FileReport,
) -> int | None:
    """NCCL's nNodes: from its log, from the caller, or the number of hosts."""
    said = run.nnodes | shared.nnodes
    if len(said) == 1:
        return next(iter(said))
    if options.num_nodes is not None:
        return options.num_nodes
    if not run.ranks and num_ranks is not None and _one_process(run, shared, num_ranks):
        return 1
    hosts = None if num_ranks is None else _num_hosts(run) or _hosts_of_each(run)
    if hosts is None or not _seem_one_gpu(run):
        return hosts
    if _are_apart(run, shared):
        report.remark(
            "ranks of one host show the same GPU and have processes of their own: taken for GPUs "
            "apart, each alone in its process's sight, and hosts for nodes (else say --nodes)"
        )
        return hosts
    report.remark(
        "number of nodes left out: ranks share a GPU, so hosts are not NCCL's nodes; say --nodes"
    )
    return None


def _seem_one_gpu(run: RunFacts) -> bool:
    seen = Counter((line.host, line.device, line.bus_id) for line in run.ranks)
    return max(seen.values()) > 1


def _are_apart(run: RunFacts, shared: RunFacts) -> bool:
    """Whether ranks that seem to share a GPU have one each (each sees only its own).

    Where the bus id names the PCI domain too, equal ids are one GPU. Before nccl-tests 2.15 it is
    the bus alone, which each of the GPUs of a GH200 node calls 1.

    NCCL refuses two ranks on a GPU of one host ("Duplicate GPU detected", `src/init.cc`, 2.10 to
    2.30), unless NCCL_HOSTID makes hosts of them. Without a sign of that, as many processes on
    each host as a machine may have GPUs are what a job with one visible GPU for each rank prints.
    """
    has_domains = any(":" in line.bus_id for line in run.ranks)
    if has_domains or run.names_host_ids or shared.names_host_ids:
        return False
    pids = {(line.host, line.pid) for line in run.ranks if line.pid is not None}
    per_host = set(Counter(line.host for line in run.ranks).values())
    return len(pids) == len(run.ranks) and len(per_host) == 1 and max(per_host) <= _MOST_GPUS


def _num_hosts(run: RunFacts) -> int | None:
    """Hosts of the communicator; unknown where several communicators are listed together."""
    if not run.ranks or run.copies > 1 or len({line.group for line in run.ranks}) > 1:
        return None
    return len({line.host for line in run.ranks})


def _num_comms(run: RunFacts) -> int | None:
    """Communicators that ran at the same time (NCCL_TESTS_SPLIT); None where there was one."""
    groups = {line.group for line in run.ranks}
    return len(groups) if len(groups) > 1 and run.copies == 1 else None


def _hosts_of_each(run: RunFacts) -> int | None:
    """Hosts of each of several communicators, if all have equally many; else None."""
    if run.copies > 1:
        return None
    hosts: dict[int, set[str]] = {}
    for line in run.ranks:
        hosts.setdefault(line.group, set()).add(line.host)
    counts = {len(each) for each in hosts.values()}
    return counts.pop() if len(counts) == 1 else None


def _requested(
    run: RunFacts,
    shared: RunFacts,
    collective: Collective,
    options: ImportOptions,
    report: FileReport,
) -> Requested:
    settings = {}
    for name in sorted(run.settings.keys() | shared.settings.keys()):
        values = run.settings.get(name) or shared.settings.get(name) or set()
        value = _one(values, name, report)
        if value is not None:
            settings[name] = value
    found = requested_by(settings, collective, sorted(run.words | shared.words))
    asked = options.algorithm or options.protocol or options.num_channels
    if found.is_default and asked is None and not settings:
        report.remark(
            "the output shows no NCCL_* setting: taken as NCCL's own choice (say what was forced "
            "with the options algorithm, protocol, num_channels)"
        )
    return Requested(
        algorithm=found.algorithm or requested_name(Algorithm, options.algorithm),
        protocol=found.protocol or requested_name(Protocol, options.protocol),
        num_channels=found.num_channels or options.num_channels,
        launch_profile=found.launch_profile,
    )


def requested_name(kind: type[Algorithm] | type[Protocol], text: str | None) -> str | None:
    """NCCL's spelling of an option; raises UnknownName."""
    return None if text is None else kind.parse(text).wire


def _choices(
    run: RunFacts,
    shared: RunFacts,
    collective: Collective,
    num_ranks: int | None,
    report: FileReport,
) -> dict[int, Choice]:
    log = TuningLog()
    log.merge(shared.tuning)
    log.merge(run.tuning)
    choices, disagreeing = log.resolve(collective, num_ranks)
    if disagreeing:
        listed = ", ".join(str(size) for size in disagreeing[:4])
        report.remark(f"actual config left out where NCCL's log disagrees, at sizes {listed}")
    return choices
