"""The table that nccl-tests prints: which column is which, and what a line of it says.

    size count type [redop] [root] | time algbw busbw [#wrong] [4 of -I] | the same in place | [-S]

Names come from the header where there is one. A row without header is read only when its words and
numbers can stand in one way. Either way the numbers must fit each other (`plausible`): a row that
was torn and joined again has the right number of columns and the wrong numbers in them.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from dynamiccl.sizes import MAX_SIZE_BITS

#: One half of a line, by columns of the schema: all of `CORE`, and what else there is.
Row = dict[str, Any]
#: The key of a row's run, by its number in the output.
RUN: Final = "run_number"

#: Columns before the halves, and of a half, as nccl-tests has named them since 2019; other names of
#: theirs (before 2019: `bytes N type op ... res`). `error` is the largest deviation, no count.
_LEADING: Final = ("size", "count", "type", "redop", "root")
_HALF: Final = (
    *("time", "algbw", "busbw", "wrong", "error"),
    *("time_min_us", "time_max_us", "time_p99_us", "time_cv_percent"),
)
_OTHER_NAMES: Final = {
    "bytes": "size",
    "N": "count",
    "op": "redop",
    "#wrong": "wrong",
    "res": "error",
    "i_min": "time_min_us",
    "i_max": "time_max_us",
    "i_p99": "time_p99_us",
    "i_cv%": "time_cv_percent",
}
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d")
_CLOCK: Final = re.compile(r"\d\d:\d\d:\d\d")
_WORD: Final = re.compile(r"[a-zA-Z]\w*")
#: Types that nccl-tests has printed; a line with one of them in third place was meant as a row.
_DATATYPES: Final = frozenset(
    {"int8", "uint8", "int32", "uint32", "int64", "uint64", "char", "int", "half", "float"}
    | {"double", "bfloat16", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"}
)


class Half(NamedTuple):
    """Where the columns of one half stand among a row's tokens; -1 = nowhere."""

    #: None = the output does not say.
    in_place: bool | None
    time: int
    algbw: int
    busbw: int
    wrong: int
    #: Those of -I, by column of the schema.
    per_iteration: tuple[tuple[str, int], ...]


class Layout(NamedTuple):
    """Where the columns of a row stand among its tokens, of which there are `width`."""

    width: int
    datatype: int
    redop: int
    root: int
    halves: tuple[Half, ...]
    #: Before 2019 the time column was in milliseconds.
    time_to_us: float


def _layout(
    leading: Sequence[str],
    halves: Sequence[Sequence[str]],
    places: Sequence[bool | None],
    *,
    is_stamped: bool,
    time_to_us: float = 1.0,
) -> Layout:
    start, found = len(leading), []
    for place, columns in zip(places, halves, strict=True):
        at = {name: start + i for i, name in enumerate(columns)}
        each = tuple((name, i) for name, i in at.items() if name.startswith("time_"))
        wrong = at.get("wrong", -1)
        found.append(Half(place, at["time"], at["algbw"], at["busbw"], wrong, each))
        start += len(columns)
    datatype, redop, root = (
        leading.index(name) if name in leading else -1 for name in ("type", "redop", "root")
    )
    # A time stamp at the end is two tokens.
    return Layout(start + 2 * is_stamped, datatype, redop, root, tuple(found), time_to_us)


def layouts_of_header(line: str, heading: str) -> dict[int, Layout] | None:
    """Layouts by number of tokens for a line of column names, or None when it is not one.

    `heading` is the line above it, which says out-of-place and in-place. AlltoAll has a `redop`
    column and nothing in it, so its rows are one token shorter. Raises nothing.

    >>> sorted(layouts_of_header("#  size time algbw busbw", ""))
    [4]
    """
    names = line.split()
    if names and names[0] == "#":
        del names[0]
    is_stamped = names[-1:] == ["timestamp"]
    names = names[: len(names) - is_stamped]
    starts = [i for i, name in enumerate(names) if name == "time"]
    if not names or names[0] not in {"size", "bytes"} or not 1 <= len(starts) <= 2:
        return None
    ends = [*starts[1:], len(names)]
    scale = 1000.0 if names[0] == "bytes" else 1.0
    names = [_OTHER_NAMES.get(name, name) for name in names]
    leading, halves = names[: starts[0]], [names[a:b] for a, b in zip(starts, ends, strict=True)]
    if not {*leading} <= {*_LEADING}:
        return None
    if not all({"algbw", "busbw"} <= {*half} <= {*_HALF} for half in halves):
        return None
    out, inside = "out-of-place" in heading, "in-place" in heading
    places = (False, True) if len(halves) == 2 else (None if out == inside else inside,)
    blank = [name for name in leading if name != "redop"]
    layouts = [
        _layout(each, halves, places, is_stamped=is_stamped, time_to_us=scale)
        for each in (blank, leading)
    ]
    return {layout.width: layout for layout in layouts}


