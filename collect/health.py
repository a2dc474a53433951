"""`dynamiccl-collect health`: slow GPUs, NICs, nodes and pairs, by rows that know their hosts.

A communicator is one of a launch that `split` shares out to many (examples/health.toml; needs times
of single processes), or a launch of its own on some hosts (logs of each two nodes of a cluster).

    log(time / its like's) of a communicator = what its slowest part adds + noise

Nearly all parts add nought. A node adds the lower quartile of its communicators, two nodes the
lower median of those between them, a rank that of its own. The largest is taken first, nodes before
pairs before ranks, then what its partners have left, until nothing is beyond noise; what one
communicator has left then is its own. Noise is what the lower half of all differ by, and no less
than that of a launch's rows. A finding is beyond it by so many sigmas that one in a hundred checks
of a cluster of this size has a false alarm, were noise normal.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from math import expm1, log, log1p, sqrt
from operator import itemgetter
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import typer
from rich.console import Console

from dynamiccl import cli
from dynamiccl.collect.describe import lossy_ports
from dynamiccl.collect.grid import Split
from dynamiccl.collect.nccl_log import expand_hosts, host_list
from dynamiccl.collect.strategies import MAD_TO_SIGMA
from dynamiccl.datasets import store
from dynamiccl.datasets.schema import REQUESTED_COLUMNS, Status
from dynamiccl.errors import NotEnoughData

#: Checks of a healthy cluster that find something, at most, were noise normal.
_FALSE_ALARMS: Final = 0.01
#: Below this no launch repeats itself: nccl-tests prints and clocks have four digits or so.
_LEAST_SIGMA: Final = 0.003
#: Standard error of a median over that of a mean, of a normal distribution: sqrt(pi / 2).
_MEDIAN: Final = 1.2533
_BELOW_MEDIAN: Final = 0.158655
#: So many alike communicators are a reference of their own; fewer are compared with all.
_ENOUGH: Final = 4
#: So many sets of hosts, one after the other, show which of them is slow.
_SETS: Final = 3
_TASK: Final = (
    *("system", "collective", "datatype", "size_bytes", "in_place", "num_nodes", "num_ranks"),
    *("launch_profile", "interference_kind", *REQUESTED_COLUMNS),
)
_TIMES: Final = ("launch", "task", "row", "comm", "numbers", "hosts", "log")
#: Communicators that are a launch of their own; and that span several hosts.
_IS_ALONE: Final = pl.col("numbers") == ""
_SPANS: Final = pl.col("hosts").str.contains(",")
_INSIDE: Final = "inside the node"
_BETWEEN: Final = "between nodes"
#: A rank by its host and its number on it; -1: the host as a whole.
_Place = tuple[str, int]
#: One place, or two nodes.
_Part = tuple[_Place, ...]
_FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Finding:
    """One slow part."""

    #: gpu, nic, node, link, pair, late, counters or failed.
    kind: str
    where: str
    #: By which share of the time it is slower than its like; null for `counters` and `failed`.
    slower: float | None
    z: float | None
    #: Communicators that say so, and the rows that these are measured in.
    comms: int
    rows: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What is slow, and what these measurements cannot tell."""

    nodes: int
    communicators: int
    rows: int
    #: The least that counts, as a share of the time.
    least: float
    #: A robust sigma of a communicator's time, as a share of it; null where none was measured.
    noise_inside: float | None
    noise_between: float | None
    findings: tuple[Finding, ...]
    cannot_tell: tuple[str, ...]

    @property
    def is_well(self) -> bool:
        """Whether nothing is slow."""
        return not self.findings


@dataclass(frozen=True, slots=True)
class _Comm:
    """One communicator, over all of its measurements."""

    members: _Part
    #: log(time / what its like took), the least of its launches: a path through the network that
    #: one launch happened on is not the hardware's.
    excess: float
    #: A robust sigma of the rows of one launch.
    spread: float
    rows: int
    launches: int

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(host for host, _ in self.members))


def health_command(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A data directory.")],
    least: Annotated[
        float, typer.Option(help="By which share of the time slower counts.", min=0.001, max=10)
    ] = 0.05,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON document to stdout.")
    ] = False,
) -> None:
    """Name the GPUs, NICs, nodes and pairs of nodes that are slow against the rest.

    It looks at launches that pair up the GPUs of a cluster (examples/health.toml) and at those of
    one communicator each on other hosts, such as logs of each two nodes. Exit code 1 when something
    is slow.

    Example: dynamiccl-collect health out/data
    """
    report = examine(store.read(data), least=least)
    if as_json:
        cli.print_json({"is_well": report.is_well, **asdict(report)})
    else:
        _show(report, Console(width=100, highlight=False))
    if not report.is_well:
        # What a Slurm prolog takes for a node that is not fit.
        raise typer.Exit(1)


