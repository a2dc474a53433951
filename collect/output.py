"""Reads what nccl-tests prints, text or JSON: its rows, and what the lines around them say.

    text ── events ──> rows (a dict for each half of a line) and runs (what is said of them)
    JSON ────────────> the same

A run ends with its tail, its failure or a repeated line of column names. What the shell shows after
that (settings, commands) belongs to the next run. A line that was meant as a row and cannot be read
as one is reported and nothing of it is taken: half a row joined with half of another would be a
measurement that nobody made.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from dynamiccl.collect.columns import (
    Layout,
    Row,
    Torn,
    ends_like_row,
    layout_of_tokens,
    layouts_of_header,
    looks_like_row,
    read_row,
)
from dynamiccl.collect.nccl_log import NcclLog
from dynamiccl.collect.settings import Settings, Shell, program_in, sets_variables
from dynamiccl.nccl import NcclVersion

_CPU_TIME: Final = "cputime (-C) is the cost of the launch and not the time of the call"
_RANK: Final = re.compile(
    r"#?\s*Rank\s+(\d{1,7})(?:\s+Group\s+(\d{1,7}))?(?:\s+Pid\s+(\d{1,9}))?\s+on\s+(\S+)"
    r"\s+device\s+(\d{1,4})\s+\[([^\]]*)\]\s*(.*\S)?"
)
_THREADS: Final = re.compile(r"nThreads?\s+(\d{1,5})\s+nGpus\s+(\d{1,5})\s+minBytes(?:\s+(\d+))?")
_FLAG: Final = re.compile(r"\s(?:-(g|t)|--(ngpus|nthreads))[ =]?(\d{1,5})(?=\s|$)")
#: Options that make another measurement of it: the word of the profile, its usual value.
_HEADER_WORDS: Final = (
    (re.compile(r"agg iters: (\d+)"), "agg_iters", "1"),
    (re.compile(r"graph: (\d+)"), "graph", "0"),
    (re.compile(r"unalign: (\d+)"), "unalign", "0"),
)
_LIBRARY: Final = re.compile(r"nccl-tests version (\S+)(?:.*nccl-library=(\d{4,6}))?")
_OUT_OF_BOUNDS: Final = re.compile(r"Out of bounds values\s*: (\d{1,18})")
_LAUNCHERS: Final = re.compile(r"\b(?:mpirun|mpiexec|srun|orterun|prun|jsrun|aprun)\b")
_TAILS: Final = ("Out of bounds", "Avg bus bandwidth", "Collective test concluded")
#: What ends a run without a tail.
_ENDS: Final = ("Test NCCL failure", "Test CUDA failure", "Test failure", "Segmentation fault")
#: What a failed run says, the most telling first.
_FAILURES: Final = (
    *("Test NCCL failure", "Test CUDA failure", "no algorithm/protocol", "Test failure"),
    *("NCCL WARN", "NCCL failure", "NCCL error", "MPI_ABORT", "Segmentation fault"),
)

#: srun -l, mpirun --tag-output (with and without a date, with and without a rank), MPICH
#: -prepend-rank, `kubectl logs --timestamps` and `--prefix`, container runtimes' own log files.
_PREFIX: Final = re.compile(
    r"(?:\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?)?"
    r"(?: {1,80}(?=\[\d{1,6},\d{1,6}\]<std))?"  # cut from a page
    r"(?:(?P<pod>\[pod/[^\]]{1,200}\]) )?"
    r"(?:(?:[^<>\[\]]{0,40}\b(?:19|20)\d\d)?(?P<mpi>\[\d{1,6},\d{1,6}\])?<std(?:out|err)>: ?"
    r"|(?P<srun> {0,6}\d{1,6}): |(?P<rank>\[\d{1,6}\]) )?"
)


class Rejected(NamedTuple):
    """One line that looked like a measurement and could not be taken."""

    path: str
    line: int
    reason: str
    excerpt: str

    def __str__(self) -> str:
        """`file:line: reason: 'text'`, as compilers print it."""
        return f"{self.path}:{self.line}: {self.reason}: '{self.excerpt}'"


@dataclass(slots=True, kw_only=True)
class FileReport:
    """What became of one file's rows; filled while it is read."""

    path: str
    format: str
    #: Complete rows found, dropped ones and duplicates included. A torn line is not a row.
    rows_read: int = 0
    measurements_written: int = 0
    #: Rows read and left out on purpose, by reason (`size 0`).
    dropped: dict[str, int] = field(default_factory=dict)
    #: Measurements that had been read before (printed twice).
    duplicates: int = 0
    #: Rejected lines, and the first of them; a file of noise would fill memory with all.
    num_rejected: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    most_rejected: int = 5
    #: What the reader of the summary should know: conflicts, inferences, failed checks.
    remarks: list[str] = field(default_factory=list)
    #: Rows of parts that an earlier import had written.
    already_there: int = 0
    #: What of the options the output contradicts: such rows are left out.
    contradiction: str | None = None
    #: Why the file gave nothing, when it gave nothing.
    failure: str | None = None
    parts: list[str] = field(default_factory=list)
    #: Cells of NCCL's cost model that a log told, and sizes of which it told what NCCL ran.
    costs: int = 0
    decisions: int = 0

    def reject(self, line: int, reason: str, text: str) -> None:
        """Count a line as rejected; the first ones are kept."""
        self.num_rejected += 1
        if len(self.rejected) < self.most_rejected:
            printable = "".join(c if c.isprintable() else " " for c in text.strip())
            self.rejected.append(Rejected(self.path, line, reason, printable[:160]))

    def drop(self, reason: str, count: int = 1) -> None:
        """Count rows that are left out on purpose."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def remark(self, text: str) -> None:
        """Note something, once."""
        if text not in self.remarks:
            self.remarks.append(text)


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


def rank_lines(lines: Iterable[str]) -> Iterator[RankLine]:
    """The ranks listed in an output, with or without rows after them."""
    for line in lines:
        match = _RANK.match(line) if "Rank" in line else None
        if match:
            rank, group, pid, host, device, bus_id, gpu = match.groups(default="")
            yield RankLine(
                int(rank),
                int(group or 0),
                host,
                int(device),
                gpu,
                bus_id,
                int(pid) if pid else None,
            )


@dataclass(slots=True)
class Run:
    """One run: what its rows are of, and what the lines around them say, as sets.

    One value is a fact, two are a conflict and are reported, none is unknown.
    """

    number: int
    #: Which process of a launcher printed it; '' where the output does not say.
    stream: str = ""
    #: Runs of one launch have their processes' other lines in common.
    launch: int = 0
    #: How often each kind of header line was seen before any row: above one, several processes
    #: wrote into each other's output.
    marks: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    ended: bool = False
    #: Whether a failure ended it.
    died: bool = False
    programs: list[str] = field(default_factory=list)
    per_process: set[int] = field(default_factory=set)
    launched: bool = False
    ranks: list[RankLine] = field(default_factory=list)
    tests_versions: set[str] = field(default_factory=set)
    #: What the shell had set when it began.
    settings: Settings = field(default_factory=dict)
    #: Words for the launch profile (`blocking`).
    words: set[str] = field(default_factory=set)
    nccl: NcclLog = field(default_factory=NcclLog)
    out_of_bounds: int = 0
    #: The first size that it was told to measure.
    first_bytes: int | None = None
    #: (importance, line number, text) of the most telling failure line.
    failure: tuple[int, int, str] | None = None

    @property
    def copies(self) -> int:
        """How many processes seem to have printed this run's output."""
        return max(self.marks.values(), default=1)

    @property
    def began(self) -> bool:
        """Whether a program began to print; a process that prints NCCL's log alone did not."""
        return self.rows > 0 or bool(self.marks)

    def merge(self, other: "Run") -> None:
        """Add what was said outside of runs: by other processes, or in a log of its own."""
        self.programs += other.programs
        self.launched = self.launched or other.launched
        self.per_process = self.per_process or other.per_process
        self.words |= other.words
        self.died = self.died or other.died
        self.nccl.merge(other.nccl)
        if other.failure and (self.failure is None or other.failure < self.failure):
            self.failure = other.failure

    def note(self, line: str, number: int) -> None:
        """Take in the facts of a line that is not a row."""
        if "NCCL" in line:
            self.nccl.note(line)
        level = next((i for i, mark in enumerate(_FAILURES) if mark in line), None)
        if level is not None and (self.failure is None or level < self.failure[0]):
            self.failure = (level, number, line.strip())
        self.ranks += rank_lines([line])
        if "NCCL INFO" not in line:
            self._note_header(line)

    def _note_header(self, line: str) -> None:
        if version := _LIBRARY.search(line):
            self.tests_versions.add(version[1])
            if version[2]:
                self.nccl.versions.add(str(NcclVersion.parse(version[2])))
        elif "Collective test" in line:
            self.name_program(line)
        elif threads := _THREADS.search(line):
            self._note_threads(line, threads)
        elif wrong := _OUT_OF_BOUNDS.search(line):
            self.out_of_bounds += int(wrong[1])
        elif "Blocking Enabled" in line:
            self.words.add("blocking")
        elif program := self.name_program(line):
            self._note_flags(line.partition(f"{program}_perf")[2])

    def _note_threads(self, line: str, match: re.Match[str]) -> None:
        self.per_process.add(int(match[1]) * int(match[2]))
        if match[3] and self.first_bytes is None:
            self.first_bytes = int(match[3])
        for pattern, word, usual in _HEADER_WORDS:
            found = pattern.search(line)
            if found and found[1] != usual:
                self.words.add(f"{word}={found[1]}")

    def name_program(self, line: str) -> str | None:
        """Take in the program that a line names, and whether a launcher started it."""
        program = program_in(line)
        if program is not None:
            self.programs.append(program)
            before, _, after = line.partition(f"{program}_perf")
            self.launched |= bool(_LAUNCHERS.search(before)) or after[:4] == "_mpi"
        return program

    def _note_flags(self, flags: str) -> None:
        if not self.per_process:
            counts = {"g": 1, "t": 1}
            for match in _FLAG.finditer(flags):
                counts[match[1] or {"ngpus": "g", "nthreads": "t"}[match[2]]] = int(match[3])
            self.per_process.add(counts["g"] * counts["t"])


