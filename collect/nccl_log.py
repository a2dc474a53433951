"""What NCCL's log tells: releases, communicators, its cost model, and what it ran for each call.

What ran (NCCL_DEBUG_SUBSYS=TUNING, or COLL from 2.23 on), by release:

    2.20-2.22  <B> Bytes -> Algo <int> proto <int> time <float>
    2.23       <Func>: <B> Bytes -> Algo <int> proto <int> time <float>
    2.24-      <Func>: <B> Bytes -> Algo <NAME> proto <NAME> channel{Lo..Hi}={<lo>..<hi>} ...

From 2.24 on, B is count times type size: the bytes of one rank for AllGather and ReduceScatter.
Symmetric kernels and the copy engine print another tail; they are none of the configs we know.

The cost model (2.13 to 2.30, `src/graph/tuning.cc`), by rank 0 under NCCL_DEBUG_SUBSYS=TUNING, in
blocks of three algorithms:

      Algorithm   |                            Tree                  |  ...
      Protocol    |             LL |          LL128 |         Simple |  ...
     Max NThreads |            512 |            640 |            512 |  ...
        Broadcast |     0.0/   0.0 |     0.0/   0.0 |     9.3/   1.2 |  ...

A bandwidth of 0.0 means that NCCL does not take the cell, or that it is below 0.05 GB/s.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from dynamiccl.collect.settings import Settings, add_settings, kept
from dynamiccl.datasets.provenance import program_record
from dynamiccl.datasets.schema import COSTS, DECISIONS
from dynamiccl.datasets.store import write_part
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.group import CostLine

_VERSION: Final = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)(?:\+cuda(\d+\.\d+))?")
_RANKS: Final = re.compile(r"\bnranks (\d{1,7})\b", re.IGNORECASE)
_NODES: Final = re.compile(r"\bnNodes (\d{1,7})\b")
_SET: Final = re.compile(r"\b(NCCL_\w+) set (?:by|in) (?:the )?environment (?:variable )?to (.*)")

_CALL: Final = re.compile(
    r"(?:(?P<func>[A-Za-z]+)(?P<special> \[[^\]]+\])?: )?(?P<size>\d{1,18}) Bytes -> "
    r"(?:Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)"
    r"(?: time [\d.]+| channel\{Lo\.\.Hi\}=\{(?P<low>\d{1,3})\.\.(?P<high>\d{1,3})\})"
    r"|(?P<other>\w+))"
)
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter})

_COST_ALGORITHMS: Final = re.compile(r"\s+Algorithm\s+\|(.*)")
_COST_THREADS: Final = re.compile(r"\s+Max NThreads \|(.*)")
_COST_ROW: Final = re.compile(r"\s+([A-Z][A-Za-z]+) \|((?:\s*\d+\.\d/\s*\d+\.\d \|)+)\s*$")
_COST_CELL: Final = re.compile(r"\s*(\d+\.\d)/\s*(\d+\.\d) \|")
_COST_PROTOCOLS: Final = (Protocol.LL, Protocol.LL128, Protocol.Simple)

#: A name whose digits may count: `nid007106`, `gpu-3`, `n12.cluster`.
_COUNTED_HOST: Final = re.compile(r"(.*?)(\d{1,9})(\D*)")
#: One host, or a range of them: `n[01-04,7].cluster`.
_LISTED_HOST: Final = re.compile(r"([^,\[\]]+)(?:\[([\d,-]*)\])?([^,\[\]]*)(?:,|$)")

Cell = tuple[Collective, Algorithm, Protocol]
_Kind = TypeVar("_Kind", Algorithm, Protocol, Collective)


class Choice(NamedTuple):
    """What NCCL ran for one call; channels are None where its release does not print them."""

    algorithm: str
    protocol: str
    num_channels: int | None


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One line: collective (None before 2.23), bytes as printed, choice (None: none of ours)."""

    collective: Collective | None
    printed_bytes: int
    per_rank: bool
    choice: Choice | None

    def whole_bytes(self, num_ranks: int) -> int:
        """NCCL's nBytes: the whole buffer, over all ranks where printed per rank."""
        return self.printed_bytes * num_ranks if self.per_rank else self.printed_bytes


def logged_calls(lines: Iterable[str]) -> Iterator[LoggedCall]:
    """The calls of a log, in order."""
    for line in lines:
        call = _logged_call(line)
        if call is not None:
            yield call


def _logged_call(line: str) -> LoggedCall | None:
    if " Bytes -> " not in line:
        return None
    match = _CALL.search(line)
    if match is None:
        return None
    collective = _named(Collective, match["func"]) if match["func"] else None
    if match["func"] and collective is None:
        return None
    per_rank = match["low"] is not None and collective in _PER_RANK
    return LoggedCall(collective, int(match["size"]), per_rank, _choice(match))