def examine(frame: pl.DataFrame, *, least: float) -> Report:
    """Find what is slow in a data set, by `least` as a share of the time at least.

    Raises NotEnoughData where no communicator can be compared with others.
    """
    comms, cannot_tell = _read(frame, least)
    late, late_rows = _late_processes(frame, least=least)
    failed = [*_failed(frame)]
    if not comms and not late_rows:
        first = f" ({failed[0].rows} rows failed: {failed[0].note})" if failed else ""
        raise NotEnoughData(
            f"no row knows its hosts, or its processes' times, and has others like it{first}; "
            f"measure with a sweep as in examples/health.toml (nccl-tests 2.19.2 or later), or "
            f"import logs of {_SETS} sets of hosts or more"
        )
    inside = [comm for comm in comms if len(comm.hosts) == 1]
    between = [comm for comm in comms if len(comm.hosts) > 1]
    slow_inside, noise_inside = _judge(inside, least)
    slow_between, noise_between = _judge(between, least)
    findings = _unexplained([*slow_inside, *slow_between]) + failed + late
    for port, count, retries in lossy_ports(frame):
        note = f"{retries} packets lost or sent again, by its counters"
        findings.append(Finding("counters", port, None, None, 0, count, note))
    if findings and any(comm.launches < 2 for comm in comms):
        cannot_tell.append("whether it is the hardware's or this launch's alone, until a second")
    if hot := frame.filter(pl.col("throttled")).height:
        cannot_tell.append(f"which GPU heat or power slowed, in {hot} of {frame.height} rows")
    return Report(
        nodes=len({host for comm in comms for host in comm.hosts}),
        communicators=len(comms),
        rows=frame.height,
        least=least,
        noise_inside=noise_inside,
        noise_between=noise_between,
        findings=tuple(sorted(findings, key=lambda one: (-(one.slower or 0.0), one.where))),
        cannot_tell=(*_not_measured(inside, between), *cannot_tell),
    )


def _read(frame: pl.DataFrame, least: float) -> tuple[list[_Comm], list[str]]:
    """The communicators of a data set, and remarks on what has nothing to be compared with."""
    has_times = pl.col("process_times_us").is_not_null() & pl.col("num_hosts").is_not_null()
    is_alone = pl.col("comm_split").is_null() & pl.col("hosts").is_not_null()
    rows = (
        frame.filter(pl.col("status") == Status.OK.value)
        .filter(is_alone | (pl.col("comm_split").is_not_null() & has_times))
        .with_columns(
            launch=pl.concat_str("system", "sweep", pl.coalesce("launch", "run"), separator="|"),
            task=pl.struct(_TASK).rank("dense"),
        )
    )
    if rows.is_empty():
        return [], []
    numbered: dict[_Part, int] = {}
    lines = [
        (row["launch"], row["task"], number, numbered.setdefault(members, len(numbered)),
         *_text(members), log(time_us))
        for number, row in enumerate(rows.iter_rows(named=True))
        for members, time_us in _communicators(row)
    ]  # fmt: skip
    times = pl.DataFrame(lines, _TIMES, orient="row")
    # NICs are compared with those on the same rail, GPUs with those in the same slot.
    alike = pl.col("hosts").len().over("row", "numbers").min().over("launch")
    like = pl.when(alike >= _ENOUGH).then("numbers").otherwise(pl.lit("all"))
    own = pl.col("log").quantile(0.5, "lower").over("row", "like")
    times = times.with_columns(like=like).with_columns(own=own)
    # At most what it takes elsewhere; a launch of one communicator has nothing else.
    base = pl.when(_IS_ALONE).then("elsewhere").otherwise(pl.min_horizontal("own", "elsewhere"))
    told = times.join(_elsewhere(times), on=("task", "launch"), how="left")
    told = told.with_columns(excess=pl.col("log") - base)
    found = (
        told.drop_nulls("excess")
        .group_by("comm", "launch")
        .agg(
            pl.col("excess").quantile(0.5, "lower"),
            spread=MAD_TO_SIGMA * (pl.col("excess") - pl.col("excess").median()).abs().median(),
            rows=pl.len(),
        )
        .group_by("comm")
        .agg(pl.col("excess").min(), pl.col("spread").median(), pl.col("rows").sum(), pl.len())
    )
    remarks = [*_all_alike(times.filter(~_IS_ALONE), least)]
    if lost := told.filter(pl.col("excess").is_null())["launch"].n_unique():
        remarks.append(f"{lost} launches: the same call ran on fewer than {_SETS} sets of hosts")
    parts = [*numbered]
    comms = [_Comm(parts[comm], *told) for comm, *told in found.iter_rows()]
    return sorted(comms, key=lambda one: one.members), remarks


