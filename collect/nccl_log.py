"""What NCCL was told (NCCL_* variables that a shell or NCCL itself shows), and what its log tells.

**Variables.** An environment may hold secrets, so nothing is kept that is not on a literal list of
names. What names one algorithm, protocol or channel count is the requested config; everything else
that is kept becomes part of the launch profile, since it is fixed for the whole process. A variable
whose value cannot be read (`$1`), or is said to be two things, is kept without a value. The config
of its run is then *not known*: it is never taken for NCCL's own choice.

**What ran** (NCCL_DEBUG_SUBSYS=TUNING, or COLL from 2.23 on), by release:

    2.20-2.22  <B> Bytes -> Algo <int> proto <int> time <float>
    2.23       <Func>: <B> Bytes -> Algo <int> proto <int> time <float>
    2.24-      <Func>: <B> Bytes -> Algo <NAME> proto <NAME> channel{Lo..Hi}={<lo>..<hi>} ...

From 2.24 on, B is count times type size: the bytes of one rank for AllGather and ReduceScatter.
Symmetric kernels and the copy engine print another tail; they are none of the configs we know.

**The cost model** (2.13 to 2.30, `src/graph/tuning.cc`), by rank 0 under NCCL_DEBUG_SUBSYS=TUNING,
in blocks of three algorithms:

      Algorithm   |                            Tree                  |  ...
      Protocol    |             LL |          LL128 |         Simple |  ...
        Broadcast |     0.0/   0.0 |     0.0/   0.0 |     9.3/   1.2 |  ...

A bandwidth of 0.0 means that NCCL does not take the cell, or that it is below 0.05 GB/s.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from dynamiccl.datasets.provenance import program_record
from dynamiccl.datasets.schema import COSTS, DEFAULT_PROFILE
from dynamiccl.datasets.store import write_part
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.group import Cell, CostLine

#: Variables by name; None = set, to what is not known.
Settings = dict[str, str | None]

#: Every variable that is ever stored, without NCCL_; exact names, no patterns. None of them can
#: hold a secret.
_KEPT: Final = """
    ALGO PROTO MIN_CTAS MAX_CTAS MIN_NCHANNELS MAX_NCHANNELS BUFFSIZE CHECKS_DISABLE
    COLLNET_ENABLE CROSS_NIC CTA_POLICY CUMEM_ENABLE DMABUF_ENABLE GRAPH_REGISTER
    IB_ADAPTIVE_ROUTING IB_DISABLE IB_QPS_PER_CONNECTION IB_SPLIT_DATA_ON_QPS IB_TC
    LL_BUFFSIZE LL128_BUFFSIZE LOCAL_REGISTER MNNVL_ENABLE NCHANNELS_PER_NET_PEER NET
    NET_GDR_LEVEL NET_GDR_READ NSOCKS_PERTHREAD NTHREADS NVLS_ENABLE P2P_DISABLE P2P_LEVEL
    P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE PXN_DISABLE SHM_DISABLE
    SOCKET_NTHREADS WIN_ENABLE
