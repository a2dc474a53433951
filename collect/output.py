"""Reads what nccl-tests writes, text or JSON: rows, and the facts around them.

    size count type [redop] [root] | time algbw busbw [#wrong] [4 of -I] | the same in place | [-S]

**A run** is what one benchmark prints. It begins with a command, with NCCL's log behind an end,
or with a header line behind rows or an end. For it holds what the shell shows before its first
line, and what its header and NCCL's log say. A line meant as a row that cannot be read is
reported and dropped whole: two torn halves would make a measurement that nobody took.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from dynamiccl.collect import nccl_log
from dynamiccl.collect.grid import host_list, parse_size
from dynamiccl.collect.lines import opened
from dynamiccl.datasets.schema import BESIDE_COLUMNS
from dynamiccl.errors import CorruptFile, DataError, OutputError, UnknownName
from dynamiccl.nccl import NcclVersion
from dynamiccl.simulator.toml_table import first_problem
from dynamiccl.sizes import MAX_SIZE_BITS

Row = dict[str, Any]
RUN: Final = "run_number"

#: Columns since 2019. `error` is the largest deviation, no count.
_COLUMNS: Final = {
    "size": "size_bytes",
    "type": "datatype",
    "redop": "reduction_op",
    "time": "time_us",
    "algbw": "algbw_gbytes_per_s",
    "busbw": "busbw_gbytes_per_s",
    "#wrong": "wrong_values",
    "i_min": "time_min_us",
    "i_max": "time_max_us",
    "i_p99": "time_p99_us",
    "i_cv%": "time_cv_percent",
}
ROW: Final = (
    *(RUN, "source_line", "size_bytes", "datatype", "reduction_op", "root", "in_place"),
    *("time_us", "algbw_gbytes_per_s", "busbw_gbytes_per_s", "wrong_values"),
)
PER_ITERATION: Final = ("time_min_us", "time_max_us", "time_p99_us", "time_cv_percent")
BESIDE: Final = " ".join(BESIDE_COLUMNS)
#: Column names of the call, of one or two halves (-I adds four), and of -S.
_HEADER: Final = re.compile(
    r"(size(?: count| type| redop| root)*)"
    r"((?: time algbw busbw(?: error| #wrong)?(?: i_min i_max i_p99 i_cv%)?"
    rf"(?: {BESIDE})?){{1,2}})( timestamp)?"
)
#: How a row begins, also glued to another program's line, and how its rest does.
_TYPE: Final = r"(?:u?int(?:8|32|64)|char|int|half|float|double|bfloat16|fp?8_?e\dm\d)"
MEANT_AS_ROW: Final = re.compile(
    rf"(?:^|\s)(?:[\d_]+\s+[\d_]+\s+{_TYPE}(?=\s|$)"
    rf"|{_TYPE}\s+(?:\w+\s+-?\d+\s+[\d.]|(?:[a-z]+\s+)?(?:-?\d+\s+)?[\d.]+(?=\s|$)))"
)
_NUMBER: Final = r"[-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf)"
_PIECE: Final = re.compile(rf"\s*(?:\d+\s+\d+(?=\s|$)|{_NUMBER}(?:\s+{_NUMBER})+$)")
_RANK: Final = re.compile(
    r"#?\s*Rank\s+(\d{1,7})(?:\s+Group\s+(\d{1,7}))?(?:\s+Pid\s+\d{1,9})?\s+on\s+(\S+)"
    r"\s+device\s+(\d{1,4})\s+\[([^\]]*)\]\s*(.*\S)?"
)
#: Of a header: options that change what is measured, and the sizes.
_OPTION: Final = re.compile(r"\b(agg iters: |graph: |unalign: )(\d{1,18})\b")
_SIZES: Final = re.compile(
    r"\bminBytes (\d{1,18})(?: maxBytes (\d{1,18})(?: step: (\d{1,18})\((factor|bytes)\))?)?"
)
_LIBRARY: Final = re.compile(r"nccl-tests version (\S+)(?:.*nccl-library=(\d{4,6}))?")
_MIN_BYTES: Final = re.compile(r"\s(?:-b|--minbytes)[ =]?(\d{1,12}[KMGkmg]?)(?=\s|$)")
_PLACES: Final = re.compile(r"(?i)\b(in|out[-_ ]of)[-_ ]place")
_OUT_OF_BOUNDS: Final = re.compile(r"Out of bounds values\s*: (\d{1,18})")
_BEGINS: Final = ("nccl-tests version", "Collective test starting", " minBytes ", "# Using devices")
#: The program did not run: no failure of its config.
_NO_START: Final = re.compile(
    r"_perf: (?:error while loading|command not found|No such file|Permission denied)"
)
#: What ends a run without a tail; what `_WARNED` finds only tells why.
_FAILED: Final = re.compile(
    rf"{_NO_START.pattern}|Test (?:NCCL |CUDA )?failure|Segmentation fault|Bus error|Killed"
    r"|Terminated|Aborted|Exited with exit code|exited on signal|CANCELLED AT|mpirun noticed that"
    r"|core dumped|processes exited with non-zero"
)
_WARNED: Final = re.compile("no algorithm/protocol|MPI_ABORT")
_TAIL: Final = re.compile(r"Out of bounds|Avg bus bandwidth|Collective test concluded")


class Rejected(NamedTuple):
    """A line that looked like a measurement and could not be taken."""

    path: str
    line: int
    reason: str
    excerpt: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}: {self.excerpt!r}"


@dataclass(slots=True)
class FileReport:
    """What became of one file's rows."""

    path: str
    format: str
    sha256: str = ""
    #: Complete rows, dropped ones and duplicates included.
    rows_read: int = 0
    measurements_written: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    #: Measurements printed twice.
    duplicates: int = 0
    #: Only the first five are kept: a file of noise would fill memory.
    num_rejected: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    already_there: int = 0
    failure: DataError | None = None
    parts: list[str] = field(default_factory=list)
    costs: int = 0

    def reject(self, line: int, reason: str, text: str) -> None:
        """Count a rejected line."""
        self.num_rejected += 1
        if len(self.rejected) < 5:
            self.rejected.append(Rejected(self.path, line, reason, text.strip()[:160]))

    def drop(self, reason: str, count: int = 1) -> None:
        """Count rows left out on purpose."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def remark(self, text: str) -> None:
        """Note something once."""
        if text not in self.remarks:
            self.remarks.append(text)


#: Columns before the first half; of each half whether it is in place (None: not told) and columns.
Layout = tuple[tuple[str, ...], tuple[tuple[bool | None, tuple[str, ...]], ...]]


def layouts_of_header(line: str, *, in_place_first: bool = False) -> dict[int, Layout] | None:
    """Layouts by number of tokens for a line of column names, or None when it is not one.

    AlltoAll has a `redop` column and nothing in it, so its rows are one token shorter. Of columns
    that are not known (`cputime` of -C, which is the cost of the launch; the milliseconds of 2018)
    there is no layout.
    """
    names = line.lstrip("# \t").split()
    if names[:1] not in (["size"], ["bytes"]) or "algbw" not in names:
        return None
    known = _HEADER.fullmatch(" ".join(names))
    if known is None:
        return {}
    leading, *parts = (
        tuple(_COLUMNS.get(name, name) for name in part.split())
        for part in (known[1], *known[2].replace("time", "| time").split("|")[1:])
    )
    order = (in_place_first, not in_place_first)
    halves = tuple(zip(order if len(parts) == 2 else (None,), parts, strict=True))
    blank = tuple(name for name in leading if name != "reduction_op")
    # A time stamp is two tokens.
    width = sum(map(len, parts)) + (2 if known[3] else 0)
    return {width + len(before): (before, halves) for before in (blank, leading)}


_TODAY: Final = (
    layouts_of_header("size count type redop root" + 2 * " time algbw busbw #wrong") or {}
)


def read_row(layout: Layout, tokens: Sequence[str], run: int, line: int) -> list[Row]:
    """The halves of a row that hold a time. Raises ValueError with the reason to reject it."""
    before, halves = layout
    size, start = int(tokens[0]), len(before)
    leading = dict(zip(before, tokens, strict=False))
    datatype, redop = leading.get("datatype"), leading.get("reduction_op")
    root = int(leading["root"]) if "root" in leading else None
    if size >> MAX_SIZE_BITS or not (root is None or -1 <= root < 1 << 30):
        raise ValueError(f"{size} bytes, root {root}")
    if not (datatype or "_").isidentifier() or not (redop or "_").isidentifier():
        raise ValueError("no word where a type or operation stands")
    rows: list[Row] = []
    for in_place, names in halves:
        half = tokens[start : start + len(names)]
        start += len(names)
        if half[0] == "N/A" or not size:
            continue
        time_us, algbw, busbw = float(half[0]), float(half[1]), float(half[2])
        if time_us == 0.0 and (algbw == 0.0 or math.isinf(algbw)):
            continue
        if not plausible(size, time_us, algbw, busbw):
            raise ValueError(f"{size} bytes in {time_us} us are not {algbw} GB/s (busbw {busbw})")
        wrong = _wrong(half[3]) if "wrong_values" in names else None
        told = (run, line, size, datatype, redop, root, in_place, time_us, algbw, busbw, wrong)
        row: Row = dict(zip(ROW, told, strict=True))
        first = 4 if names[3:4] in (("wrong_values",), ("error",)) else 3
        more = map(float, half[first:])
        row |= zip(names[first:], (x if math.isfinite(x) else None for x in more), strict=True)
        rows.append(row)
    return rows


def _wrong(token: str) -> int | None:
    """A count printed with %g (`2e+06`); N/A where nothing was checked."""
    wrong = 0.0 if token == "N/A" else float(token)
    if wrong < 0 or not wrong.is_integer():
        raise ValueError(f"{token} wrong values")
    return None if token == "N/A" else min(int(wrong), 1 << 62)


def plausible(size: int, time_us: float, algbw: float, busbw: float) -> bool:
    """Whether size, time and bandwidths agree within their printed digits; torn rows do not.

    busbw is below twice algbw. Bandwidth has two decimals (none from 10^4 on, one digit from 10^5
    on), time at least two below 100; 5 % on top.
    """
    if not (time_us > 0.0 and algbw >= 0.0 and busbw >= 0.0 and math.isfinite(time_us)):
        return False
    expected = size / (time_us * 1e3)
    share = 0.05 if algbw < 1e5 else 0.5
    is_near = abs(expected - algbw) <= 0.006 + share * expected + expected * 0.006 / time_us
    return is_near and busbw <= 2.0 * algbw * (1.0 + share) + 0.02


class RankLine(NamedTuple):
    """One `# Rank` line."""

    rank: int
    group: int
    host: str
    device: int
    gpu: str
    #: As printed: `0x01` up to nccl-tests 2.14 (`src/common.cu`); since then `0009:01:00`.
    bus_id: str


def rank_lines(lines: Iterable[str]) -> Iterator[RankLine]:
    """The ranks listed in an output."""
    for line in lines:
        if "Rank" in line and (match := _RANK.match(line)):
            rank, group, host, device, bus_id, gpu = match.groups(default="")
            yield RankLine(int(rank), int(group or 0), host, int(device), gpu, bus_id)


def hosts_of(ranks: Iterable[RankLine]) -> str | None:
    """A short host list in rank order; None without any."""
    return host_list(line.host for line in sorted(ranks)) or None


@dataclass(slots=True)
class Run:
    """One run and what the lines around it say, as sets: two values are a conflict."""

    number: int
    #: Header lines by kind; twice: several processes wrote into each other.
    marks: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    torn: int = 0
    started: bool = False
    ended: bool = False
    #: What it calls itself, and the programs of the commands shown before it.
    program: str | None = None
    commands: set[str] = field(default_factory=set)
    ranks: list[RankLine] = field(default_factory=list)
    tests_versions: set[str] = field(default_factory=set)
    #: By the shell at its start, and by options of its command and header.
    settings: nccl_log.Settings = field(default_factory=dict)
    #: Of the row that is due: by its header, or `-b` of its command where it died before one; None:
    #: it never started, or all are there.
    next_size: int | None = None
    most_bytes: int | None = None
    #: Of sizes: a factor, or bytes.
    step: tuple[int, str] = (2, "factor")
    nccl: nccl_log.NcclLog = field(default_factory=nccl_log.NcclLog)
    out_of_bounds: int = 0
    #: Line number and text of the first sign of failure.
    failure: tuple[int, str] | None = None

    @property
    def listed(self) -> int:
        """Ranks of a whole list of one communicator, else 0."""
        is_whole = {line.rank for line in self.ranks} == {*range(len(self.ranks))}
        return len(self.ranks) if is_whole and len({line.group for line in self.ranks}) < 2 else 0

    @property
    def in_force(self) -> nccl_log.Settings:
        """All its settings, whoever tells them."""
        found = nccl_log.without_usual(self.settings)
        nccl_log.add_settings(found, self.nccl.settings)
        return found

    def take(self, halves: Sequence[Row], size_bytes: int, report: FileReport) -> None:
        """Count a row, and what of it is left out."""
        self.rows += 1
        report.rows_read += 1
        step, unit = self.step
        after = size_bytes * step if unit == "factor" else size_bytes + step
        self.next_size = after if after <= (self.most_bytes or after) else None
        if not halves:
            report.drop("no time" if size_bytes else "size 0")

    def note(self, line: str, number: int) -> None:
        """Take in a line that is not a row."""
        if self.failure is None and (_FAILED.search(line) or _WARNED.search(line)):
            self.failure = (number, line.strip())
            if _NO_START.search(line):
                self.next_size = None
        if _TAIL.search(line):
            self.next_size = None
        if "CCL" in line:  # RCCL, too
            self.nccl.note(line)
        if "NCCL INFO" not in line:
            self._note_header(line)

    def _note_sizes(self, line: str) -> None:
        found = _SIZES.search(line)
        least, most, step, unit = found.groups() if found else (None, None, None, None)
        self.next_size = int(least) if least else None
        self.most_bytes = int(most) if most else None
        if step and unit:
            self.step = int(step), unit

    def _note_header(self, line: str) -> None:
        self.ranks += rank_lines([line])
        if version := _LIBRARY.search(line):
            self.tests_versions.add(version[1])
            if version[2]:
                self.nccl.versions.add(str(NcclVersion.parse(version[2])))
        elif "Collective test" in line:
            self.program = self.program or nccl_log.program_in(line)
        elif " minBytes " in line:
            told = {name.strip(" :").replace(" ", "_"): x for name, x in _OPTION.findall(line)}
            self._note_sizes(line)
            self.settings |= {f"--{name}": value for name, value in told.items()}
        elif wrong := _OUT_OF_BOUNDS.search(line):
            self.out_of_bounds += int(wrong[1])
        elif "Blocking Enabled" in line:
            self.settings.setdefault("--blocking", "1")
        elif program := nccl_log.program_in(line):
            self.commands.add(program)
            asked = _MIN_BYTES.search(line)
            self.next_size = self.next_size or (parse_size(asked[1]) if asked else None)


class TextRuns:
    """The runs of plain lines in order: `rows` yields rows and fills `runs`."""

    def __init__(self, report: FileReport) -> None:
        self.runs = [Run(0)]
        self._report = report
        self._shell = nccl_log.Shell()
        self._layouts: dict[int, Layout] | None = None
        self._in_place_first = False

    def rows(self, lines: Iterable[str]) -> Iterator[list[Row]]:
        """Yield each row's halves (none of a torn one); `runs` are whole after the last."""
        command = ""
        for number, line in enumerate(lines, 1):
            tokens = line.split()
            layout = self._layouts.get(len(tokens)) if self._layouts else None
            if layout is not None and tokens[0].isdecimal():
                yield self._halves(layout, tokens, number)
                continue
            text = command + line.rstrip()
            command = ""
            if text.endswith("\\"):  # the next line goes on
                command = text[:-1] + " "
            elif text:
                yield from self._other(text, number)
        self._started()

    def _other(self, text: str, number: int) -> Iterator[list[Row]]:
        tokens, is_meant = text.split(), MEANT_AS_ROW.search(text) is not None
        layouts = _TODAY if is_meant and self._layouts is None else self._layouts or {}
        layout = layouts.get(len(tokens))
        if layout is not None and tokens[0].replace("_", "").isdecimal():
            yield self._halves(layout, tokens, number)
        elif is_meant or (self._layouts is not None and _PIECE.match(text)):
            known = max(
                self._layouts or (), default="none that is known (-C prints cputime, no time)"
            )
            reason = f"torn row: {len(tokens)} columns, the header names {known}"
            self._reject(number, reason, text)
            yield []
        else:
            self._note(text, number)

    def _reject(self, number: int, reason: str, text: str) -> None:
        self._started().torn += 1
        self._report.reject(number, reason, text)

    def _halves(self, layout: Layout, tokens: Sequence[str], number: int) -> list[Row]:
        self._next(if_so=self.runs[-1].ended)  # the header of this one is missing
        run = self._started()
        try:
            halves = read_row(layout, tokens, run.number, number)
        except ValueError as error:
            self._reject(number, f"torn row: {error}", " ".join(tokens))
            return []
        run.take(halves, int(tokens[0]), self._report)
        return halves

    def _note(self, text: str, number: int) -> None:
        run = self.runs[-1]
        first = self._in_place_first
        layouts = layouts_of_header(text, in_place_first=first) if "algbw" in text else None
        mark = next((mark for mark in _BEGINS if mark in text), None)
        if _FAILED.search(text) or _TAIL.search(text):
            self._started().ended = True
            self._layouts = None
        elif layouts is not None or mark is not None or _RANK.match(text):
            known = {None, nccl_log.program_in(text)}
            is_other = "test starting" in text and run.program not in known
            self._next(if_so=run.rows > 0 or run.ended or is_other)
            self._started().marks[mark or " ".join(text.strip("# ").split()[:2])] += 1
            if layouts is not None:
                self._layouts, self._in_place_first = layouts, False
        elif "NCCL INFO" in text or "CCL version" in text:
            # What a communicator says when it is destroyed is of the run before.
            is_over = run.ended or (run.rows > 0 and "CCL version" in text)
            self._next(if_so=is_over and not text.endswith(" COMPLETE"))
        elif len(places := _PLACES.findall(text)) == 2:
            self._in_place_first = places[0].lower() == "in"
        else:
            program = nccl_log.program_in(text)
            if program and run.commands - {program} and nccl_log.prompt_of(text).strip():
                self._started()  # the command before is over, and printed nothing that we know
            has_begun = run.started or run.nccl != nccl_log.NcclLog()
            self._next(if_so=program is not None and has_begun)
            told = self._shell.read(text)
            if run.started and not (run.rows or run.ended or program):
                # Set while it prints: whether before, is not known.
                run.settings |= {k: None for k, v in told.items() if run.settings.get(k) != v}
        self.runs[-1].note(text, number)

    def _started(self) -> Run:
        """The run, which prints from here at the latest: what the shell has set holds for it."""
        run = self.runs[-1]
        if not run.started:
            run.started, run.settings = True, self._shell.start()
        return run

    def _next(self, *, if_so: bool) -> None:
        if if_so:
            self._started()
            self._layouts = None
            self.runs.append(Run(len(self.runs)))


