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
     Max NThreads |            512 |            640 |            512 |  ...
        Broadcast |     0.0/   0.0 |     0.0/   0.0 |     9.3/   1.2 |  ...

A bandwidth of 0.0 means that NCCL does not take the cell, or that it is below 0.05 GB/s.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from dynamiccl.datasets.provenance import program_record
from dynamiccl.datasets.schema import COSTS, DEFAULT_PROFILE
from dynamiccl.datasets.store import write_part
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.group import CostLine

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
_REQUESTED: Final = ("requested_algorithm", "requested_protocol", "requested_num_channels")
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
_EXPORTS: Final = frozenset({"export", "declare", "typeset", "setenv"})

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
_COUNTED_HOST: Final = re.compile(r"(.*?)(\d{0,9})(\D*)", re.DOTALL)
#: One host, or a range of them: `n[01-04,7].cluster`.
_LISTED_HOST: Final = re.compile(r"([^,\[\]]+)(?:\[([\d,-]*)\])?([^,\[\]]*)(?:,|$)")

Cell = tuple[Collective, Algorithm, Protocol]
_Kind = TypeVar("_Kind", Algorithm, Protocol, Collective)


# --- What it was told ---


def program_in(line: str) -> str | None:
    """The nccl-tests program that a line names, without `_perf`, or None.

    >>> program_in("$ srun -N2 ./build/all_reduce_perf_mpi -b 1M -e 128M")
    'all_reduce'
    """
    if "_perf" not in line:
        return None
    match = _PROGRAM.search(line)
    return match.group(1) if match else None


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
        prompt = _PROMPT.match(line)
        is_traced = prompt is not None and "+" in (prompt[1] or "")
        text = line[prompt.end() :] if prompt else line
        if program_in(text):
            self.inline = {}
        if text.startswith("#"):
            # A comment, or a command behind the prompt of root: then it is not known which.
            if program_in(text):
                self.inline = dict.fromkeys(_assigned(text))
            return
        for command in _BETWEEN_COMMANDS.split(re.sub(r"\s#.*", "", text)):
            self._command(command.strip(), is_traced=is_traced)

    def _command(self, command: str, *, is_traced: bool) -> None:
        assigned, words = _assigned(command), command.split()
        if program_in(command):
            # mpirun -x NAME: whatever the launcher's own environment has.
            forwarded = KEPT_NAMES.intersection(words) - assigned.keys() - self.exported.keys()
            self.inline |= {**assigned, **dict.fromkeys(forwarded)}
        elif words[:1] in (["unset"], ["unsetenv"]):
            for name in words[1:]:
                self.exported.pop(name, None)
        elif command.startswith("NCCL_"):
            self.exported |= dict.fromkeys(assigned) if is_traced else assigned
        elif words and words[0] in _EXPORTS:
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
    >>> requested_by({"NCCL_ALGO": None}, Collective.AllReduce)["is_default"]
    False
    """
    rest = {name: "?" if value is None else value for name, value in settings.items()}
    is_known = None not in settings.values()
    requested: dict[str, Any] = dict.fromkeys(_REQUESTED)
    if is_known:
        algorithm = _single(rest, "NCCL_ALGO", Algorithm, collective)
        protocol = _single(rest, "NCCL_PROTO", Protocol, collective)
        channels = _channels(rest, "CTAS") or _channels(rest, "NCHANNELS")
        requested = dict(zip(_REQUESTED, (algorithm, protocol, channels), strict=True))
    words = [f"{name.removeprefix('NCCL_').lower()}={rest[name]}" for name in sorted(rest)]
    return {
        **requested,
        "is_default": is_known and not any(requested.values()),
        "launch_profile": ",".join([*words, *extra]) or DEFAULT_PROFILE,
    }


def _single(
    rest: dict[str, str],
    name: str,
    kind: type[Algorithm] | type[Protocol],
    collective: Collective,
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
    value = rest.get(low)
    if value is None or value != rest.get(high) or not value.isdecimal() or not int(value):
        return None
    del rest[low], rest[high]
    return int(value)


# --- What it tells ---


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
    return filter(None, map(_logged_call, lines))


def _logged_call(line: str) -> LoggedCall | None:
    if " Bytes -> " not in line:
        return None
    match = _CALL.search(line)
    collective = named(Collective, match["func"]) if match and match["func"] else None
    if match is None or (match["func"] and collective is None):
        return None
    per_rank = match["low"] is not None and collective in _PER_RANK
    return LoggedCall(collective, int(match["size"]), per_rank, _choice(match))


def _choice(match: re.Match[str]) -> Choice | None:
    if match["other"] or match["special"]:
        return None
    algorithm = named(Algorithm, match["algorithm"])
    protocol = named(Protocol, match["protocol"])
    if algorithm is None or protocol is None:
        return None
    if match["low"] is None:
        return Choice(algorithm.wire, protocol.wire, None)
    count = int(match["high"]) - int(match["low"]) + 1
    return Choice(algorithm.wire, protocol.wire, count) if count > 0 else None


def named(kind: type[_Kind], text: str) -> _Kind | None:
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
        told = _SET.search(line) if mark else None
        if told:
            add_settings(self.settings, kept([(told[1], told[2].strip().rstrip("."))]))

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
                named(Algorithm, name) for name in names[1].split("|") if name.strip()
            ]
            self._threads = []
            # Each communicator begins with the first block.
            if Algorithm.Tree in self._algorithms or not self.costs:
                self.costs.append({})
        elif threads := _COST_THREADS.match(text):
            # None: a number that was damaged in the log.
            words = threads[1].replace("|", " ").split()
            self._threads = [int(w) if re.fullmatch(r"[0-9]{1,9}", w) else None for w in words]
        elif (row := _COST_ROW.match(text)) and self.costs:
            collective = named(Collective, row[1])
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


def host_list(hosts: Iterable[str]) -> str:
    """The hosts as Slurm lists them, each once; runs of consecutive numbers become a range.

    >>> host_list(["n01", "n02", "n03", "n07", "login", "n7"])
    'n[01-03],n07,login,n7'
    """
    names = [_COUNTED_HOST.fullmatch(host) for host in dict.fromkeys(hosts)]
    parts = enumerate(name.groups() for name in names if name is not None)

    def run_of(part: tuple[int, tuple[str, ...]]) -> tuple[str, str, int, int]:
        place, (head, digits, tail) = part
        return head, tail, len(digits), int(digits or 0) - place

    told: list[str] = []
    for (head, tail, _, _), alike in groupby(parts, run_of):
        numbers = [digits for _, (_, digits, _) in alike]
        number = numbers[0] if len(numbers) == 1 else f"[{numbers[0]}-{numbers[-1]}]"
        told.append(f"{head}{number}{tail}")
    return ",".join(told)


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