def layout_of_tokens(tokens: Sequence[str]) -> Layout | None:
    """Layout of a row without header; None when it is ambiguous or fits no layout.

    >>> layout_of_tokens("8 2 float sum -1 9.1 0.0 0.0 0 9.2 0.0 0.0 0".split()).root
    4
    """
    is_stamped = bool(
        len(tokens) > 2 and _DATE.fullmatch(tokens[-2]) and _CLOCK.fullmatch(tokens[-1])
    )
    end = len(tokens) - 2 * is_stamped
    if end < 9 or not _WORD.match(tokens[2]):
        return None
    leading = ["size", "count", "type"]
    if _WORD.fullmatch(tokens[3]):
        leading.append("redop")
    if (end - len(leading)) % 2:
        leading.append("root")
    each = (end - len(leading)) // 2
    if each not in {3, 4, 8}:
        return None
    halves = []
    for start in (len(leading), len(leading) + each):
        check = [
            "wrong" if _is_count(token) else "error" for token in tokens[start + 3 : start + 4]
        ]
        halves.append([*_HALF[:3], *check, *_HALF[5:]][:each])
    return _layout(leading, halves, (False, True), is_stamped=is_stamped)


def _is_count(token: str) -> bool:
    """Whether a check column without a name counts: `0`, `12`, `2e+06`, but not `1e-07`, `0e+00`.

    Counts are printed with %g, which takes an exponent from a million on.
    """
    mantissa, exponent_mark, exponent = token.partition("e")
    if not exponent_mark:
        return mantissa.isdecimal()
    return exponent.startswith("+") and exponent[1:].isdecimal() and int(exponent[1:]) >= 6


class Torn(ValueError):
    """Raised for a row that is rejected; the message is the reason."""


def read_row(layout: Layout, tokens: Sequence[str], run: int, line: int) -> list[Row]:
    """The halves of a row that hold a time. Raises ValueError with the reason to reject it."""
    size = int(tokens[0])
    datatype = tokens[layout.datatype] if layout.datatype >= 0 else None
    redop = tokens[layout.redop] if layout.redop >= 0 else None
    root = int(tokens[layout.root]) if layout.root >= 0 else None
    _check_leading(size, datatype, redop, root)
    rows: list[Row] = []
    for half in layout.halves:
        if tokens[half.time] == "N/A":
            continue
        time_us = float(tokens[half.time]) * layout.time_to_us
        algbw, busbw = float(tokens[half.algbw]), float(tokens[half.busbw])
        if time_us == 0.0 and (algbw == 0.0 or math.isinf(algbw)):
            continue
        if size and not plausible(size, time_us, algbw, busbw):
            raise Torn(f"{size} bytes in {time_us} us are not {algbw} GB/s (busbw {busbw})")
        wrong = tokens[half.wrong] if half.wrong >= 0 else "N/A"
        row = {
            RUN: run,
            "source_line": line,
            "size_bytes": size,
            "datatype": datatype,
            "reduction_op": redop,
            "root": root,
            "in_place": half.in_place,
            "time_us": time_us,
            "algbw_gbytes_per_s": algbw,
            "busbw_gbytes_per_s": busbw,
            "wrong_values": 0 if wrong == "0" else _wrong(wrong),
        }
        for name, index in half.per_iteration:
            row[name] = float(tokens[index])
        rows.append(row)
    return rows


def _check_leading(size: int, datatype: str | None, redop: str | None, root: int | None) -> None:
    if size >> MAX_SIZE_BITS:
        raise Torn(f"size {size} is beyond every message")
    for word in (datatype, redop):
        if word is not None and not word.isidentifier():
            raise Torn(f"torn row: '{word[:20]}' where a type or operation stands")
    if root is not None and not -1 <= root < 1 << 30:
        raise Torn(f"root {root} is no rank")


def _wrong(token: str) -> int | None:
    if token == "N/A":
        return None
    wrong = int(float(token))
    if wrong < 0:
        raise Torn(f"{wrong} wrong values")
    return min(wrong, 1 << 62)


def plausible(size: int, time_us: float, algbw: float, busbw: float) -> bool:
    """Whether size, time and bandwidths are consistent within their printed digits.

    A row that was torn and joined again has the right number of columns and the wrong numbers in
    them. Bus bandwidth is below twice the algorithm bandwidth for every collective. Bandwidth has
    two decimals (none from 10^4 on, one digit from 10^5 on), time at least two decimals below 100;
    five per cent on top of the rounding.

    >>> plausible(1 << 20, 100.0, 10.49, 18.35), plausible(1 << 20, 100.0, 18.35, 18.35)
    (True, False)
    """
    if not (time_us > 0.0 and algbw >= 0.0 and busbw >= 0.0 and math.isfinite(time_us)):
        return False
    expected = size / (time_us * 1e3)
    share = 0.05 if algbw < 1e5 else 0.5
    if busbw > 2.0 * algbw * (1.0 + share) + 0.02:
        return False
    return abs(expected - algbw) <= 0.006 + share * expected + expected * 0.006 / time_us


def looks_like_row(tokens: Sequence[str], *, in_table: bool = False) -> bool:
    """Whether an unreadable line was meant as a row or a piece of one.

    Under column names, two integers at the start are the first half of a torn row, and numbers
    alone are the second.
    """
    whole = [token.replace("_", "").isdecimal() for token in tokens[:2]]
    if len(tokens) >= 3 and tokens[2] in _DATATYPES and all(whole):
        return True
    if not in_table or len(tokens) < 2:
        return False
    return all(whole) or all(_is_number(token) for token in tokens)


def ends_like_row(tokens: Sequence[str]) -> bool:
    """Whether another program's line has a row glued to its end."""
    return (
        len(tokens) >= 12
        and any(token in _DATATYPES for token in tokens[:-8])
        and all(_is_number(token) or token == "N/A" for token in tokens[-8:])
    )


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True
