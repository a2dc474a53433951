"""What NCCL was told (settings that a shell or NCCL itself shows), and what its log tells.

**Settings** are variables, and options of the benchmark (`--graph`). As environments may hold
secrets, only listed names keep values; others of NCCL, libfabric and ROCm keep a digest. What
names one algorithm, protocol or channel count is the requested config; all else joins the launch
profile. A setting that cannot be read (`$1`), or is said to be two things, has no value: its run's
config is *not known*, and never taken for NCCL's own choice.

**What ran** (NCCL_DEBUG_SUBSYS=TUNING, or COLL from 2.23 on), by release:

    2.20-2.22  <B> Bytes -> Algo <int> proto <int> time <float>
    2.23       <Func>: <B> Bytes -> Algo <int> proto <int> time <float>
    2.24-      <Func>: <B> Bytes -> Algo <NAME> proto <NAME> channel{Lo..Hi}={<lo>..<hi>} ...

From 2.24 on, B is one rank's bytes for AllGather and ReduceScatter. Symmetric kernels and the copy
engine print another tail: none of the configs we know.

**The cost model** (2.13 to 2.30, `src/graph/tuning.cc`), by rank 0 under TUNING, in blocks of three
algorithms. A bandwidth of 0.0: NCCL does not take the cell, or it is below 0.05 GB/s.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from dynamiccl.datasets.schema import COSTS, DEFAULT_PROFILE
from dynamiccl.datasets.store import program_record, write_part
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.system import Cell, CostLine

#: By name (options of the benchmark as `--name`); None = set to an unknown value.
Settings = dict[str, str | None]

#: Every variable whose value is stored, without NCCL_: exact names that can hold no secret.
_KEPT: Final = """
    ALGO PROTO MIN_CTAS MAX_CTAS MIN_NCHANNELS MAX_NCHANNELS BUFFSIZE CHECKS_DISABLE
    COLLNET_ENABLE CROSS_NIC CTA_POLICY CUMEM_ENABLE DMABUF_ENABLE GRAPH_REGISTER
    IB_ADAPTIVE_ROUTING IB_DISABLE IB_GID_INDEX IB_HCA IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION
    IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT LL_BUFFSIZE LL128_BUFFSIZE LOCAL_REGISTER
    MAX_P2P_NCHANNELS MIN_P2P_NCHANNELS MNNVL_ENABLE NCHANNELS_PER_NET_PEER NET NET_GDR_LEVEL
    NET_GDR_READ NET_PLUGIN NSOCKS_PERTHREAD NTHREADS NVLS_ENABLE P2P_DISABLE P2P_LEVEL
    P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE PXN_DISABLE SHM_DISABLE SOCKET_IFNAME
    SOCKET_NTHREADS TUNER_PLUGIN WIN_ENABLE