_FINITE: Final = BeforeValidator(
    lambda told: None if str(told).lstrip("-") in {"nan", "inf", "N/A"} else told
)
_Number = Annotated[float | None, _FINITE]


class _Half(BaseModel):
    time_us: _Number = Field(default=None, alias="time")
    algbw_gbytes_per_s: _Number = Field(default=None, alias="alg_bw")
    busbw_gbytes_per_s: _Number = Field(default=None, alias="bus_bw")
    wrong_values: Annotated[int | None, _FINITE] = Field(None, alias="nwrong", ge=0, lt=1 << 62)
    time_min_us: _Number = Field(default=None, alias="min_us")
    time_max_us: _Number = Field(default=None, alias="max_us")
    time_p99_us: _Number = Field(default=None, alias="p99_us")
    time_cv_percent: _Number = Field(default=None, alias="cv_pct")
    iteration_times_us: list[_Number] | None = Field(default=None, alias="times_us")
    process_times_us: list[list[_Number]] = Field(default=[], alias="per_process_max_times_us")
    cpu_time: None = Field(default=None, exclude=True)


class _Result(BaseModel):
    size_bytes: int = Field(alias="size", ge=0, lt=1 << MAX_SIZE_BITS)
    datatype: str | None = Field(default=None, alias="type")
    reduction_op: str | None = Field(default=None, alias="redop")
    root: int | None = Field(default=None, ge=-1, lt=1 << 30)
    out_of_place: dict[str, Any] | None = Field(default=None, exclude=True)
    out_of_place_per_iter: dict[str, Any] = Field(default={}, exclude=True)
    in_place: dict[str, Any] | None = Field(default=None, exclude=True)
    in_place_per_iter: dict[str, Any] = Field(default={}, exclude=True)


