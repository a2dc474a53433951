"""`dynamiccl-collect health`: slow GPUs, NICs, nodes and pairs, by rows that know their hosts.

A communicator is one of many of a `split` launch (examples/health.toml; needs times of single
processes), or a launch of its own (logs of each two nodes of a cluster).

    log(time / its like's) of a communicator = what its slowest part adds + noise

A node adds the lower quartile of its communicators, two nodes the lower median of those between
them, a rank that of its own. The largest is taken first, nodes before pairs before ranks, until the
rest is noise; one check in a hundred of a cluster of this size has a false alarm, were it normal.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import expm1, log, log1p, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import typer
from rich.console import Console

from dynamiccl import cli
from dynamiccl.collect.grid import communicators, expand_hosts, host_list
from dynamiccl.datasets import store
from dynamiccl.datasets.schema import REQUESTED_COLUMNS, Status
from dynamiccl.errors import NotEnoughData
from dynamiccl.repeats import MAD_TO_SIGMA

#: Standard error of a median over that of a mean (normal): sqrt(pi / 2).
_MEDIAN: Final = 1.2533
#: With fewer sets of hosts, or a host in more than half of them, a slow one does not show.
_SETS: Final = 3
_TASK: Final = (
    *("system", "collective", "datatype", "size_bytes", "in_place", "num_nodes", "num_ranks"),
    *("launch_profile", "interference_kind", *REQUESTED_COLUMNS),
)
_TIMES: Final = ("launch", "task", "row", "comm", "numbers", "hosts", "log")
_IS_ALONE: Final = pl.col("numbers") == ""
#: Host and rank on it; -1: the whole host.
_Place = tuple[str, int]
_Part = tuple[_Place, ...]
_FloatArray = npt.NDArray[np.float64]
Finding = dict[str, Any]
Report = dict[str, Any]


class _Comm(NamedTuple):
    members: _Part
    #: log(time / its like's), the least of its launches, which may take other network paths.
    excess: float
    #: A robust sigma of a launch's rows.
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
        cli.print_json(report)
    else:
        _show(report, Console(width=100, highlight=False))
    if not report["is_well"]:
        # A Slurm prolog takes this for an unfit node.
        raise typer.Exit(1)


def examine(frame: pl.DataFrame, *, least: float) -> Report:
    """Find what is slower than its like by `least`, as a share of the time.

    `z` is in sigmas, `noise_*` a share of a time (null: not measured); `not_compared` launches ran
    on too few sets of hosts. Raises NotEnoughData where nothing can be compared.
    """
    comms, not_compared = _read(frame)
    unfit = _unfit(frame)
    if not comms:
        first = " ({rows} rows failed: {note})".format(**unfit[0]) if unfit else ""
        raise NotEnoughData(
            f"no row knows its hosts, or its processes' times, and has others like it{first}; "
            f"measure with a sweep as in examples/health.toml (nccl-tests 2.19.2 or later), or "
            f"import logs of {_SETS} sets of hosts or more, of pairs of four nodes or more"
        )
    slow_inside, noise_inside = _judge([one for one in comms if len(one.hosts) == 1], least)
    slow_between, noise_between = _judge([one for one in comms if len(one.hosts) > 1], least)
    # What a GPU or node that is slow inside explains is not the network's.
    explained = {one["where"] for one in slow_inside}
    slow_between = [o for o in slow_between if explained.isdisjoint(o["where"].split(" - "))]
    findings = [*slow_inside, *slow_between, *unfit]
    return {
        "is_well": not findings,
        "nodes": len({host for comm in comms for host in comm.hosts}),
        "communicators": len(comms),
        "rows": frame.height,
        "least": least,
        "noise_inside": noise_inside,
        "noise_between": noise_between,
        "findings": sorted(findings, key=lambda one: (-(one["slower"] or 0.0), one["where"])),
        "not_compared": not_compared,
    }


def _read(frame: pl.DataFrame) -> tuple[list[_Comm], int]:
    has_time = pl.col("comm_split", "process_times_us", "num_hosts").is_not_null()
    is_alone = pl.col("comm_split").is_null() & pl.col("hosts").is_not_null()
    launch = pl.concat_str("system", "sweep", pl.coalesce("launch", "run"), separator="|")
    rows = frame.filter(pl.col("status") == Status.OK.value, is_alone | pl.all_horizontal(has_time))
    rows = rows.with_columns(launch=launch, task=pl.struct(_TASK).rank("dense"))
    if rows.is_empty():
        return [], 0
    numbered: dict[_Part, int] = {}
    lines = [
        (row["launch"], row["task"], number, numbered.setdefault(members, len(numbered)),
         _listed(members), ",".join(sorted({host for host, _ in members})), log(time_us))
        for number, row in enumerate(rows.iter_rows(named=True))
        for members, time_us in _communicators(row)
    ]  # fmt: skip
    times = pl.DataFrame(lines, _TIMES, orient="row")
    # NICs are compared with those on the same rail, GPUs with the same slot, where these are four.
    alike = pl.col("hosts").len().over("row", "numbers").min().over("launch")
    like = pl.when(alike >= 4).then("numbers").otherwise(pl.lit("all"))
    own = pl.col("log").quantile(0.5, "lower").over("row", "like")
    times = times.with_columns(like=like).with_columns(own=own)
    base = pl.when(_IS_ALONE).then("elsewhere").otherwise(pl.min_horizontal("own", "elsewhere"))
    told = times.join(_elsewhere(times), on=("task", "launch"), how="left")
    told = told.with_columns(excess=pl.col("log") - base)
    excess = pl.col("excess")
    spread = MAD_TO_SIGMA * (excess - excess.median()).abs().median()
    launches = told.drop_nulls("excess").group_by("comm", "launch")
    found = launches.agg(excess.quantile(0.5, "lower"), spread=spread, rows=pl.len())
    comms = found.group_by("comm")
    found = comms.agg(pl.min("excess"), pl.median("spread"), pl.sum("rows"), pl.len())
    lost = told.filter(pl.col("excess").is_null())["launch"].n_unique()
    parts = [*numbered]
    return sorted(_Comm(parts[comm], *told) for comm, *told in found.iter_rows()), lost


def _communicators(row: Mapping[str, Any]) -> Iterator[tuple[_Part, float]]:
    hosts, count, times_us = row["hosts"], row["num_hosts"], row["process_times_us"]
    if row["comm_split"] is None:
        yield tuple((host, -1) for host in expand_hosts(hosts)), row["time_us"]
        return
    where = _places(hosts, count, len(times_us))
    for each in communicators(row["comm_split"], count, len(times_us) // count, spare=True):
        yield tuple(where[n] for n in each), fmean(times_us[n] for n in each)


@cache
def _places(hosts: str | None, num_hosts: int, processes: int) -> list[_Place]:
    """Node by node; unnamed nodes get a number."""
    names = expand_hosts(hosts or "")
    names = names if len(names) == num_hosts else [f"node{n}" for n in range(num_hosts)]
    per_host = max(processes // num_hosts, 1)
    return [(names[min(p // per_host, num_hosts - 1)], p % per_host) for p in range(processes)]


def _elsewhere(times: pl.DataFrame) -> pl.DataFrame:
    """What most launches of a task took, for one whose communicators span the same hosts."""
    alone, spans = _IS_ALONE.first(), pl.col("hosts").first().str.contains(",")
    is_lonely = (pl.col("hosts").n_unique() == 1) & (alone | spans)
    launches = times.group_by("task", "launch").agg(
        pl.col("own").median(), pl.col("hosts").first(), alone=alone, lonely=is_lonely
    )
    per_set = launches.group_by("task", "hosts").agg(pl.col("own").median())
    usual = pl.col("own").quantile(0.5, "lower").alias("elsewhere")
    hosts = pl.col("hosts").str.split(",").list.explode()
    share = hosts.len() / hosts.n_unique() / pl.len()
    per_task = per_set.group_by("task").agg(usual, sets=pl.len(), share=share)
    shows = (pl.col("sets") >= _SETS) & (pl.col("share") <= 0.5)
    enough = pl.when("alone").then(shows).otherwise(pl.col("sets") >= 2)
    compared = launches.filter("lonely").join(per_task, on="task").filter(enough)
    return compared.select("task", "launch", "elsewhere")


def _judge(comms: Sequence[_Comm], least: float) -> tuple[list[Finding], float | None]:
    if not comms:
        return [], None
    left = np.array([comm.excess for comm in comms])
    spread = median(_MEDIAN * comm.spread / sqrt(comm.rows / comm.launches) for comm in comms)
    # Four digits are printed.
    sigma = max(_sigma_below(left), spread, 0.003)
    kinds = _parts(comms)
    limit = NormalDist().inv_cdf(1.0 - 0.01 / max(sum(map(len, kinds)), 2))
    found = []
    for parts, share in zip(kinds, (4, 2, 2, 2), strict=True):
        floor = _sigma_below(np.array([_lower(left[at], share) for at in parts.values()] or [0.0]))
        while parts:
            excess, part = max((_lower(left[at], share), part) for part, at in parts.items())
            at = parts.pop(part)
            noise = sigma if len(at) == 1 else max(_MEDIAN * sigma / sqrt(len(at)), floor)
            if excess <= log1p(least) or excess / noise < limit:
                break
            found.append(_finding(part, [comms[n] for n in at], excess, noise))
            # A call takes as long as its slowest part, so this much is explained.
            left[at] = np.where(left[at] > 0, np.maximum(left[at] - excess, 0.0), left[at])
    return found, expm1(sigma)


def _parts(comms: Sequence[_Comm]) -> list[dict[_Part, list[int]]]:
    """By node (not those of one partner: either may be slow), two nodes, rank, and communicator."""
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
    several = [{p: at for p, at in each.items() if len(at) > 1} for each in (judged, pairs, ranks)]
    return [*several, {comm.members: [n] for n, comm in enumerate(comms)}]


def _finding(part: _Part, comms: Sequence[_Comm], excess: float, noise: float) -> Finding:
    hosts = " - ".join(dict.fromkeys(host for host, _ in part))
    numbers = _listed(part)
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
    note = f"{'between nodes' if is_between else 'inside the node'}: {note}"
    rows, z = sum(comm.rows for comm in comms), excess / noise
    return _told(kind, where, rows, note) | {"slower": expm1(excess), "z": z, "comms": len(comms)}


def _told(kind: str, where: str, rows: int, note: str) -> Finding:
    found = {"kind": kind, "where": where, "slower": None, "z": None, "comms": 0}
    return {**found, "rows": rows, "note": note}


def _unfit(frame: pl.DataFrame) -> list[Finding]:
    """Failed split launches, since a node that hangs one is not healthy, and lossy NIC ports."""
    bad = pl.col("status").is_in([Status.FAILED.value, Status.TIMED_OUT.value])
    lost = frame.filter(pl.col("comm_split").is_not_null() & bad)
    found = []
    for (split, reason), rows in lost.group_by("comm_split", "reason", maintain_order=True):
        where = f"{rows['hosts'][0] or 'hosts not known'}, split {split}"
        found.append(_told("failed", where, rows.height, str(reason)))
    lossy = frame.filter((pl.col("nic_retries") > 0) & pl.col("nic_worst").is_not_null())
    ports = lossy.group_by("nic_worst").agg(pl.len(), pl.col("nic_retries").sum())
    # Where all ports lose some, none is to blame.
    often = ports.filter((pl.col("len") >= 3) & (pl.col("len") > lossy.height / 2))
    by_count = often.sort("len", "nic_worst", descending=[True, False])
    for port, count, retries in by_count.iter_rows():
        note = f"{retries} packets lost or sent again, by its counters"
        found.append(_told("counters", port, count, note))
    return found


def _lower(values: _FloatArray, share: int) -> float:
    """The lower median (`share` 2) or quartile (4)."""
    return float(np.sort(values)[(len(values) - 1) // share])


def _sigma_below(values: _FloatArray) -> float:
    """Sigma by the lower half alone: outliers lie above."""
    return _lower(values, 2) - float(np.quantile(values, 0.158655))


@cache
def _listed(members: _Part) -> str:
    told = host_list(map(str, sorted({number for _, number in members if number >= 0})))
    return told.replace("[", "").replace("]", "")


def _show(report: Report, out: Console) -> None:
    shares = (report["noise_inside"], report["noise_between"])
    inside, between = ("not measured" if one is None else f"{one:.1%}" for one in shares)
    noise = f"inside nodes {inside}, between nodes {between}"
    out.print("{nodes} nodes: {communicators} communicators in {rows} rows".format(**report))
    out.print(f"slow: {report['least']:.0%} slower, and beyond noise ({noise})")
    for one in report["findings"]:
        slower = "" if one["slower"] is None else f" {one['slower']:.0%} (z {one['z']:.0f})"
        stands = f"{one['comms']} communicators, " if one["comms"] else ""
        text = f"{one['kind']}: {one['where']}{slower}; {one['note']}; {stands}{one['rows']} rows"
        out.print(text, markup=False)
    if report["is_well"]:
        out.print("nothing is slow")
    if report["not_compared"]:
        few = f"the same call ran on fewer than {_SETS} sets of hosts, or on pairs of three nodes"
        out.print(f"not compared: {report['not_compared']} launches: {few}")