"""
KEPT_NAMES: Final = frozenset(f"NCCL_{name}" for name in _KEPT.split())
#: What changes no measurement: logs, places of NCCL, and secrets.
_OF_NO_MATTER: Final = re.compile(
    r"NCCL_(DEBUG\w*|VERSION|HOME|ROOT\w*|DIR|\w+_DUMP_FILE)|\w+_LOG_\w+"
    r"|\w+_(SECRET|TOKEN|KEY|PASS|CRED)\w*"
)
_VARIABLE: Final = r"(?:(?:[NR]CCL|MSCCL|MSCCLPP|OFI|FI|HSA)_\w+|LD_PRELOAD)"
_PLAIN_VALUE: Final = re.compile(r"[\w.,;:^/+=-]{1,64}")
_EXPANDED: Final = re.compile(r"[$`*]")
#: Options of nccl-tests (2.19; -F, -E of rccl-tests) that change what is measured, and defaults.
_OPTIONS: Final = re.findall(
    r"(\w)=(\w+):(\d*)",
    "C=report_cputime:0 D=device_implementation:0 E=rotating_tensor:0 F=cache_flush:0 "
    "G=graph:0 R=local_register:0 V=device_cta_count: a=average:1 m=agg_iters:1 u=unalign:0 "
    "x=cta_policy:0 y=stream_null:0 z=blocking:0",
)
_USUAL: Final = {f"--{name}": value for _, name, value in _OPTIONS}
_OPTION_NAMES: Final = {f"-{letter}": f"--{name}" for letter, name, _ in _OPTIONS}
_OPTION: Final = re.compile(
    rf"(?<!\S)(?:({'|'.join(_OPTION_NAMES)})\s*|(--\w+)[=\s]\s*)(\d[\d,]*|\$\S+)"
)

#: `make NAME_SUFFIX=_mpi` and packagers put something behind `_perf`.
_PROGRAM: Final = re.compile(r"(?:^|[\s/\"'=])([a-z][a-z_]*?)_perf[\w.-]*(?=$|[\s\"');&|])")

#: `$ `, `+ ` or `+(run.sh:3): ` of `set -x`, `user@node:~$ `.
_PROMPT: Final = re.compile(
    r"\s*(?:\(\S{1,40}\) )?(?:\[?[\w.-]+@[\w.-]+[^$#>%]{0,100}[$#>%]\s+"
    r"|([+$>% \t]+(?:\(?[\w./-]+:\d+\)?:?\s+)?))?"
)
#: `NCCL_ALGO=Ring`, `--export=ALL,NCCL_ALGO=Ring`; MPICH, Intel MPI, csh; YAML and Python.
_ASSIGNED: Final = re.compile(
    rf"(?:^|[\s,;=`(\"']|-[ex])({_VARIABLE})=(\"[^\"]*\"|'[^']*'|(?:(?![,;]{_VARIABLE}=)[^\s\"'])*)"
    rf"|(?:-genv|-env|setenv|set -\w*x)\s+({_VARIABLE})\s+(\S+)|\bname: *[\"']?({_VARIABLE})"
    rf"|(?<![\w${{])({_VARIABLE})[\"'\]]*\s*(?:[:=]+>?|->)\s*[\"']?([\w^][\w^,;:]*)"
)
NAMES_A_CHOICE: Final = re.compile(
    r"(?<![a-zA-Z0-9/$])(?:(?i:ring|tree|nvls(?:[_-]?tree)?|collnet\w*|ll128)|S(?:imple|IMPLE)|PAT|LL)"
    r"(?![a-zA-Z0-9/])"
)
CHOICE: Final = {"NCCL_ALGO", "NCCL_PROTO"}
#: Headings begin with `## `.
_COMMENT: Final = re.compile(r"#(?!#+ (?!export|setenv))")
_TESTS: Final = {"[", "[[", "((", "test", "!"}
_EXPORTS: Final = {"export", "declare", "typeset", "set", "setenv", "unset", "unsetenv"}
#: Of lines that name a benchmark and do not run it; prose begins with a capital.
_NO_RUN: Final = re.compile(r"(?:ls|ll|cat|cp|mv|cd|tee|echo|which|make|ldd|file|grep)$|[A-Z][a-z]")
#: Sets the environment of a job or container.
_DIRECTIVE: Final = re.compile(r"^#(?:SBATCH|PBS|BSUB|\$)(?=\s)|\b(?:APPTAINER|SINGULARITY)ENV_")
_SYNTAX: Final = re.compile(r"^\s*(?:(?:then|else|do)\s+|[({]\s*)*")
#: Not within a quotation or `ring;allreduce:tree`.
_BETWEEN_COMMANDS: Final = re.compile(r"[;&|]+(?!\w+:\w)(?=(?:[^\"']|\"[^\"]*\"|'[^']*')*$)")

_VERSION: Final = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)(?:\+cuda(\d+\.\d+))?")
_RANKS: Final = re.compile(r"\bn[Rr]anks (\d{1,7})\b")
_NODES: Final = re.compile(r"\bnNodes (\d{1,7})\b")
#: ROCm's releases; older ones say `NCCL version 2.13.4+hip5.4`.
_RCCL: Final = re.compile(r"RCCL version ?:? ?(\d+\.\d+\.\d+)|NCCL version (\d[\d.]+)\+hip")
#: 2.19 on (`src/plugin/tuner/tuner_v*.cc`), `tuner plugin` before the name until 2.26; and MSCCL++.
_TUNER: Final = re.compile(
    r"(?:TUNER/Plugin: Using (?:tuner plugin )?(?!internal)|external tuner plugin (?:\S*/)?"
    r"|Initializing (?=MSCCL)|TUNER/(?!Plugin:))([\w.+-]{1,64})"
)
_SET: Final = re.compile(
    rf"\b({_VARIABLE}) set (?:by|in) (?:the )?environment (?:variable )?to (.*)"
)

_CALL: Final = re.compile(
    r"(?:([A-Za-z]+)( \[[^\]]+\])?: )?(\d{1,18}) Bytes -> (?=\w)(?:Algo (\w+) proto (\w+)"
    r"(?: time [\d.]+| channel\{Lo\.\.Hi\}=\{(\d{1,3})\.\.(\d{1,3})\}))?"
)
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter})

_COST_ALGORITHMS: Final = re.compile(r"\s+Algorithm\s+\|(.*)")
_COST_ROW: Final = re.compile(r"\s+([A-Z][A-Za-z]+) \|((?:\s*\d+\.\d/\s*\d+\.\d \|)+)\s*$")
_COST_CELL: Final = re.compile(r"\s*(\d+\.\d)/\s*(\d+\.\d) \|")
_COST_PROTOCOLS: Final = (Protocol.LL, Protocol.LL128, Protocol.Simple)

#: Algorithm, protocol, and channels where the release prints them.
Choice = tuple[str, str, int | None]
Kind = TypeVar("Kind", Algorithm, Protocol, Collective)


def program_in(line: str) -> str | None:
    """The nccl-tests program that a line names, without `_perf` and its suffix, or None."""
    match = _PROGRAM.search(line) if "_perf" in line else None
    return match[1] if match else None


def prompt_of(line: str) -> str:
    """What a shell or its trace prints before a command; blanks or nothing elsewhere."""
    found = _PROMPT.match(line)
    return found[0] if found else ""


def kept(pairs: Iterable[tuple[str, str]]) -> Settings:
    """The settings among variables; unreadable ones have no value."""
    return {
        name: _value(name, value.strip())
        for name, value in pairs
        if re.fullmatch(_VARIABLE, name)
        and not _OF_NO_MATTER.fullmatch(name)
        and (name != "LD_PRELOAD" or "ccl" in value.lower())  # another library than the linked one
    }


def _value(name: str, value: str) -> str | None:
    # Too short a digest to guess a value by; folders may be names of people.
    digest = "~" + hashlib.sha256(f"{name}={value}".encode()).hexdigest()[:6]
    if not value or _EXPANDED.search(value):
        return None
    if name == "LD_PRELOAD" or (name.endswith("_PLUGIN") and "/" in value):
        return value.rpartition("/")[2] + digest
    if name not in KEPT_NAMES:
        return digest
    # NCCL_NET="AWS Libfabric"; what NCCL makes of a list `Ring, Tree` is not known.
    plain = value if name in CHOICE else value.replace(" ", "_")
    return plain if _PLAIN_VALUE.fullmatch(plain) else None


def add_settings(known: Settings, told: Mapping[str, str | None]) -> None:
    """Add settings of the same run; contradicting ones lose their value."""
    for name, value in told.items():
        known[name] = value if known.get(name, value) == value else None


def without_usual(options: Settings) -> Settings:
    """Settings without options at their defaults."""
    return {name: value for name, value in options.items() if _USUAL.get(name, "") != value}


def _common(environments: Iterable[Settings]) -> Settings:
    """What all have alike; differing or missing settings have no value."""
    each = list(environments)
    found = {name: {one.get(name) for one in each} for name in chain.from_iterable(each)}
    return {name: values.pop() if len(values) == 1 else None for name, values in found.items()}


@dataclass(slots=True)
class Shell:
    """The settings that a shell shows, line by line, for the benchmark that starts next.

    `export` persists; an assignment in a command's own line wins for it. What `env` prints, or is
    assigned alone, is unknown after the next benchmark. Unknown is also what `set -x` prints, what
    depends on a condition, and what several commands before one output have otherwise.
    """

    exported: Settings = field(default_factory=dict)
    commands: list[Settings] = field(default_factory=list)
    #: What is exported after the next benchmark.
    after: Settings = field(default_factory=dict)
    #: What the last commands disagreed on: unknown for an output without its own command.
    doubtful: set[str] = field(default_factory=set)
    conditions: int = 0

    def start(self) -> Settings:
        """What a benchmark that starts here finds set."""
        found = _common(self.commands or [{**self.exported, **dict.fromkeys(self.doubtful)}])
        if self.commands:
            each = _common([*self.commands, self.exported])
            self.doubtful = {name for name, value in each.items() if value is None}
        self.doubtful |= {name for name, _ in self.exported.items() ^ self.after.items()}
        self.commands, self.exported = [], {**self.after}
        return found

    def read(self, line: str) -> Settings:
        """Take in one line of a shell, and return what it sets for commands behind it."""
        prompt = prompt_of(line)
        is_traced, text = "+" in prompt, self._expanded(line[len(prompt) :])
        is_sure, told, before = True, Settings(), (self.exported, self.after)
        if text.startswith("#") and program_in(text) and (assigned := _assigned(text)):
            # A comment, or a command behind root's prompt: unknown which.
            self.commands.append({**self.exported, **dict.fromkeys(assigned)})
        if not is_traced and self._names_a_choice(text):
            text = "name: NCCL_ALGO"
        for command in _BETWEEN_COMMANDS.split(re.sub(r"(?:^|\s)#.*", "", text)):
            words = _SYNTAX.sub("", command).split() or [""]
            if (words[0] == "if" and _TESTS & {*words}) or (words[0] == "case" and "in" in words):
                self.conditions += 1
            elif words[0] in {"fi", "esac"}:
                self.conditions = max(0, self.conditions - 1)
            is_sure = is_sure and words[0] not in _TESTS
            # `set -x` prints assignments of what may be exported already.
            is_plain = words[0] in _EXPORTS or all(
                not is_traced or self.exported.get(name) for name in _assigned(command)
            )
            if program_in(command) and not _NO_RUN.match(words[0]):
                self.commands.append(self._environment_of(command, words))
            else:
                is_known = is_sure and is_plain and not self.conditions
                told |= self._say(command, words, is_known=is_known)
        if text.startswith("("):  # of a subshell nothing persists
            self.exported, self.after = before
            return {}
        return told

    def _expanded(self, text: str) -> str:
        text = _DIRECTIVE.sub(lambda found: "export" * found[0].startswith("#"), text)
        values = {name: self.exported[name] or "$" for name in KEPT_NAMES & self.exported.keys()}
        return re.sub(r"\$(\{)?(\w+)(?(1)\})", lambda m: values.get(m[2], m[0]), text)

    def _names_a_choice(self, text: str) -> bool:
        """Whether a heading (`## Tree`) is all that tells the next benchmark's choice."""
        is_told = bool(self.commands or program_in(text) or self.exported.keys() & CHOICE)
        is_heading = len(text) < 100 and (text.startswith("##") or "CCL_" not in text)
        is_one = NAMES_A_CHOICE.search(text) is not None and not _COMMENT.match(text)
        return is_heading and is_one and not is_told

    def _environment_of(self, command: str, words: Sequence[str]) -> Settings:
        before, behind = _PROGRAM.split(command, maxsplit=1)[::2]
        pairs = list(pairwise(words))
        # srun passes on what --export names.
        is_empty = ("env", "-i") in pairs or re.search(r"--export[= ](?!\S*\bALL\b)", before)
        unset = {name for option, name in pairs if option == "-u"} | {
            name for name in self.exported if is_empty and name not in before
        }
        found = {k: v for k, v in self.exported.items() if k not in unset}
        # mpirun -x NAME passes the launcher's own value.
        for name in kept((word, "") for word in before.split() if word not in unset):
            found.setdefault(name, None if name in KEPT_NAMES else "?")
        for letter, name, value in _OPTION.findall(behind):
            option = _OPTION_NAMES.get(letter, name.replace("cudagraph", "graph"))
            if option in _USUAL:
                found[option] = None if value[0] == "$" else value
        return without_usual({**found, **_assigned(command)})

    def _say(self, command: str, words: Sequence[str], *, is_known: bool) -> Settings:
        told, is_export = _assigned(command), words[0] in _EXPORTS
        is_bare = re.match(rf"\s*{_VARIABLE}(?:=|: )", command) is not None
        is_unset = "unset" in words[0] or words[:2] == ["export", "-n"]
        if command in {"exit", "logout"} or (is_unset and _EXPANDED.search(command)):
            # After another shell, or `unset ${!NCCL_*}`, what is left is unknown.
            told, is_known = self.exported, False
        elif is_export:
            # `export NAME` makes an earlier assignment persist.
            named = kept((word, "") for word in words[1:])
            told = {**{name: self.exported.get(name) for name in named}, **told}
        if not (is_known and (is_export or is_bare)):
            again = {} if is_unset or told is self.exported else self.exported
            told = {k: v if again.get(k, "") == v else None for k, v in told.items()}
        self.doubtful -= told.keys()
        found = {} if is_unset and is_known else told
        if is_export:
            self.after = {k: v for k, v in self.after.items() if k not in told} | found
        elif is_bare:
            # What `env` prints may persist; what is no shell's line sets nothing.
            new = [name for name, v in told.items() if not v or self.exported.get(name) != v]
            self.after = {**self.after, **dict.fromkeys(new)}
        self.exported = {k: v for k, v in self.exported.items() if k not in told} | found
        for environment in self.commands:
            # Between a command and its output, only what the output prints itself is sure.
            odd = {name for name in told if not is_bare and name not in environment}
            add_settings(environment, {**told, **dict.fromkeys(odd)})
        return dict.fromkeys(told) if is_unset else told