class _Config(BaseModel):
    nthreads: int = Field(default=1, le=1024)
    ngpus: int = Field(default=1, le=1024)
    agg_iters: int = Field(default=1, alias="aggregated_iterations")
    graph: int = 0
    unalign: int = 0
    blocking: bool = Field(default=False, alias="blocking_collectives")
    devices: list[dict[str, Any] | None] = []


class _Document(BaseModel):
    version: Literal[1, 2, 3]
    args: list[str] = []
    env: list[str] = []
    nccl_version: int | str = ""
    config: _Config = _Config()
    results: list[Any]


def read_json(path: Path, report: FileReport) -> tuple[list[Row], Run]:
    """The rows of JSON output (`-J`, by `src/util.cu` 2.17.3 to 2.19.6), and their run.

    Raises CorruptFile for text that a crash cut off, and OutputError for other JSON or versions.
    """
    try:
        with opened(path) as file:
            text = file.read()
        document = _Document.model_validate(json.loads(text, strict=False))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorruptFile(
            f"{path} is not whole JSON: {error} of {len(text)}; a crashed benchmark leaves it cut "
            "off: import its text output instead"
        ) from error
    except ValidationError as error:
        raise OutputError(
            f"{path} is no JSON of nccl-tests, version 1 to 3: {first_problem(error)}; import the "
            "text output instead"
        ) from error
    run, rows = _json_run(document), list[Row]()
    for number, result in enumerate(document.results):
        try:
            halves = _json_halves(_Result.model_validate(result))
        except ValueError as error:
            why = f"results[{number}]: {first_problem(error)}"
            report.reject(number + 1, why, json.dumps(result)[:200])
            continue
        run.take(halves, result["size"], report)
        rows += halves
    return rows, run