"""
KEPT_NAMES: Final = frozenset(f"NCCL_{name}" for name in _KEPT.split())
#: Long or odd values are not settings that we understand.
_PLAIN_VALUE: Final = re.compile(r"[\w.,;:^/+-]{1,64}")

#: nccl-tests binaries; `make NAME_SUFFIX=_mpi` and packagers put something behind `_perf`.
_PROGRAM: Final = re.compile(r"(?:^|[\s/\"'=])([a-z][a-z_]*?)_perf[\w.-]*(?=$|[\s\"'])")

#: What a shell prints before a command: `$ `, `+ ` of `set -x`, `user@node:~/tests$ `.
_PROMPT: Final = re.compile(
    r"\s*(?:\(\S{1,40}\) )?(?:\[?[\w.-]+@[\w.-]+[^$#>%]{0,100}[$#>%]\s+|([+$>% \t]+))?"
)
#: `NCCL_ALGO=Ring`, `--export=ALL,NCCL_ALGO=Ring,Tree,NCCL_PROTO=LL`, `"NCCL_ALGO=Ring"`; with the
#: name and value apart, as MPICH, Intel MPI and csh have it.
_ASSIGNED: Final = re.compile(
    r"(?:^|[\s,=`(\"']|-x)(NCCL_\w+)=(\"[^\"]*\"|'[^']*'|(?:(?!,NCCL_)[^\s\"'])*)"
    r"|(?:-genv|-env|setenv)\s+(NCCL_\w+)\s+(\S+)"
)
#: What is between two commands of a line, and in no quotation.
_BETWEEN_COMMANDS: Final = re.compile(r"[;&|]+(?=(?:[^\"']|\"[^\"]*\"|'[^']*')*$)")

_VERSION: Final = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)(?:\+cuda(\d+\.\d+))?")
_RANKS: Final = re.compile(r"\bnranks (\d{1,7})\b", re.IGNORECASE)
_NODES: Final = re.compile(r"\bnNodes (\d{1,7})\b")
_SET: Final = re.compile(r"\b(NCCL_\w+) set (?:by|in) (?:the )?environment (?:variable )?to (.*)")

_CALL: Final = re.compile(
    r"(?:([A-Za-z]+)( \[[^\]]+\])?: )?(\d{1,18}) Bytes -> (?=\w)(?:Algo (\w+) proto (\w+)"
    r"(?: time [\d.]+| channel\{Lo\.\.Hi\}=\{(\d{1,3})\.\.(\d{1,3})\}))?"
)
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter})

_COST_ALGORITHMS: Final = re.compile(r"\s+Algorithm\s+\|(.*)")
_COST_ROW: Final = re.compile(r"\s+([A-Z][A-Za-z]+) \|((?:\s*\d+\.\d/\s*\d+\.\d \|)+)\s*$")
_COST_CELL: Final = re.compile(r"\s*(\d+\.\d)/\s*(\d+\.\d) \|")
_COST_PROTOCOLS: Final = (Protocol.LL, Protocol.LL128, Protocol.Simple)

#: What NCCL ran for one call: algorithm, protocol, and channels where its release prints them.
Choice = tuple[str, str, int | None]
_Kind = TypeVar("_Kind", Algorithm, Protocol, Collective)


# --- What it was told ---


def program_in(line: str) -> str | None:
    """The nccl-tests program that a line names, without `_perf`, or None.

    >>> program_in("$ srun -N2 ./build/all_reduce_perf_mpi -b 1M -e 128M")
    'all_reduce'
    """
    match = _PROGRAM.search(line) if "_perf" in line else None
    return match[1] if match else None


def kept(pairs: Iterable[tuple[str, str]]) -> Settings:
    """The variables on the list; without a value where it is not a plain one."""
    return {
        name: value if _PLAIN_VALUE.fullmatch(value) else None
        for name, value in pairs
        if name in KEPT_NAMES
    }


def add_settings(known: Settings, told: Mapping[str, str | None]) -> None:
    """Add settings to those of the same run; what is said to be two things loses its value."""
    for name, value in told.items():
        known[name] = value if known.get(name, value) == value else None


@dataclass(slots=True)
class Shell:
    """The NCCL_* variables that a shell shows, line by line.

    `export` persists, and so does what `env` prints; an assignment in a command's own line holds
    for that command and wins. What is commented out or unset does not count. Of an assignment that
    `set -x` prints by itself it is not known whether it persists.
    """

    exported: Settings = field(default_factory=dict)
    #: Of the last command.
    inline: Settings = field(default_factory=dict)

    @property
    def environment(self) -> Settings:
        """What a benchmark that starts now finds set."""
        return {**self.exported, **self.inline}

    def read(self, line: str) -> None:
        """Take in one line of a shell.

        >>> shell = Shell()
        >>> shell.read("export NCCL_ALGO=Tree; NCCL_PROTO=LL ./all_reduce_perf")
        >>> shell.environment
        {'NCCL_ALGO': 'Tree', 'NCCL_PROTO': 'LL'}
        """
        text = _PROMPT.sub("", line, count=1)
        is_traced = "+" in line[: len(line) - len(text)]
        if program_in(text):
            self.inline = {}
            if text.startswith("#"):
                # A comment, or a command behind the prompt of root: then it is not known which.
                self.inline = dict.fromkeys(_assigned(text))
        for command in _BETWEEN_COMMANDS.split(re.sub(r"(?:^|\s)#.*", "", text)):
            self._command(command, is_traced=is_traced)

    def _command(self, command: str, *, is_traced: bool) -> None:
        assigned, words = _assigned(command), command.split() or [""]
        if program_in(command):
            # mpirun -x NAME: whatever the launcher's own environment has.
            forwarded = KEPT_NAMES.intersection(words) - assigned.keys() - self.exported.keys()
            self.inline |= {**assigned, **dict.fromkeys(forwarded)}
        elif words[0] in {"unset", "unsetenv"}:
            for name in words[1:]:
                self.exported.pop(name, None)
        elif words[0].startswith("NCCL_"):
            self.exported |= dict.fromkeys(assigned) if is_traced else assigned
        elif words[0] in {"export", "declare", "typeset", "setenv"}:
            self.exported |= assigned


def _assigned(command: str) -> Settings:
    """What a command sets. An open quotation, or two values of one variable, say nothing."""
    is_whole = command.count('"') % 2 == command.count("'") % 2 == 0
    found: Settings = {}
    for name, value, apart, behind in _ASSIGNED.findall(command):
        told = (value or behind).strip("\"'") if is_whole else "$"
        add_settings(found, kept([(name or apart, told)]))
    return found


def requested_by(
    settings: Mapping[str, str | None], collective: Collective, extra: Iterable[str] = ()
) -> dict[str, Any]:
    """The requested config (which a tuner could set) and the launch profile, as columns.

    `extra` are words for the profile that do not come from the environment (`blocking`). A list or
    an exclusion (`Ring,Tree`, `^NVLS`) leaves the choice to NCCL within limits: it is a profile.

    >>> tree = {"NCCL_ALGO": "allreduce:tree;broadcast:ring"}
    >>> requested_by(tree, Collective.AllReduce)["requested_algorithm"]
    'Tree'
    >>> requested_by({"NCCL_ALGO": "^NVLS"}, Collective.AllReduce)["launch_profile"]
    'algo=^NVLS'
    """
    rest = {name: "?" if value is None else value for name, value in settings.items()}
    is_known = None not in settings.values()
    told = rest if is_known else {}
    requested = {
        "requested_algorithm": _single(told, "NCCL_ALGO", Algorithm, collective),
        "requested_protocol": _single(told, "NCCL_PROTO", Protocol, collective),
        "requested_num_channels": _channels(told, "CTAS") or _channels(told, "NCHANNELS"),
    }
    words = [f"{name.removeprefix('NCCL_').lower()}={rest[name]}" for name in sorted(rest)]
    return {
        **requested,
        "is_default": is_known and not any(requested.values()),
        "launch_profile": ",".join([*words, *extra]) or DEFAULT_PROFILE,
    }


def _single(
    rest: dict[str, str], name: str, kind: type[_Kind], collective: Collective
) -> str | None:
    """Take `name` out of `rest` when it names exactly one choice for `collective`."""
    # `ring;allreduce:tree`: a part without a name holds for all others.
    parts = [part.rpartition(":") for part in rest.get(name, "").split(";")]
    by_name = {whose.lower(): choice for whose, _, choice in parts}
    value = by_name.get(collective.wire.lower(), by_name.get(""))
    try:
        wire = kind.parse(value).wire if value is not None else None
    except UnknownName:
        return None
    rest.pop(name, None)
    return wire


def _channels(rest: dict[str, str], noun: str) -> int | None:
    low, high = f"NCCL_MIN_{noun}", f"NCCL_MAX_{noun}"
    value = rest.get(low, "")
    if value != rest.get(high) or not value.isdecimal() or not int(value):
        return None
    del rest[low], rest[high]
    return int(value)


# --- What it tells ---


class LoggedCall(NamedTuple):
    """One line: collective (None before 2.23), bytes as printed, choice (None: none of ours)."""

    collective: Collective | None
    printed_bytes: int
    per_rank: bool
    choice: Choice | None

    def whole_bytes(self, num_ranks: int) -> int:
        """NCCL's nBytes: the whole buffer, over all ranks where printed per rank."""
        return self.printed_bytes * num_ranks if self.per_rank else self.printed_bytes