def _assigned(command: str) -> Settings:
    """What a command sets; open quotations and two values of a variable are unknown."""
    is_whole = command.count('"') % 2 == command.count("'") % 2 == 0
    found: Settings = {}
    for match in _ASSIGNED.finditer(command):
        name, value = [*filter(None, match.groups()), ""][:2]
        add_settings(found, kept([(name, value.strip("\"';") if is_whole else "$")]))
    return found


def requested_by(settings: Mapping[str, str | None], collective: Collective) -> dict[str, Any]:
    """The requested config (which a tuner could set) and the launch profile, as columns.

    Lists and exclusions (`Ring,Tree`, `^NVLS`) are a profile, as is all of a collective without
    algorithms. Under another tuner an unforced config is not known.
    """
    rest = {name: "?" if value is None else value for name, value in settings.items()}
    is_known = None not in settings.values()
    told = rest if is_known and collective.tunable else {}
    algorithm = protocol = None
    try:
        algorithm = _single(told, "NCCL_ALGO", Algorithm, collective)
        protocol = _single(told, "NCCL_PROTO", Protocol, collective)
    except UnknownName:
        is_known = False
    channels = _channels(told, "CTAS") or _channels(told, "NCHANNELS")
    others = ("--tuner", "NCCL_TUNER_PLUGIN", "NCCL_CONF_FILE")
    tuners = {rest.get(name, "") for name in others} - {"", "none"}
    is_asked = algorithm or protocol or channels or (tuners and collective.tunable)
    is_known = is_known and "msccl" not in rest.get("LD_PRELOAD", "")
    words = [f"{re.sub('^(NCCL_|--)', '', name).lower()}={rest[name]}" for name in rest]
    return {
        "requested_algorithm": algorithm,
        "requested_protocol": protocol,
        "requested_num_channels": channels,
        "is_default": is_known and not is_asked,
        "launch_profile": ",".join(sorted(words)) or DEFAULT_PROFILE,
    }


