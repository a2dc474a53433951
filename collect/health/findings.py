"""The slow parts by name: GPU, NIC, node, or pair of nodes; and what cannot be told apart."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import expm1
from statistics import median
from typing import Any, Final

import polars as pl

from dynamiccl.collect.findings.nic_ports import lossy_ports
from dynamiccl.collect.health.late import late_processes
from dynamiccl.collect.health.model import Judged, Slow, judge
from dynamiccl.collect.health.readings import Place, Reading, Readings, readings
from dynamiccl.collect.nccl_log import host_list
from dynamiccl.datasets.schema import Status
from dynamiccl.errors import NotEnoughData

_EITHER: Final = "either end, or what joins them"
_INSIDE: Final = "inside the node"
_ONCE: Final = "whether it is the hardware's or this launch's alone, until a second launch"
_LATE: Final = "the others wait for it: its GPU, its CPU or what else runs there"
_SHARE: Final = 0.5


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
    """The result of a check of a cluster."""

    nodes: int
    gpus: int
    communicators: int
    rows: int
    #: The least that counts, as a share of the time.
    least: float
    #: A robust sigma of a communicator's time, as a share of it; null where none was measured.
    noise_inside: float | None
    noise_between: float | None
    findings: tuple[Finding, ...]
    #: What these measurements cannot tell.
    cannot_tell: tuple[str, ...]

    @property
    def is_well(self) -> bool:
        """Whether nothing is slow."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON document."""
        return {"is_well": self.is_well, **asdict(self)}


def examine(frame: pl.DataFrame, *, least: float) -> Report:
    """Find what is slow in a data set. Raises NotEnoughData without per-process times."""
    found = readings(frame)
    late, late_rows = late_processes(frame, least=least)
    failed = [*_failed(frame)]
    if not found.comms and not late_rows:
        first = f" ({failed[0].rows} rows failed: {failed[0].note})" if failed else ""
        raise NotEnoughData(
            f"no row has times of single processes{first}; measure with runner.per_iteration = "
            "true and nccl-tests 2.19.2 or later, or with 'dynamiccl-collect health --run'"
        )
    inside = [reading for reading in found.comms if not reading.between_nodes]
    between = [reading for reading in found.comms if reading.between_nodes]
    judged = [judge(part, least=least) if part else None for part in (inside, between)]
    ranks = {place for reading in found.comms for place in reading.members}
    slow = [*_named(judged[0], inside=True), *_named(judged[1], inside=False)]
    waited = [
        _finding("late", f"{one.members[0][0]} process {one.members[0][1]}", [one], _LATE)
        for one in late
    ]
    findings = [*_merged(slow), *waited, *_counters(frame), *failed]
    return Report(
        nodes=len({host for host, _ in ranks}),
        gpus=len(ranks),
        communicators=len(found.comms),
        rows=frame.height,
        least=least,
        noise_inside=None if judged[0] is None else expm1(judged[0].sigma),
        noise_between=None if judged[1] is None else expm1(judged[1].sigma),
        findings=tuple(sorted(findings, key=lambda one: (-(one.slower or 0.0), one.where))),
        cannot_tell=(
            *_not_measured(inside, between),
            *_one_partner(inside, between),
            *_all_alike(found, least),
            *_throttled(frame),
            *(_ONCE for _ in findings[:1] if any(one.launches < 2 for one in found.comms)),
        ),
    )


def _named(judged: Judged | None, *, inside: bool) -> Iterable[Finding]:
    if judged is None:
        return
    where = _INSIDE if inside else "between nodes"
    for slow in judged.nodes:
        yield _finding("node", slow.members[0][0], [slow], f"{where}, most of its GPUs")
    for slow in judged.pairs:
        first, second = (host for host, _ in slow.members)
        yield _finding("link", f"{first} - {second}", [slow], f"{where}: {_EITHER}")
    for slow in judged.ranks:
        ((host, number),) = slow.members
        kind, what = ("gpu", "NVLink or PCIe") if inside else ("nic", "NIC, cable or switch port")
        yield _finding(kind, f"{host} GPU {number}", [slow], f"{where}: its {what}")
    yield from _pairs(judged.comms, where)