def _choice(match: re.Match[str]) -> Choice | None:
    if match["other"] or match["special"]:
        return None
    algorithm = _named(Algorithm, match["algorithm"])
    protocol = _named(Protocol, match["protocol"])
    if algorithm is None or protocol is None:
        return None
    if match["low"] is None:
        return Choice(algorithm.wire, protocol.wire, None)
    count = int(match["high"]) - int(match["low"]) + 1
    return Choice(algorithm.wire, protocol.wire, count) if count > 0 else None


def _named(kind: type[_Kind], text: str) -> _Kind | None:
    """The member of that name or number; None for one of a later NCCL, or what is none."""
    try:
        return kind(int(text)) if text.isdecimal() else kind.parse(text.strip())
    except (UnknownName, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Cost:
    """NCCL's prediction for a cell: latency + bytes / bandwidth, before its corrections by size."""

    latency_us: float
    #: NCCL's bandwidth of the algorithm, as it prints it; 0 = it does not take the cell.
    bandwidth_gbytes_per_s: float
    max_threads: int | None


@dataclass(slots=True)
class NcclLog:
    """What the log of one run told. Sets: one value is a fact, two contradict each other."""

    versions: set[str] = field(default_factory=set)
    cuda_versions: set[str] = field(default_factory=set)
    num_ranks: set[int] = field(default_factory=set)
    num_nodes: set[int] = field(default_factory=set)
    #: Variables that NCCL says it found set.
    settings: Settings = field(default_factory=dict)
    #: Whether ranks were told to be hosts of their own (NCCL_HOSTID).
    names_host_ids: bool = False
    calls: dict[LoggedCall, None] = field(default_factory=dict)
    #: Cost tables, one for each communicator that logged one.
    costs: list[dict[Cell, Cost]] = field(default_factory=list)
    _algorithms: list[Algorithm | None] = field(default_factory=list)
    _threads: list[int | None] = field(default_factory=list)

    def note(self, line: str) -> None:
        """Take one line in; any line that is not NCCL's says nothing."""
        call = _logged_call(line)
        if call is not None:
            self.calls[call] = None
            return
        _, mark, text = line.partition("NCCL INFO")
        if mark and "|" in text:
            self._note_cost(text)
            return
        version = _VERSION.search(line)
        if version:
            self.versions.add(str(NcclVersion.parse(version[1])))
            if version[2]:
                self.cuda_versions.add(version[2])
        if "nranks" in line or "nRanks" in line:
            self.num_ranks.update(int(n) for n in _RANKS.findall(line))
            self.num_nodes.update(int(n) for n in _NODES.findall(line))
        self.names_host_ids = self.names_host_ids or "NCCL_HOSTID" in line
        told = _SET.search(line) if mark else None
        if told:
            add_settings(self.settings, kept([(told[1], told[2].strip().rstrip("."))]))

    def merge(self, other: "NcclLog") -> None:
        """Add what another log of the same run told; its own settings and costs come first."""
        for name in ("versions", "cuda_versions", "num_ranks", "num_nodes"):
            getattr(self, name).update(getattr(other, name))
        self.names_host_ids = self.names_host_ids or other.names_host_ids
        self.settings = {**other.settings, **self.settings}
        self.calls |= other.calls
        self.costs = self.costs or other.costs

    def choices(
        self, collective: Collective, num_ranks: int | None
    ) -> tuple[dict[int, Choice], list[int]]:
        """Choice by size in bytes (whole buffer), and the sizes whose lines disagree.

        Lines in bytes per rank are left out when the number of ranks is not known.
        """
        by_size: dict[int, set[Choice | None]] = {}
        for call in self.calls:
            if call.collective not in {None, collective} or (call.per_rank and num_ranks is None):
                continue
            by_size.setdefault(call.whole_bytes(num_ranks or 0), set()).add(call.choice)
        agreed: dict[int, Choice] = {}
        for size, choices in by_size.items():
            only = next(iter(choices)) if len(choices) == 1 else None
            if only is not None:
                agreed[size] = only
        return agreed, sorted(by_size.keys() - agreed.keys())

    def cost_table(self) -> Mapping[Cell, Cost] | None:
        """The table that all communicators logged; None without one, or if they differ."""
        distinct = [t for i, t in enumerate(self.costs) if t and t not in self.costs[:i]]
        return distinct[0] if len(distinct) == 1 else None

    def _note_cost(self, text: str) -> None:
        if names := _COST_ALGORITHMS.match(text):
            self._algorithms = [
                _named(Algorithm, name) for name in names[1].split("|") if name.strip()
            ]
            self._threads = []
            # Each communicator begins with the first block.
            if Algorithm.Tree in self._algorithms or not self.costs:
                self.costs.append({})
        elif threads := _COST_THREADS.match(text):
            self._threads = [_count(word) for word in threads[1].replace("|", " ").split()]
        elif (row := _COST_ROW.match(text)) and self.costs:
            collective = _named(Collective, row[1])
            if collective is not None:
                self._take_costs(collective, row[2])

    def _take_costs(self, collective: Collective, text: str) -> None:
        for number, (latency, bandwidth) in enumerate(_COST_CELL.findall(text)):
            block, protocol = divmod(number, len(_COST_PROTOCOLS))
            algorithm = self._algorithms[block] if block < len(self._algorithms) else None
            if algorithm is None:
                continue
            threads = self._threads[number] if number < len(self._threads) else None
            cost = Cost(float(latency), float(bandwidth), threads)
            self.costs[-1][collective, algorithm, _COST_PROTOCOLS[protocol]] = cost


def _count(word: str) -> int | None:
    """A number of threads; None for a word that was damaged in the log."""
    return int(word) if re.fullmatch(r"[0-9]{1,9}", word) else None


def as_logged(lines: Mapping[Cell, CostLine]) -> dict[Cell, Cost]:
    """The cost table as NCCL prints it, with one decimal."""
    return {
        cell: Cost(round(line.latency_us, 1), round(line.algbw_gbytes_per_s, 1), None)
        for cell, line in lines.items()
    }


def cost_rows(table: Mapping[Cell, Cost], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the `costs` table, with the group's columns from `known`."""
    shared = {name: known[name] for name in COSTS.names if name in known}
    return [
        {
            **shared,
            "collective": collective.wire,
            "algorithm": algorithm.wire,
            "protocol": protocol.wire,
            "latency_us": cost.latency_us,
            "bandwidth_gbytes_per_s": cost.bandwidth_gbytes_per_s,
            "max_threads": cost.max_threads,
        }
        for (collective, algorithm, protocol), cost in table.items()
    ]


def write_costs(
    out: Path, table: Mapping[Cell, Cost], known: Mapping[str, Any], *, program: str
) -> list[Path]:
    """Write a group's cost table as parts of a data set; returns their paths."""
    rows = pa.Table.from_pylist(cost_rows(table, known), schema=COSTS)
    return write_part(out, rows, kind="costs", provenance=program_record(program))


def decision_rows(
    choices: Mapping[int, Choice], collective: Collective, known: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the `decisions` table: what ran for each size, with the group's columns."""
    shared = {name: known[name] for name in DECISIONS.names if name in known}
    return [
        {
            **shared,
            "collective": collective.wire,
            "size_bytes": size_bytes,
            **choice._asdict(),
        }
        for size_bytes, choice in sorted(choices.items())
    ]


def host_list(hosts: Iterable[str]) -> str:
    """The hosts as Slurm lists them, each once; runs of consecutive numbers become a range.

    >>> host_list(["n01", "n02", "n03", "n07", "login", "n7"])
    'n[01-03],n07,login,n7'
    """
    ranges: list[tuple[str, str, str, int]] = []
    for host in dict.fromkeys(hosts):
        match = _COUNTED_HOST.fullmatch(host)
        head, digits, tail = match.groups() if match else (host, "", "")
        last = ranges[-1] if ranges else ("", "", "", 0)
        follows = (
            digits != ""
            and (head, tail, len(digits)) == (last[0], last[2], len(last[1]))
            and int(digits) == int(last[1]) + last[3]
        )
        if follows:
            ranges[-1] = (head, last[1], tail, last[3] + 1)
        else:
            ranges.append((head, digits, tail, 1))
    return ",".join(
        f"{head}{first}{tail}"
        if count == 1
        else f"{head}[{first}-{int(first) + count - 1:0{len(first)}d}]{tail}"
        for head, first, tail, count in ranges
    )


def expand_hosts(text: str) -> list[str]:
    """The hosts of such a list, in order.

    >>> expand_hosts('n[01-03,7],login')
    ['n01', 'n02', 'n03', 'n7', 'login']
    """
    names: list[str] = []
    for head, inside, tail in _LISTED_HOST.findall(text):
        if not inside:
            names.append(head + tail)
        for part in filter(None, inside.split(",")):
            low, _, high = part.partition("-")
            numbers = range(int(low), int(high or low) + 1)
            names += [f"{head}{number:0{len(low)}d}{tail}" for number in numbers]
    return names