def _communicators(row: Mapping[str, Any]) -> Iterator[tuple[_Part, float]]:
    """The communicators of a row, by where their ranks ran, and us of each."""
    hosts, count, times_us = row["hosts"], row["num_hosts"], row["process_times_us"]
    if row["comm_split"] is None:
        yield tuple((host, -1) for host in expand_hosts(hosts)), row["time_us"]
        return
    where = _places(hosts, count, len(times_us))
    comms = Split.parse(row["comm_split"]).comms(count, len(times_us) // count, spare=True)
    for each in comms.members:
        # Both ends of a call count alike; a rank of no communicator is never asked for.
        yield tuple(where[n] for n in each), fmean(times_us[n] for n in each)


@cache
def _places(hosts: str | None, num_hosts: int, processes: int) -> list[_Place]:
    """The place of each process, node by node; nodes without a name get a number."""
    names = expand_hosts(hosts or "")
    names = names if len(names) == num_hosts else [f"node{n}" for n in range(num_hosts)]
    per_host = max(processes // num_hosts, 1)
    return [(names[min(p // per_host, num_hosts - 1)], p % per_host) for p in range(processes)]


@cache
def _text(members: _Part) -> tuple[str, str]:
    """Numbers of the ranks, and hosts, that other communicators may have too."""
    return _listed(number for _, number in members), ",".join(sorted({host for host, _ in members}))


def _elsewhere(times: pl.DataFrame) -> pl.DataFrame:
    """What launches like it took on other hosts, for one whose communicators span the same ones."""
    is_lonely = (pl.col("hosts").n_unique() == 1) & (_IS_ALONE.first() | _SPANS.first())
    launches = times.group_by("task", "launch").agg(
        pl.col("own").median(), pl.col("hosts").first(), alone=_IS_ALONE.first(), lonely=is_lonely
    )
    found: list[tuple[int, str, float]] = []
    several = launches.filter(pl.col("hosts").n_unique().over("task") > 1)
    for _, task in several.group_by("task"):
        each = task.to_dicts()
        for one in filter(itemgetter("lonely"), each):
            others = [other for other in each if other["hosts"] != one["hosts"]]
            others = [other for other in others if not other["lonely"]] or others
            if len({other["hosts"] for other in others}) >= (_SETS - 1 if one["alone"] else 1):
                found.append((one["task"], one["launch"], median(o["own"] for o in others)))
    schema = {"task": pl.Int64, "launch": pl.String, "elsewhere": pl.Float64}
    return pl.DataFrame(found, schema, orient="row")


def _judge(comms: Sequence[_Comm], least: float) -> tuple[list[Finding], float | None]:
    """What is slow among the communicators inside nodes, or between them, and their noise."""
    if not comms:
        return [], None
    left = np.array([comm.excess for comm in comms])
    spread = median(_MEDIAN * comm.spread / sqrt(comm.rows / comm.launches) for comm in comms)
    sigma = max(_sigma_below(left), spread, _LEAST_SIGMA)
    kinds = _parts(comms)
    tests = max(len(comms) + sum(map(len, kinds)), 2)
    limit = NormalDist().inv_cdf(1.0 - _FALSE_ALARMS / tests)

    def is_slow(excess: float, noise: float) -> bool:
        return excess > log1p(least) and excess / noise >= limit

    found = []
    for parts, share in zip(kinds, (4, 2, 2), strict=True):
        # What healthy ones differ by is no fault of any.
        floor = _sigma_below(np.array([_lower(left[at], share) for at in parts.values()] or [0.0]))
        while parts:
            excess, part = max((_lower(left[at], share), part) for part, at in parts.items())
            at = parts.pop(part)
            noise = max(_MEDIAN * sigma / sqrt(len(at)), floor)
            if not is_slow(excess, noise):
                break
            found.append(_finding(part, [comms[n] for n in at], excess, noise))
            # A call takes as long as its slowest part: what this one explains is explained.
            left[at] = np.where(left[at] > 0, np.maximum(left[at] - excess, 0.0), left[at])
    slow = [n for n in range(len(comms)) if is_slow(left[n], sigma)]
    for _, group in groupby(sorted(slow, key=lambda n: _ends(comms[n])), lambda n: _ends(comms[n])):
        at = [*group]
        members = tuple(place for n in at for place in comms[n].members)
        excess = float(np.median(left[at]))
        found.append(_finding(members, [comms[n] for n in at], excess, sigma))
    return found, expm1(sigma)


def _ends(comm: _Comm) -> _Part:
    """What tells communicators apart: the nodes, or inside a node the ranks."""
    return tuple((host, -1) for host in comm.hosts) if len(comm.hosts) > 1 else comm.members


def _parts(comms: Sequence[_Comm]) -> list[dict[_Part, list[int]]]:
    """The communicators of each node of several ranks, each two nodes, and each rank.

    Only where these are several, and of a node only where it has two partners: of one partner
    nobody can tell which of the two it is.
    """
    nodes, pairs, ranks = [defaultdict[_Part, list[int]](list) for _ in range(3)]
    partners = defaultdict[_Part, set[_Place]](set)
    for n, comm in enumerate(comms):
        hosts = tuple((host, -1) for host in comm.hosts)
        if len(hosts) == 2:
            pairs[hosts].append(n)
        for host in hosts:
            nodes[host,].append(n)
            partners[host,] |= {*hosts}
        for place in comm.members:
            ranks[place,].append(n)
    of_several = Counter(host for ((host, _),) in ranks)
    judged = {p: at for p, at in nodes.items() if of_several[p[0][0]] > 1 and len(partners[p]) != 2}
    return [{p: at for p, at in each.items() if len(at) > 1} for each in (judged, pairs, ranks)]


def _finding(part: _Part, comms: Sequence[_Comm], excess: float, noise: float) -> Finding:
    hosts = " - ".join(dict.fromkeys(host for host, _ in part))
    numbers = _listed(number for _, number in part)
    where = f"{hosts} GPU {numbers}" if numbers else hosts
    is_between = len(comms[0].hosts) > 1
    if len(part) > 1:
        kind, note = "link" if is_between else "pair", "either end, or what joins them"
    elif not numbers:
        kind, note = "node", "most of its communicators"
    elif is_between:
        kind, note = "nic", "its NIC, cable or switch port"
    else:
        kind, note = "gpu", "its NVLink or PCIe"
    note = f"{_BETWEEN if is_between else _INSIDE}: {note}"
    rows = sum(comm.rows for comm in comms)
    return Finding(kind, where, expm1(excess), excess / noise, len(comms), rows, note)


def _unexplained(findings: Sequence[Finding]) -> list[Finding]:
    """Without findings between nodes that a GPU or node explains which is slow inside."""
    inside = {one.where for one in findings if one.note.startswith(_INSIDE)}
    return [
        one
        for one in findings
        if one.note.startswith(_INSIDE) or inside.isdisjoint(one.where.split(" - "))
    ]


def _late_processes(frame: pl.DataFrame, *, least: float) -> tuple[list[Finding], int]:
    """The processes that are late beyond noise and `least`, and the rows that could show them.

    A process is late by log(median of all processes / its own time) in a row, and of the rows of
    its hosts by the lower median.
    """
    times = pl.col("process_times_us")
    rows = frame.filter(
        (pl.col("status") == Status.OK.value)
        & pl.col("num_comms").is_null()
        & (times.list.len() >= 3)
        & pl.col("hosts").is_not_null()
    ).with_columns(processes=times.list.len())
    found = []
    for (hosts, _), of in rows.group_by("hosts", "processes", maintain_order=True):
        logs = np.log(np.array(of["process_times_us"].to_list(), dtype=np.float64))
        late = np.median(logs, axis=1, keepdims=True) - logs  # (rows, processes)
        each = np.sort(late, axis=0)[(len(late) - 1) // 2]
        # Of a handful of processes the spread over rows says more than that among them.
        over_rows = float(np.median([_robust_sigma(column) for column in late.T]))
        sigma = max(_robust_sigma(each), over_rows / len(late) ** 0.5, _LEAST_SIGMA)
        limit = NormalDist().inv_cdf(1.0 - _FALSE_ALARMS / len(each))
        names = expand_hosts(str(hosts))
        per_host = max(len(each) // len(names), 1)
        for index in np.flatnonzero((each > np.log1p(least)) & (each / sigma >= limit)):
            host = names[min(int(index) // per_host, len(names) - 1)]
            process, excess = f"{host} process {index % per_host}", float(each[index])
            note = "the others wait for it: its GPU, its CPU or what else runs there"
            z = excess / sigma
            found.append(Finding("late", process, expm1(excess), z, 1, len(late), note))
    return found, rows.height


def _robust_sigma(values: _FloatArray) -> float:
    """Sigma of a normal distribution with this median absolute deviation."""
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def _failed(frame: pl.DataFrame) -> Iterator[Finding]:
    """Split launches that failed: a node that hangs one is not healthy."""
    bad = pl.col("status").is_in([Status.FAILED.value, Status.TIMED_OUT.value])
    lost = frame.filter(pl.col("comm_split").is_not_null() & bad)
    for (split, reason), rows in lost.group_by("comm_split", "reason", maintain_order=True):
        where = f"{rows['hosts'][0] or 'hosts not known'}, split {split}"
        yield Finding("failed", where, None, None, 0, rows.height, str(reason))


def _not_measured(inside: Sequence[_Comm], between: Sequence[_Comm]) -> Iterator[str]:
    if not between:
        yield "nothing was measured between nodes: NICs and cables are not judged"
    elif len({host for comm in between for host in comm.hosts}) == 2:
        yield "of two nodes, which end of a slow pair is slow, and whether all pairs are"
    if not inside:
        yield "nothing was measured inside nodes: NVLink and PCIe are not judged"
    for where, comms in ((_INSIDE, inside), (_BETWEEN, between)):
        partners: dict[_Place, set[_Place]] = defaultdict(set)
        for comm in comms:
            for place in comm.members:
                partners[place] |= {*comm.members} - {place}
        if lonely := sum(len(others) == 1 for others in partners.values()):
            yield f"{where}, {lonely} GPUs have one partner: a slow pair of theirs is either end"


def _all_alike(times: pl.DataFrame, least: float) -> Iterator[str]:
    """What is slow on all nodes: there is no faster part to compare it with."""
    lags = (
        times.group_by("launch", "like")
        .agg(pl.col("own").median(), between=_SPANS.first())
        .with_columns(pl.col("own") - pl.col("own").median().over("launch"))
        .group_by("like", "between", maintain_order=True)
        .agg(pl.col("own").median())
    )
    for numbers, is_between, lag in lags.iter_rows():
        if expm1(lag) > least:
            where = _BETWEEN if is_between else "inside nodes"
            yield (
                f"why GPU {numbers} of all nodes is {expm1(lag):.0%} slower than others {where}: "
                "its rail, or its slot"
            )


def _lower(values: _FloatArray, share: int) -> float:
    """The lower median (`share` 2) or quartile (4): of two middle values the lower one."""
    return float(np.sort(values)[(len(values) - 1) // share])


def _sigma_below(values: _FloatArray) -> float:
    """Sigma of the noise, from the lower half alone: outliers lie above."""
    return _lower(values, 2) - float(np.quantile(values, _BELOW_MEDIAN))


def _listed(numbers: Iterable[int]) -> str:
    """Numbers of ranks as short text: `0-2,5`; of whole hosts nothing."""
    told = host_list(str(number) for number in sorted({*numbers}) if number >= 0)
    return told.replace("[", "").replace("]", "")


def _show(report: Report, out: Console) -> None:
    told = {"inside": report.noise_inside, "between": report.noise_between}
    noise = ", ".join(f"{text} {share:.1%}" for text, share in told.items() if share is not None)
    lines = [
        f"{report.nodes} nodes: {report.communicators} communicators in {report.rows} rows",
        f"slow: {report.least:.0%} slower, and beyond noise ({noise or 'not known'})",
    ]
    for one in report.findings:
        slower = "" if one.slower is None or one.z is None else f" {one.slower:.0%} (z {one.z:.0f})"
        stands = f"{one.comms} communicators, " if one.comms else ""
        lines.append(f"{one.kind}: {one.where}{slower}; {one.note}; {stands}{one.rows} rows")
    lines += [] if report.findings else ["nothing is slow"]
    for line in (*lines, *(f"unknown: {remark}" for remark in report.cannot_tell)):
        out.print(line, markup=False)