def _pairs(comms: Sequence[Slow], where: str) -> Iterable[Finding]:
    """Communicators that are slow by themselves; all of the same two nodes are one finding."""
    by_hosts: dict[tuple[str, ...], list[Slow]] = defaultdict(list)
    note = f"{where}: {_EITHER}"
    for slow in comms:
        hosts = tuple(dict.fromkeys(host for host, _ in slow.members))
        if len(hosts) > 1:
            by_hosts[hosts].append(slow)
        else:
            numbers = _listed(number for _, number in slow.members)
            yield _finding("pair", f"{hosts[0]} GPU {numbers}", [slow], note)
    for hosts, found in by_hosts.items():
        numbers = _listed(number for slow in found for _, number in slow.members)
        yield _finding("link", f"{' - '.join(hosts)} GPU {numbers}", found, note)


def _listed(numbers: Iterable[int]) -> str:
    """Numbers as short text with ranges.

    >>> _listed([0, 1, 2, 5, 5])
    '0-2,5'
    """
    return host_list(map(str, sorted({*numbers}))).replace("[", "").replace("]", "")


def _finding(kind: str, where: str, slow: Sequence[Slow], note: str) -> Finding:
    return Finding(
        kind,
        where,
        slower=expm1(median(one.excess for one in slow)),
        z=median(one.z for one in slow),
        comms=sum(one.comms for one in slow),
        rows=sum(one.rows for one in slow),
        note=note,
    )


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Drop findings between nodes that are explained by a GPU or node that is slow inside."""
    inside = {one.where: one for one in findings if one.note.startswith(_INSIDE)}
    kept: list[Finding] = []
    told: dict[str, float] = {}
    for one in findings:
        ends = [one.where, *(one.where.split(" - ") if one.kind == "link" else [])]
        owner = next((inside[end] for end in ends if end in inside), None)
        if owner is None or owner is one:
            kept.append(one)
        else:
            told[owner.where] = max(one.slower or 0.0, told.get(owner.where, 0.0))
    return [
        replace(one, note=f"{one.note}; between nodes {told[one.where]:.0%} slower too")
        if one.where in told
        else one
        for one in kept
    ]


def _failed(frame: pl.DataFrame) -> Iterable[Finding]:
    """Findings for split launches that failed: a node that hangs one is not healthy."""
    lost = frame.filter(
        pl.col("comm_split").is_not_null()
        & pl.col("status").is_in([Status.FAILED.value, Status.TIMED_OUT.value])
    )
    for (split, reason), rows in lost.group_by("comm_split", "reason", maintain_order=True):
        where = f"{rows['hosts'][0] or 'hosts not known'}, split {split}"
        yield Finding("failed", where, None, None, 0, rows.height, str(reason))


def _throttled(frame: pl.DataFrame) -> Iterable[str]:
    count = frame.filter(pl.col("throttled")).height
    if count:
        yield f"which GPU it is that heat or power slowed, in {count} of {frame.height} rows"


def _counters(frame: pl.DataFrame) -> Iterable[Finding]:
    for port in lossy_ports(frame):
        note = f"{port.retries} packets lost or sent again, by its counters"
        yield Finding("counters", port.name, None, None, 0, port.rows, note)


def _not_measured(inside: Sequence[Reading], between: Sequence[Reading]) -> Iterable[str]:
    if not between:
        yield "nothing was measured between nodes: NICs and cables are not judged"
    elif len({host for one in between for host, _ in one.members}) == 2:
        yield "of two nodes, which end of a slow pair is slow, and whether all pairs are"
    if not inside:
        yield "nothing was measured inside nodes: NVLink and PCIe are not judged"


def _one_partner(inside: Sequence[Reading], between: Sequence[Reading]) -> Iterable[str]:
    for kind, part in (("inside nodes", inside), ("between nodes", between)):
        lonely = _with_one_partner(part)
        if lonely:
            yield f"{kind}, {lonely} GPUs have one partner: a slow pair of theirs is either end"


def _all_alike(found: Readings, least: float) -> Iterable[str]:
    """Notes on what is slow on all nodes: there is no faster part to compare it with."""
    for (numbers, is_between), lag in found.alike.items():
        if expm1(lag) > least:
            where = "between" if is_between else "inside"
            yield (
                f"why GPU {_listed(numbers)} of all nodes is {expm1(lag):.0%} slower than others "
                f"{where} nodes: its rail, or its slot"
            )


def _with_one_partner(part: Sequence[Reading]) -> int:
    partners: dict[Place, set[Place]] = defaultdict(set)
    for one in part:
        for place in one.members:
            partners[place] |= {*one.members} - {place}
    return sum(len(others) < 2 for others in partners.values())
