"""Parser of nccl-tests text: rows, runs, and rejected lines.

One pass over the lines. Rows go into a NumPy array, 2 x 10^6 halves in about 200 MiB, since their
meaning may depend on the last line (the program's name can stand in the tail only). A line that was
meant as a row and cannot be read as one is reported and nothing of it is taken: half a row joined
with half of another would be a measurement that nobody made.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.nccl_tests.facts import RunFacts, header_kind, is_command
from dynamiccl.collect.nccl_tests.layout import (
    Half,
    Layout,
    ends_like_row,
    layout_of_tokens,
    layouts_of_header,
    looks_like_row,
    plausible,
)
from dynamiccl.collect.nccl_tests.lines import may_have_prefix, strip_prefix
from dynamiccl.collect.reports import FileReport
from dynamiccl.sizes import MAX_SIZE_BITS

#: Stands for null in integer fields of a row; no root and no count is negative like this.
MISSING: Final = -(2**31)
#: One half of a row. `in_place` is -1 where the output does not say.
ROW: Final = np.dtype(
    [
        ("run", "i4"),
        ("line", "i8"),
        ("size", "i8"),
        ("datatype", "i2"),
        ("redop", "i2"),
        ("root", "i4"),
        ("in_place", "i1"),
        ("time", "f8"),
        ("algbw", "f8"),
        ("busbw", "f8"),
        ("wrong", "i8"),
        ("i_min", "f8"),
        ("i_max", "f8"),
        ("i_p99", "f8"),
        ("i_cv", "f8"),
    ]
)
_NO_ITERATIONS: Final = (math.nan, math.nan, math.nan, math.nan)
_CPU_TIME: Final = "cputime (-C) is the cost of the launch and not the time of the call"
_FLUSH_ROWS: Final = 32_768
_MAX_WORDS: Final = 1_000


class _Unreadable(ValueError):
    """Raised for a token or row that is rejected; the message is the reason."""


@dataclass(slots=True)
class _Stream:
    """One launcher stream: its current run, and the columns of its last header."""

    run: RunFacts
    layouts: dict[int, Layout] = field(default_factory=dict)
    heading: str = ""
    #: Why no row of these columns can be taken.
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """All rows of one output, and its runs in order of appearance."""

    rows: npt.NDArray[Any]
    runs: list[RunFacts]
    #: Data types and reduction operations; rows hold positions in it.
    words: list[str]


class TextParser:
    """Parses one output: `feed` every line, then `finish`."""

    def __init__(self, report: FileReport) -> None:
        self._report = report
        self._runs: list[RunFacts] = []
        self._plain = _Stream(self._new_run(""))
        self._streams = {"": self._plain}
        self._words: dict[str, int] = {}
        self._pending: list[tuple[Any, ...]] = []
        self._chunks: list[npt.NDArray[Any]] = []

    def feed(self, number: int, line: str) -> None:
        """Parse one line; `number` counts from 1."""
        tokens = line.split()
        if not tokens:
            return
        layout = self._plain.layouts.get(len(tokens))
        if layout is not None and tokens[0].isdecimal():
            self._row(self._plain, layout, tokens, number)
        elif may_have_prefix(line):
            name, rest = strip_prefix(line)
            self._line(self._stream(name), rest, number)
        else:
            self._line(self._plain, line, number)

    def finish(self) -> ParsedText:
        """The result; the parser cannot be used again."""
        self._flush()
        rows = np.empty(sum(map(len, self._chunks)), dtype=ROW)
        end = len(rows)
        while self._chunks:  # from the back, freeing each: both copies never exist at once
            chunk = self._chunks.pop()
            rows[end - len(chunk) : end] = chunk
            end -= len(chunk)
        return ParsedText(rows, self._runs, list(self._words))

    def _stream(self, name: str) -> _Stream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream(self._new_run(name))
        return stream

    def _new_run(self, stream: str) -> RunFacts:
        run = RunFacts(len(self._runs), stream)
        self._runs.append(run)
        return run

    def _line(self, stream: _Stream, line: str, number: int) -> None:
        tokens = line.split()
        if not tokens:
            return
        layout = stream.layouts.get(len(tokens))
        if layout is not None and tokens[0].replace("_", "").isdecimal():
            self._row(stream, layout, tokens, number)
        elif "algbw" in line and self._columns(stream, line):
            return
        elif "place" in line and "out-of-place" in line:
            stream.heading = line
        elif looks_like_row(tokens, in_table=bool(stream.layouts) and not stream.run.ended):
            self._irregular(stream, tokens, number, line)
        else:
            self._other(stream, tokens, number, line)

    def _columns(self, stream: _Stream, line: str) -> bool:
        cpu_time = "cputime" in line
        layouts = layouts_of_header(line.replace("cputime", "time"), stream.heading)
        if layouts is None:
            return False
        if stream.run.ended:
            stream.run = self._new_run(stream.run.stream)
        stream.run.marks["columns"] += 1
        stream.layouts = layouts
        stream.refusal = _CPU_TIME if cpu_time else ""
        return True

    def _other(self, stream: _Stream, tokens: list[str], number: int, line: str) -> None:
        kind = "command" if is_command(line) else header_kind(line)
        if kind is not None:
            if stream.run.rows or stream.run.ended:
                stream.run = self._new_run(stream.run.stream)
                stream.layouts = {}
            if kind != "command":
                stream.run.marks[kind] += 1
        elif ends_like_row(tokens):
            self._report.reject(number, "a row joined to another program's line", line)
        stream.run.note(line.strip(), number)

    def _irregular(self, stream: _Stream, tokens: list[str], number: int, line: str) -> None:
        """Parse a row without header, or report a torn one."""
        longest = max(stream.layouts, default=0)
        layout = stream.layouts.get(len(tokens))
        if layout is None and len(tokens) > longest:
            layout = layout_of_tokens(tokens)
        if layout is not None:
            self._row(stream, layout, tokens, number)
            return
        wanted = f"the header names {longest}" if longest else "no layout of nccl-tests has that"
        self._report.reject(number, f"torn row: {len(tokens)} columns, {wanted}", line)

    def _row(self, stream: _Stream, layout: Layout, tokens: list[str], number: int) -> None:
        if stream.refusal:
            self._report.reject(number, stream.refusal, " ".join(tokens))
            return
        try:
            self._take(stream.run, layout, tokens, number)
        except _Unreadable as error:
            self._report.reject(number, str(error), " ".join(tokens))
        except (ValueError, OverflowError):
            reason = "torn row: a column holds something else than its number"
            self._report.reject(number, reason, " ".join(tokens))

    def _take(self, run: RunFacts, layout: Layout, tokens: list[str], number: int) -> None:
        size = int(tokens[0])
        if size >> MAX_SIZE_BITS:
            raise _Unreadable(f"size {tokens[0]} is beyond every message")
        datatype = self._word(tokens, layout.datatype)
        redop = self._word(tokens, layout.redop)
        root = int(tokens[layout.root]) if layout.root >= 0 else MISSING
        if not -1 <= root < 1 << 30 and root != MISSING:
            raise _Unreadable(f"root {root} is no rank")
        halves = [_half(layout, half, tokens, size) for half in layout.halves]
        self._report.rows_read += 1
        run.rows += 1
        if size == 0:
            self._report.drop("size 0")
            return
        start = (run.index, number, size, datatype, redop, root)
        taken = [start + half for half in halves if half is not None]
        if not taken:
            self._report.drop("no time")
        self._pending += taken
        if len(self._pending) >= _FLUSH_ROWS:
            self._flush()

    def _word(self, tokens: list[str], index: int) -> int:
        if index < 0:
            return -1
        word = tokens[index]
        code = self._words.get(word)
        if code is None:
            if not word.isidentifier() or len(self._words) >= _MAX_WORDS:
                raise _Unreadable(f"torn row: '{word[:20]}' where a type or operation stands")
            code = self._words[word] = len(self._words)
        return code

    def _flush(self) -> None:
        if self._pending:
            self._chunks.append(np.array(self._pending, dtype=ROW))
            self._pending = []


def _half(
    layout: Layout, half: Half, tokens: list[str], size: int
) -> tuple[int, float, float, float, int, float, float, float, float] | None:
    """Values of one half from `in_place` on; None when it holds no time."""
    if tokens[half.time] == "N/A":
        return None
    time = float(tokens[half.time]) * layout.time_to_us
    algbw = float(tokens[half.algbw])
    busbw = float(tokens[half.busbw])
    wrong = MISSING
    if half.wrong >= 0 and tokens[half.wrong] != "N/A":
        value = float(tokens[half.wrong])
        if half.wrong_is_count:
            wrong = min(int(value), 1 << 62)
            if wrong < 0:
                raise _Unreadable(f"{wrong} wrong values")
    if time == 0.0 and (algbw == 0.0 or math.isinf(algbw)):
        return None
    if size and not plausible(size, time, algbw, busbw):
        raise _Unreadable(f"{size} bytes in {time} us are not {algbw} GB/s (busbw {busbw})")
    at = half.per_iteration
    extra = _NO_ITERATIONS
    if at >= 0:
        extra = (
            float(tokens[at]),
            float(tokens[at + 1]),
            float(tokens[at + 2]),
            float(tokens[at + 3]),
        )
    place = -1 if half.in_place is None else int(half.in_place)
    return (place, time, algbw, busbw, wrong, *extra)


def parse_lines(lines: Iterable[str], report: FileReport) -> ParsedText:
    """Parse a whole output; rejected and dropped lines are counted in `report`."""
    parser = TextParser(report)
    for number, line in enumerate(lines, 1):
        parser.feed(number, line)
    return parser.finish()