def _single(
    rest: dict[str, str], name: str, kind: type[Kind], collective: Collective
) -> str | None:
    """Take `name` out of `rest` if it names exactly one choice. Raises UnknownName."""
    if name not in rest:
        return None
    # `ring;allreduce:tree`: a part without a name holds for all others.
    parts = [part.rpartition(":") for part in rest[name].split(";")]
    by_name = {whose.lower(): choice for whose, _, choice in parts}
    for choice in by_name.values():
        for each in choice.removeprefix("^").split(","):
            kind.parse(each)
    value = by_name.get(collective.wire.lower(), by_name.get("", "^"))
    if value.startswith("^") or "," in value:
        return None
    del rest[name]
    return kind.parse(value).wire


def _channels(rest: dict[str, str], noun: str) -> int | None:
    low, high = f"NCCL_MIN_{noun}", f"NCCL_MAX_{noun}"
    value = rest.get(low, "")
    if value != rest.get(high) or not value.isdecimal() or not int(value):
        return None
    del rest[low], rest[high]
    return int(value)


class LoggedCall(NamedTuple):
    """One line: collective (None before 2.23), bytes as printed, choice (None: none of ours)."""

    collective: Collective | None
    printed_bytes: int
    per_rank: bool
    choice: Choice | None

    def whole_bytes(self, num_ranks: int) -> int:
        """NCCL's nBytes: the whole buffer."""
        return self.printed_bytes * num_ranks if self.per_rank else self.printed_bytes


