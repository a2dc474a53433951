"""Facts about one run of an nccl-tests program, from the lines around its rows.

Everything is collected as sets: one value is a fact, two are a conflict and are reported, none is
unknown. Nothing is filled in from elsewhere.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dynamiccl.collect.nccl_tests.cost_table import CostLog
from dynamiccl.collect.nccl_tests.hosts import host_list
from dynamiccl.collect.nccl_tests.names import program_in
from dynamiccl.collect.nccl_tests.settings import settings_in
from dynamiccl.collect.nccl_tests.tuning import TuningLog
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import NcclVersion

_RANK: Final = re.compile(
    r"#?\s*Rank\s+(\d{1,7})(?:\s+Group\s+(\d{1,7}))?(?:\s+Pid\s+(\d{1,9}))?\s+on\s+(\S+)"
    r"\s+device\s+(\d{1,4})\s+\[([^\]]*)\]\s*(.*\S)?"
)
_THREADS: Final = re.compile(r"nThreads?\s+(\d{1,5})\s+nGpus\s+(\d{1,5})\s+minBytes")
_FLAG: Final = re.compile(r"\s(?:-(g|t)|--(ngpus|nthreads))[ =]?(\d{1,5})(?=\s|$)")
_HEADER_WORDS: Final = (
    (re.compile(r"agg iters: (\d+)"), "agg_iters", "1"),
    (re.compile(r"graph: (\d+)"), "graph", "0"),
    (re.compile(r"unalign: (\d+)"), "unalign", "0"),
)
_NCCL: Final = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)(?:\+cuda(\d+\.\d+))?")
_LIBRARY: Final = re.compile(r"nccl-tests version (\S+)(?:.*nccl-library=(\d{4,6}))?")
_RANKS: Final = re.compile(r"\bnranks (\d{1,7})\b", re.IGNORECASE)
_NODES: Final = re.compile(r"\bnNodes (\d{1,7})\b")
_OUT_OF_BOUNDS: Final = re.compile(r"Out of bounds values\s*: (\d{1,18})")
_LAUNCHERS: Final = re.compile(r"\b(?:mpirun|mpiexec|srun|orterun|prun|jsrun|aprun)\b")
#: What a failed run says, the most telling first.
_FAILURES: Final = (
    "Test NCCL failure",
    "Test CUDA failure",
    "no algorithm/protocol",
    "Test failure",
)
_MORE_FAILURES: Final = (
    "NCCL WARN",
    "NCCL failure",
    "NCCL error",
    "MPI_ABORT",
    "Segmentation fault",
)


@dataclass(frozen=True, slots=True)
class RankLine:
    """One `# Rank` line."""

    rank: int
    group: int
    host: str
    device: int
    gpu: str
    #: As printed: `0x01`, the bus, up to nccl-tests 2.14 (`src/common.cu`); since then with domain
    #: and device, `0009:01:00`.
    bus_id: str = ""
    #: None = not printed.
    pid: int | None = None


@dataclass(slots=True)
class RunFacts:
    """One run: the rows between two headers, and the facts known about them."""

    index: int
    stream: str
    #: How often each kind of header line was seen before any row: above one, several processes
    #: wrote into each other's output.
    marks: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    ended: bool = False
    programs: list[str] = field(default_factory=list)
    per_process: set[int] = field(default_factory=set)
    launched: bool = False
    ranks: list[RankLine] = field(default_factory=list)
    nranks: set[int] = field(default_factory=set)
    nnodes: set[int] = field(default_factory=set)
    nccl_versions: set[str] = field(default_factory=set)
    cuda_versions: set[str] = field(default_factory=set)
    tests_versions: set[str] = field(default_factory=set)
    settings: dict[str, set[str]] = field(default_factory=dict)
    words: set[str] = field(default_factory=set)
    tuning: TuningLog = field(default_factory=TuningLog)
    costs: CostLog = field(default_factory=CostLog)
    #: Whether ranks were told to be hosts of their own (NCCL_HOSTID).
    names_host_ids: bool = False
    out_of_bounds: int = 0
    #: (importance, line number, text) of the most telling failure line.
    failure: tuple[int, int, str] | None = None

    @property
    def copies(self) -> int:
        """How many processes seem to have printed this run's output."""
        return max(self.marks.values(), default=1)

    def note(self, line: str, number: int) -> None:
        """Collect the facts of a line that is not a row."""
        if "NCCL" in line:
            self._note_nccl(line, number)
        if "Rank" in line:
            self._note_rank(line)
        if "Test " in line and "failure" in line:
            self._note_failure(line, number)
        if "NCCL INFO" not in line:
            self._note_program(line)

    def _note_rank(self, line: str) -> None:
        match = _RANK.match(line)
        if match:
            rank, group, pid, host, device, bus_id, gpu = match.groups(default="")
            self.ranks.append(
                RankLine(
                    int(rank),
                    int(group or 0),
                    host,
                    int(device),
                    gpu,
                    bus_id,
                    int(pid) if pid else None,
                )
            )

    def _note_nccl(self, line: str, number: int) -> None:
        if self.tuning.add(line) or self.costs.add(line):
            return
        version = _NCCL.search(line)
        if version:
            self.nccl_versions.add(str(NcclVersion.parse(version[1])))
            if version[2]:
                self.cuda_versions.add(version[2])
        if "nranks" in line or "nRanks" in line:
            self.nranks.update(int(n) for n in _RANKS.findall(line))
            self.nnodes.update(int(n) for n in _NODES.findall(line))
        self.names_host_ids = self.names_host_ids or "NCCL_HOSTID" in line
        if "NCCL_" in line and ("INFO" in line or _shows_settings(line)):
            for name, value in settings_in(line).items():
                self.settings.setdefault(name, set()).add(value)
        self._note_failure(line, number)

    def _note_failure(self, line: str, number: int) -> None:
        marks = (*_FAILURES, *_MORE_FAILURES)
        level = next((i for i, mark in enumerate(marks) if mark in line), None)
        if level is not None and (self.failure is None or level < self.failure[0]):
            self.failure = (level, number, line.strip())

    def _note_program(self, line: str) -> None:
        if "nccl-tests version" in line:
            self._note_versions(line)
        elif "Collective test" in line:
            self._name_program(line.rsplit(":", 1)[-1])
            self.ended = self.ended or "concluded" in line
        elif "nGpus" in line:
            self._note_threads(line)
        elif "Out of bounds" in line or "Avg bus bandwidth" in line:
            self.ended = True
            match = _OUT_OF_BOUNDS.search(line)
            self.out_of_bounds += int(match[1]) if match else 0
        elif "Blocking Enabled" in line:
            self.words.add("blocking")
        elif "_perf" in line:
            self._note_command(line)

    def _note_versions(self, line: str) -> None:
        match = _LIBRARY.search(line)
        if match:
            self.tests_versions.add(match[1])
            if match[2]:
                self.nccl_versions.add(str(NcclVersion.parse(match[2])))

    def _note_threads(self, line: str) -> None:
        match = _THREADS.search(line)
        if match:
            self.per_process.add(int(match[1]) * int(match[2]))
        for pattern, word, usual in _HEADER_WORDS:
            found = pattern.search(line)
            if found and found[1] != usual:
                self.words.add(f"{word}={found[1]}")

    def _name_program(self, text: str) -> None:
        program = program_in(f" {text.strip()}")
        if program is not None:
            self.programs.append(program)
            self.launched = self.launched or "_mpi" in text

    def _note_command(self, line: str) -> None:
        program = program_in(line)
        if program is None:
            return
        self.programs.append(program)
        before, _, after = line.partition(f"{program}_perf")
        self.launched = self.launched or bool(_LAUNCHERS.search(before)) or after[:4] == "_mpi"
        counts = {"g": 1, "t": 1}
        for match in _FLAG.finditer(after):
            counts[match[1] or {"ngpus": "g", "nthreads": "t"}[match[2]]] = int(match[3])
        if not self.per_process:
            self.per_process.add(counts["g"] * counts["t"])