def _json_run(document: _Document) -> Run:
    run, config, shell = Run(0), document.config, nccl_log.Shell()
    run.program = nccl_log.program_in(" ".join(document.args[:1]))
    shell.read(" ".join(document.args))
    options = config.model_dump(include={"agg_iters", "graph", "unalign", "blocking"})
    run.settings = {f"--{name}": str(int(value)) for name, value in options.items()}
    # `env` is a user's whole environment: only settings are kept.
    run.settings |= shell.start() | nccl_log.kept(item.partition("=")[::2] for item in document.env)
    told = "Rank {rank} Group {group} on {hostname} device {device} [{device_hex}] {device_info}"
    devices = (defaultdict(str, {"group": "0", **each}) for each in filter(None, config.devices))
    run.ranks = [*rank_lines(map(told.format_map, devices))]
    if len(run.ranks) == 1:
        # Without MPI only rank 0 is listed; its process drives consecutive devices.
        only, count = run.ranks[0], config.nthreads * config.ngpus
        run.ranks = [only._replace(rank=i, device=only.device + i) for i in range(count)]
    with suppress(UnknownName):
        run.nccl.versions.add(str(NcclVersion.parse(document.nccl_version)))
    return run


def _json_halves(result: _Result) -> list[Row]:
    rows: list[Row] = []
    for in_place, told, each in (
        (False, result.out_of_place or {}, result.out_of_place_per_iter),
        (True, result.in_place or {}, result.in_place_per_iter),
    ):
        half = _Half.model_validate({**told, **each})
        if not half.time_us or half.time_us < 0.0 or not result.size_bytes:
            continue
        size, time_us = result.size_bytes, half.time_us
        algbw, busbw = half.algbw_gbytes_per_s, half.busbw_gbytes_per_s
        if None not in {algbw, busbw} and not plausible(size, time_us, algbw or 0, busbw or 0):
            raise ValueError(f"{size} bytes in {time_us} us are not {algbw} GB/s (busbw {busbw})")
        row: Row = {RUN: 0, "source_line": None, "in_place": in_place}
        row |= {**result.model_dump(), **half.model_dump()}
        known = [[time for time in times if time is not None] for times in half.process_times_us]
        row["process_times_us"] = [mean(times) if times else None for times in known] or None
        rows.append(row)
    return rows