def logged_calls(lines: Iterable[str]) -> Iterator[LoggedCall]:
    """The calls of a log in order, without those of other functions."""
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


def named(kind: type[Kind], text: str) -> Kind | None:
    """The member of a name or number; None for unknown ones (a later NCCL)."""
    try:
        return kind(int(text)) if text.isdecimal() else kind.parse(text.strip())
    except (UnknownName, ValueError):
        return None


@dataclass(slots=True)
class NcclLog:
    """What the log of one run told; two values in a set are a conflict."""

    versions: set[str] = field(default_factory=set)
    cuda_versions: set[str] = field(default_factory=set)
    num_ranks: set[int] = field(default_factory=set)
    num_nodes: set[int] = field(default_factory=set)
    #: Also the tuner plugin (`--tuner`) and ROCm's release (`--rccl`).
    settings: Settings = field(default_factory=dict)
    calls: dict[LoggedCall, None] = field(default_factory=dict)
    costs: list[dict[Cell, CostLine]] = field(default_factory=list)
    _algorithms: list[Algorithm | None] = field(default_factory=list)

    def note(self, line: str) -> None:
        """Take in one line; others than NCCL's say nothing."""
        self.calls.update(dict.fromkeys(logged_calls([line])))
        _, mark, text = line.partition("NCCL INFO")
        if mark and "|" in text:
            self._note_cost(text)
        if rccl := _RCCL.search(line):
            add_settings(self.settings, {"--rccl": rccl[1] or rccl[2]})
        elif version := _VERSION.search(line):
            self.versions.add(str(NcclVersion.parse(version[1])))
            if version[2]:
                self.cuda_versions.add(version[2])
        if "nranks" in line or "nRanks" in line:
            self.num_ranks.update(map(int, _RANKS.findall(line)))
            self.num_nodes.update(map(int, _NODES.findall(line)))
        if mark and (told := _SET.search(line)):
            add_settings(self.settings, kept([(told[1], told[2].strip().rstrip("."))]))
        if tuner := _TUNER.search(line):
            self.settings.setdefault("--tuner", tuner[1])

    def choices(
        self, collective: Collective, num_ranks: int | None
    ) -> tuple[dict[int, Choice], list[int]]:
        """Choice by bytes of the whole buffer, and the sizes whose lines disagree.

        Lines in bytes per rank count only where the number of ranks is known.
        """
        by_size = defaultdict[int, set[Choice | None]](set)
        for call in self.calls:
            if call.collective in {None, collective} and (num_ranks or not call.per_rank):
                by_size[call.whole_bytes(num_ranks or 0)].add(call.choice)
        alone = {size: choices.pop() for size, choices in by_size.items() if len(choices) == 1}
        agreed = {size: choice for size, choice in alone.items() if choice is not None}
        return agreed, sorted(by_size.keys() - agreed.keys())

    def cost_table(self) -> Mapping[Cell, CostLine] | None:
        """The table that all communicators logged; None if none did or they differ."""
        tables = [table for table in self.costs if table]
        return tables[0] if tables and tables == tables[:1] * len(tables) else None

    def _note_cost(self, text: str) -> None:
        if names := _COST_ALGORITHMS.match(text):
            self._algorithms = [named(Algorithm, name) for name in names[1].split("|")]
            # Each communicator begins with the first block.
            if Algorithm.Tree in self._algorithms or not self.costs:
                self.costs.append({})
        elif self.costs and (row := _COST_ROW.match(text)):
            cells = product([named(Collective, row[1])], self._algorithms, _COST_PROTOCOLS)
            costs = (CostLine(*map(float, each)) for each in _COST_CELL.findall(row[2]))
            for (collective, algorithm, protocol), cost in zip(cells, costs, strict=False):
                if collective is not None and algorithm is not None:
                    self.costs[-1][collective, algorithm, protocol] = cost


def cost_rows(table: Mapping[Cell, CostLine], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of `costs`, rounded as NCCL prints; the group's columns come from `known`."""
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
    """Write a group's cost table; returns the parts."""
    rows = pa.Table.from_pylist(cost_rows(table, known), schema=COSTS)
    return write_part(out, rows, kind="costs", provenance=program_record(program))
