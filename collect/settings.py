"""NCCL_* variables of a run: what the shell around it set, and what they ask of NCCL.

An environment may hold secrets, so nothing is kept that is not on a literal list of names. What
names one algorithm, protocol or channel count is the requested config; everything else that is kept
becomes part of the launch profile, since it is fixed for the whole process.

A variable whose value cannot be read (`$1`, `${ALGO}`), or is said to be two things, is kept
without a value. The config of its run is then *not known*: it is never taken for NCCL's own choice.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dynamiccl.datasets.schema import DEFAULT_PROFILE, DefaultScope
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Algorithm, Collective, Protocol

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
_PROGRAMS: Final = {
    "all_reduce": Collective.AllReduce,
    "all_gather": Collective.AllGather,
    "broadcast": Collective.Broadcast,
    "reduce_scatter": Collective.ReduceScatter,
    "reduce": Collective.Reduce,
    "alltoall": Collective.AlltoAll,
    "scatter": Collective.Scatter,
    "gather": Collective.Gather,
    "sendrecv": Collective.SendRecv,
}
_PROGRAM: Final = re.compile(r"(?:^|[\s/\"'=])([a-z][a-z_]*?)_perf[\w.-]*(?=$|[\s\"'])")

#: What a shell prints before a command: `$ `, `+ ` of `set -x`, `user@node:~/tests$ `.
_PROMPT: Final = re.compile(
    r"\s*(?:\(\S{1,40}\) )?(?:\[?[\w.-]+@[\w.-]+[^$#>%]{0,100}[$#>%]\s+|([+$>% \t]+))?"
)
#: Assignments in one word: `NCCL_ALGO=Ring`, `--export=ALL,NCCL_ALGO=Ring,NCCL_PROTO=LL`.
_ASSIGNED: Final = re.compile(r"(?:^|[,=`(]|^-x)(NCCL_\w+)=(.*?)(?=,NCCL_\w+=|$)", re.DOTALL)
#: A line that sets variables for what comes.
_SETS: Final = re.compile(
    r"(?:^|[;&|]\s*)(?:NCCL_\w+=|(?:export|declare|typeset|setenv|unset|unsetenv)\s.*NCCL_)"
)
_EXPORTS: Final = frozenset({"export", "declare", "typeset", "setenv"})
#: Launchers' options that take a name and a value: MPICH, Intel MPI, csh.
_PAIRED: Final = frozenset({"-genv", "-env", "setenv"})


def program_in(line: str) -> str | None:
    """The nccl-tests program that a line names, without `_perf`, or None.

    >>> program_in("$ srun -N2 ./build/all_reduce_perf_mpi -b 1M -e 128M")
    'all_reduce'
    """
    if "_perf" not in line:
        return None
    match = _PROGRAM.search(line)
    return match.group(1) if match else None


def sets_variables(line: str) -> bool:
    """Whether a line of a shell, or of what `env` prints, sets NCCL_* variables for what comes."""
    prompt = _PROMPT.match(line)
    return "NCCL_" in line and _SETS.search(line[prompt.end() if prompt else 0 :]) is not None


def collective_of_program(program: str) -> Collective | None:
    """Collective of a program name; None for those that are not in NCCL's API (hypercube)."""
    return _PROGRAMS.get(program)


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
    for that command and wins. What is commented out or unset does not count.
    """

    exported: Settings = field(default_factory=dict)
    #: Of the last command.
    inline: Settings = field(default_factory=dict)
    #: What `set -x` prints of an assignment before the command itself.
    _traced: Settings = field(default_factory=dict)

    @property
    def environment(self) -> Settings:
        """What a benchmark that starts now finds set."""
        return {**self.exported, **self.inline}

    def read(self, line: str) -> bool:
        """Take in one line of a shell; returns whether it starts a benchmark.

        >>> shell = Shell()
        >>> [shell.read(x) for x in ("export NCCL_ALGO=Tree", "$ NCCL_PROTO=LL ./all_reduce_perf")]
        [False, True]
        >>> shell.environment
        {'NCCL_ALGO': 'Tree', 'NCCL_PROTO': 'LL'}
        """
        prompt = _PROMPT.match(line)
        is_traced = prompt is not None and "+" in (prompt[1] or "")
        text = line[prompt.end() :] if prompt else line
        starts = program_in(text) is not None
        if text.startswith("#"):
            # A comment, or a command behind the prompt of root: then it is not known which.
            if starts:
                self.inline = dict.fromkeys(_assigned(text.split()), None)
            return starts
        if starts:
            self.inline, self._traced = self._traced, {}
        for words in _commands(text):
            self._command(words, is_traced=is_traced)
        return starts

    def _command(self, words: Sequence[str], *, is_traced: bool) -> None:
        assigned = _assigned(words)
        if any(program_in(word) for word in words):
            add_settings(self.inline, assigned)
        elif words[0] in _EXPORTS:
            self.exported |= assigned
        elif words[0] in {"unset", "unsetenv"}:
            for name in words[1:]:
                self.exported.pop(name, None)
        elif words[0].startswith("NCCL_") and is_traced and not assigned.keys() & self.exported:
            self._traced |= assigned
        elif words[0].startswith("NCCL_"):
            self.exported |= assigned


def _commands(text: str) -> list[list[str]]:
    """The words of each command of a line; an unreadable line is a command of unreadable values."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set(";&|"):
                commands.append([])
            elif " " in word and program_in(word):  # bash -c "NCCL_ALGO=Ring ./all_reduce_perf"
                commands[-1] += [inner for words in _commands(word) for inner in words]
            else:
                commands[-1].append(word)
    except ValueError:  # a quotation without end
        return [[re.sub(r"=.*", "=$", word) for word in text.split()]]
    return [words for words in commands if words]


def _assigned(words: Sequence[str]) -> Settings:
    pairs = [pair for word in words for pair in _ASSIGNED.findall(word)]
    pairs += [
        (name, value)
        for option, name, value in zip(words, words[1:], words[2:], strict=False)
        if option in _PAIRED
    ]
    return kept(pairs)


def default_scope(launch_profile: str) -> str:
    """The default that a row is compared with: `untouched` for the user's own environment."""
    if launch_profile == DEFAULT_PROFILE:
        return DefaultScope.UNTOUCHED.value
    return DefaultScope.PROFILE.value


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