def logged_calls(lines: Iterable[str]) -> Iterator[LoggedCall]:
    """The calls of a log, in order; those of functions that are no collective of ours left out."""
    for line in lines:
        match = _CALL.search(line) if " Bytes -> " in line else None
        if match is None:
            continue
        name, special, size, *ran, low, high = match.groups()
        collective = named(Collective, name) if name else None
        if name and collective is None:
            continue
        algorithm, protocol = named(Algorithm, ran[0] or ""), named(Protocol, ran[1] or "")
        channels = None if low is None else int(high) - int(low) + 1
        is_ours = special is None and (channels is None or channels > 0)
        choice = None
        if is_ours and algorithm is not None and protocol is not None:
            choice = algorithm.wire, protocol.wire, channels
        per_rank = low is not None and collective in _PER_RANK
        yield LoggedCall(collective, int(size), per_rank, choice)


def named(kind: type[_Kind], text: str) -> _Kind | None:
    """The member of that name or number; None for one of a later NCCL, or what is none."""
    try:
        return kind(int(text)) if text.isdecimal() else kind.parse(text.strip())
    except (UnknownName, ValueError):
        return None


@dataclass(slots=True)
class NcclLog:
    """What the log of one run told. Sets: one value is a fact, two contradict each other."""

    versions: set[str] = field(default_factory=set)
    cuda_versions: set[str] = field(default_factory=set)
    num_ranks: set[int] = field(default_factory=set)
    num_nodes: set[int] = field(default_factory=set)
    #: Variables that NCCL says it found set.
    settings: Settings = field(default_factory=dict)
    calls: dict[LoggedCall, None] = field(default_factory=dict)
    #: Cost tables, one for each communicator that logged one.
    costs: list[dict[Cell, CostLine]] = field(default_factory=list)
    #: Those of the block of the cost table that is being read.
    _algorithms: list[Algorithm | None] = field(default_factory=list)

    def note(self, line: str) -> None:
        """Take one line in; any line that is not NCCL's says nothing."""
        self.calls.update(dict.fromkeys(logged_calls([line])))
        _, mark, text = line.partition("NCCL INFO")
        if mark and "|" in text:
            self._note_cost(text)
        if version := _VERSION.search(line):
            self.versions.add(str(NcclVersion.parse(version[1])))
            if version[2]:
                self.cuda_versions.add(version[2])
        if "nranks" in line or "nRanks" in line:
            self.num_ranks.update(int(n) for n in _RANKS.findall(line))
            self.num_nodes.update(int(n) for n in _NODES.findall(line))
        if mark and (told := _SET.search(line)):
            add_settings(self.settings, kept([(told[1], told[2].strip().rstrip("."))]))

    def choices(
        self, collective: Collective, num_ranks: int | None
    ) -> tuple[dict[int, Choice], list[int]]:
        """Choice by size in bytes (whole buffer), and the sizes whose lines disagree.

        Lines in bytes per rank are left out when the number of ranks is not known.
        """
        by_size = defaultdict[int, set[Choice | None]](set)
        for call in self.calls:
            if call.collective in {None, collective} and (num_ranks or not call.per_rank):
                by_size[call.whole_bytes(num_ranks or 0)].add(call.choice)
        alone = {size: choices.pop() for size, choices in by_size.items() if len(choices) == 1}
        agreed = {size: choice for size, choice in alone.items() if choice is not None}
        return agreed, sorted(by_size.keys() - agreed.keys())

    def cost_table(self) -> Mapping[Cell, CostLine] | None:
        """The table that all communicators logged; None without one, or if they differ."""
        tables = [table for table in self.costs if table]
        return tables[0] if tables and tables == tables[:1] * len(tables) else None

    def _note_cost(self, text: str) -> None:
        if names := _COST_ALGORITHMS.match(text):
            self._algorithms = [named(Algorithm, name) for name in names[1].split("|")]
            # Each communicator begins with the first block.
            if Algorithm.Tree in self._algorithms or not self.costs:
                self.costs.append({})
        elif self.costs and (row := _COST_ROW.match(text)):
            collective = named(Collective, row[1])
            places = product(self._algorithms, _COST_PROTOCOLS)
            for (algorithm, protocol), cell in zip(
                places, _COST_CELL.findall(row[2]), strict=False
            ):
                if collective is not None and algorithm is not None:
                    cost = CostLine(*map(float, cell))
                    self.costs[-1][collective, algorithm, protocol] = cost


def cost_rows(table: Mapping[Cell, CostLine], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the `costs` table, as NCCL prints it; the group's columns come from `known`."""
    shared = {name: known[name] for name in COSTS.names if name in known}
    return [
        {
            **shared,
            "collective": collective.wire,
            "algorithm": algorithm.wire,
            "protocol": protocol.wire,
            "latency_us": round(cost.latency_us, 1),
            "bandwidth_gbytes_per_s": round(cost.algbw_gbytes_per_s, 1),
        }
        for (collective, algorithm, protocol), cost in table.items()
    ]


def write_costs(
    out: Path, table: Mapping[Cell, CostLine], known: Mapping[str, Any], *, program: str
) -> list[Path]:
    """Write a group's cost table as parts of a data set; returns their paths."""
    rows = pa.Table.from_pylist(cost_rows(table, known), schema=COSTS)
    return write_part(out, rows, kind="costs", provenance=program_record(program))