class Kind(Enum):
    """What a line is."""

    ROW = auto()
    #: Meant as a row, and not readable as one.
    TORN = auto()
    #: Column names.
    COLUMNS = auto()
    #: A line that begins a run.
    HEADER = auto()
    #: A shell's line that starts a benchmark, and one that sets variables.
    COMMAND = auto()
    ASSIGNMENT = auto()
    TAIL = auto()
    FAILURE = auto()
    #: What NCCL logs, and what anybody else says.
    OTHER = auto()


class Event(NamedTuple):
    """One line: who printed it, what it is; the layout and tokens of a row."""

    kind: Kind
    stream: str
    number: int
    #: Without the launcher's prefix; of a torn row the reason to reject it.
    text: str
    layout: Layout | None = None
    tokens: Sequence[str] = ()


@dataclass(slots=True)
class _Table:
    """The columns of a stream's last header."""

    layouts: dict[int, Layout] = field(default_factory=dict)
    heading: str = ""
    #: Whether rows may follow.
    is_open: bool = False
    #: Why no row of these columns can be taken.
    refusal: str = ""


def events(lines: Iterable[str]) -> Iterator[Event]:
    """Tell of each line what it is."""
    plain = _Table()
    tables = {"": plain}
    shell = ""
    for number, line in enumerate(lines, 1):
        tokens = line.split()
        layout = plain.layouts.get(len(tokens))
        if layout is not None and tokens[0].isdecimal() and not plain.refusal:
            yield Event(Kind.ROW, "", number, line, layout, tokens)
            continue
        if not tokens:
            continue
        stream, text = strip_prefix(line) if _may_have_prefix(line) else ("", line)
        text = text.rstrip()
        if text.endswith("\\"):  # the next line goes on
            shell += text[:-1] + " "
            continue
        text, shell = shell + text, ""
        table = tables.get(stream)
        if table is None:
            table = tables[stream] = _Table()
        yield _event(table, stream, number, text)