def hosts_of(ranks: Iterable[RankLine]) -> str | None:
    """The hosts in rank order, as a short host list; None without any."""
    return host_list(line.host for line in sorted(ranks, key=lambda line: line.rank)) or None


def listed_ranks(lines: Iterable[str]) -> list[RankLine]:
    """The ranks listed in an output, with or without rows after them."""
    run = RunFacts(-1, "")
    for line in lines:
        if "Rank" in line:
            run.note(line, 0)
    return run.ranks


def listed_hosts(lines: Iterable[str]) -> str | None:
    """The hosts listed in an output as a short host list, with or without rows after them."""
    return hosts_of(listed_ranks(lines))


def _shows_settings(line: str) -> bool:
    """Whether a line sets variables: a command, a shell trace, `env`; not NCCL's own."""
    start = line.lstrip("+$#> \t")
    return "_perf" in line or start.startswith(("NCCL_", "export NCCL_", "setenv NCCL_"))


def header_kind(line: str) -> str | None:
    """The kind of header that begins a run, or None.

    >>> header_kind("# nThread 1 nGpus 8 minBytes 8 maxBytes 64")
    'threads'
    """
    if "nccl-tests version" in line:
        return "version"
    if "Collective test starting" in line:
        return "starting"
    if _THREADS.search(line):
        return "threads"
    return None


def is_command(line: str) -> bool:
    """Whether a line is the command that ran a test, as people paste it above the output."""
    return "NCCL INFO" not in line and "Collective test" not in line and bool(program_in(line))


def nccl_version_of(text: str) -> str | None:
    """Dotted release of a version that a user gave, or None when it is none."""
    try:
        return str(NcclVersion.parse(text))
    except UnknownName:
        return None