def _event(table: _Table, stream: str, number: int, text: str) -> Event:
    tokens = text.split()
    if "algbw" in text:
        layouts = layouts_of_header(text.replace("cputime", "time"), table.heading)
        if layouts is not None:
            table.layouts, table.is_open = layouts, True
            table.refusal = _CPU_TIME if "cputime" in text else ""
            return Event(Kind.COLUMNS, stream, number, text)
    is_row, layout, reason = _as_row(table, tokens)
    if is_row:
        kind = Kind.TORN if layout is None else Kind.ROW
        return Event(kind, stream, number, reason, layout, tokens)
    kind = _kind(text)
    if kind in {Kind.TAIL, Kind.FAILURE}:
        table.is_open = False  # the columns stay, for rows of other processes that come late
    elif kind in {Kind.HEADER, Kind.COMMAND} and not table.is_open:
        table.layouts = {}
    elif "out-of-place" in text:
        table.heading = text
    return Event(kind, stream, number, text)


def _as_row(table: _Table, tokens: Sequence[str]) -> tuple[bool, Layout | None, str]:
    """Whether a line was meant as a row; its layout, or why it cannot be read as one."""
    layout = table.layouts.get(len(tokens))
    if layout is not None and tokens[0].replace("_", "").isdecimal():
        return True, None if table.refusal else layout, table.refusal
    if not looks_like_row(tokens, in_table=table.is_open):
        return ends_like_row(tokens), None, "a row joined to another program's line"
    longest = max(table.layouts, default=0)
    layout = layout_of_tokens(tokens) if len(tokens) > longest else None
    wanted = f"the header names {longest}" if longest else "no layout of nccl-tests has that"
    return True, layout, f"torn row: {len(tokens)} columns, {wanted}"


def _kind(text: str) -> Kind:
    if any(mark in text for mark in _ENDS):
        return Kind.FAILURE
    if any(mark in text for mark in _TAILS):
        return Kind.TAIL
    if header_mark(text):
        return Kind.HEADER
    if "NCCL INFO" in text:
        return Kind.OTHER
    if program_in(text):
        return Kind.COMMAND
    return Kind.ASSIGNMENT if sets_variables(text) else Kind.OTHER


def header_mark(text: str) -> str | None:
    """The kind of header line that begins a run, or None.

    >>> header_mark("# nThread 1 nGpus 8 minBytes 8 maxBytes 64")
    'threads'
    """
    if "nccl-tests version" in text:
        return "version"
    if "Collective test starting" in text:
        return "starting"
    return "threads" if _THREADS.search(text) else None


class TextRuns:
    """The runs of one text, in order of appearance: `rows` yields their rows and fills `runs`."""

    def __init__(self, report: FileReport) -> None:
        self.runs: list[Run] = []
        self._report = report
        self._shell = Shell()
        self._current: dict[str, Run] = {}
        self._launch = 0
        self._names_host_ids = False

    def rows(self, lines: Iterable[str]) -> Iterator[list[Row]]:
        """Yield the halves of each row; what is said of their runs is whole after the last."""
        for event in events(lines):
            run = self._current.get(event.stream) or self._begin(event.stream)
            if event.kind is Kind.ROW:
                yield self._halves(run, event)
            elif event.kind is Kind.TORN:
                self._report.reject(event.number, event.text, " ".join(event.tokens))
            else:
                self._note(run, event)
        for run in self.runs:
            if not run.began:
                for other in self.runs:
                    if other.began and other.launch == run.launch:
                        other.merge(run)

    def _begin(self, stream: str) -> Run:
        run = self._current[stream] = Run(len(self.runs), stream, self._launch)
        self.runs.append(run)
        return run

    def _start(self, run: Run) -> None:
        """What the shell has set when a run begins to print holds for all of it."""
        if not run.began:
            run.settings = self._shell.environment
            run.nccl.names_host_ids |= self._names_host_ids

    def _halves(self, run: Run, event: Event) -> list[Row]:
        assert event.layout is not None
        try:
            halves = read_row(event.layout, event.tokens, run.number, event.number)
        except (ValueError, OverflowError) as error:
            reason = "torn row: a column holds something else than its number"
            told = str(error) if isinstance(error, Torn) else reason
            self._report.reject(event.number, told, " ".join(event.tokens))
            return []
        if not run.rows:
            self._start(run)
        run.rows += 1
        self._report.rows_read += 1
        if int(event.tokens[0]) == 0:
            self._report.drop("size 0")
            return []
        if not halves:
            self._report.drop("no time")
        return halves

    def _note(self, run: Run, event: Event) -> None:
        """Take in a line that is not a row: it may begin a run, or end one."""
        if event.kind in {Kind.ASSIGNMENT, Kind.COMMAND}:
            self._shell.read(event.text)
        if event.kind is Kind.ASSIGNMENT:
            self._names_host_ids |= "NCCL_HOSTID" in event.text
            return
        if event.kind is Kind.COMMAND:
            run = self._started_by(event)
        elif event.kind in {Kind.HEADER, Kind.COLUMNS}:
            if run.rows or run.ended:
                run = self._begin(event.stream)
            self._start(run)
            run.marks[header_mark(event.text) or "columns"] += 1
        elif event.kind in {Kind.TAIL, Kind.FAILURE}:
            run.ended = True
            run.died |= event.kind is Kind.FAILURE
        run.note(event.text, event.number)

    def _started_by(self, command: Event) -> Run:
        """The run that a command starts: the shell's begins a launch, a process's only its run."""
        streams = [command.stream] if command.stream else list(self._current)
        if any(self._current[name].began or self._current[name].ended for name in streams):
            self._launch += not command.stream
            for name in streams:
                del self._current[name]
            return self._begin(command.stream)
        return self._current[command.stream]


def strip_prefix(line: str) -> tuple[str, str]:
    """The process that a line is of ('' when it does not say) and the line without prefix.

    >>> strip_prefix("[1,0]<stdout>:#  Rank  0")
    ('[1,0]', '#  Rank  0')
    >>> strip_prefix("Fri Sep 20 10:00:00 2024<stdout>: #")
    ('', '#')
    >>> strip_prefix(" 3: # nThread 1")
    ('3', '# nThread 1')
    """
    match = _PREFIX.match(line)
    if match is None or match.end() == 0:
        return "", line
    stream = match["mpi"] or match["rank"] or (match["srun"] or "").strip() or match["pod"] or ""
    return stream, line[match.end() :]


def _may_have_prefix(line: str) -> bool:
    """Fast test; False for nearly every line without a prefix."""
    head = line[:64].lstrip()[:40]
    return head[:1] in {"[", "<"} or "<std" in line[:64] or ": " in head[:8] or "T" in head[:11]
