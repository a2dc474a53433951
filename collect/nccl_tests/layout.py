"""Column layout of an nccl-tests row, by the column names or by the row itself.

    size count type [redop] [root] | time algbw busbw [#wrong] [4 of -I] | the same in place | [-S]

Names come from the header when there is one. A row without a header is read only when its words and
numbers can stand in one way. Either way the numbers must fit each other (`plausible`): a row that
was torn and joined again has the right number of columns and the wrong numbers in them.
"""

import math
import re
from dataclasses import dataclass
from typing import Final

#: Names in a header line: nccl-tests since 2019, and `bytes N type op ... res` before.
_LEADING: Final = {
    "size": "size",
    "bytes": "size",
    "count": "count",
    "N": "count",
    "type": "type",
    "redop": "redop",
    "op": "redop",
    "root": "root",
}
_HALF: Final = {
    "time": "time",
    "algbw": "algbw",
    "busbw": "busbw",
    "#wrong": "wrong",
    "wrong": "wrong",
    "error": "error",
    "res": "error",
    "i_min": "i_min",
    "i_max": "i_max",
    "i_p99": "i_p99",
    "i_cv%": "i_cv%",
}
_TAIL: Final = frozenset({"timestamp"})
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d")
_CLOCK: Final = re.compile(r"\d\d:\d\d:\d\d")
#: Types that nccl-tests has printed; a line with one of them in third place was meant as a row.
DATATYPES: Final = frozenset(
    {"int8", "uint8", "int32", "uint32", "int64", "uint64", "char", "int", "half", "float"}
    | {"double", "bfloat16", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"}
)
_WORD: Final = re.compile(r"[a-zA-Z]\w*")


@dataclass(frozen=True, slots=True)
class Half:
    """Token positions of one half of a row; -1 where the layout has no such column."""

    in_place: bool | None
    time: int
    algbw: int
    busbw: int
    wrong: int = -1
    #: `#wrong` counts wrong values; `error` is the largest deviation and no count.
    wrong_is_count: bool = False
    #: First of the four -I columns.
    per_iteration: int = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """Token positions of a row with `width` tokens."""

    width: int
    datatype: int
    redop: int
    root: int
    halves: tuple[Half, ...]
    #: Before 2019 the time column was in milliseconds.
    time_to_us: float = 1.0


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
    if len(names) < 4 or names[0] not in {"size", "bytes"}:
        return None
    times = [i for i, name in enumerate(names) if name == "time"]
    known = all(n in _LEADING or n in _HALF or n in _TAIL for n in names)
    if not known or not 1 <= len(times) <= 2 or not {"algbw", "busbw"} <= set(names):
        return None
    scale = 1000.0 if names[0] == "bytes" else 1.0
    layout = _named(names, times, _places(len(times), heading), scale)
    if layout is None:
        return None
    layouts = {layout.width: layout}
    if layout.redop >= 0:
        blank = [n for n in names if _LEADING.get(n) != "redop"]
        shorter = _named(blank, [t - 1 for t in times], _places(len(times), heading), scale)
        if shorter is not None:
            layouts[shorter.width] = shorter
    return layouts


def _places(halves: int, heading: str) -> tuple[bool | None, ...]:
    if halves == 2:
        return (False, True)
    out, both = "out-of-place" in heading, "in-place" in heading
    return (None if out == both else not out,)


def _named(
    names: list[str], times: list[int], places: tuple[bool | None, ...], scale: float
) -> Layout | None:
    stamped = names[-1] in _TAIL
    end = len(names) - stamped
    leading = {_LEADING[n]: i for i, n in enumerate(names[: times[0]]) if n in _LEADING}
    halves = []
    for start, stop, place in zip(times, [*times[1:], end], places, strict=True):
        at = {_HALF[n]: i for i, n in enumerate(names[:stop]) if i >= start and n in _HALF}
        if not {"algbw", "busbw"} <= at.keys():
            return None
        halves.append(
            Half(
                place,
                at["time"],
                at["algbw"],
                at["busbw"],
                at.get("wrong", at.get("error", -1)),
                "wrong" in at,
                at["i_min"] if {"i_min", "i_max", "i_p99", "i_cv%"} <= at.keys() else -1,
            )
        )
    return Layout(
        end + 2 * stamped,  # a time stamp is two tokens
        leading.get("type", -1),
        leading.get("redop", -1),
        leading.get("root", -1),
        tuple(halves),
        scale,
    )


#: Tokens of both halves, by what one half has: three numbers, `#wrong`, and the four of -I.
_HALF_WIDTHS: Final = {6: (3, False), 8: (4, False), 16: (8, True)}


def layout_of_tokens(tokens: list[str]) -> Layout | None:
    """Layout of a row without header; None when it is ambiguous or fits no layout.

    >>> layout_of_tokens("8 2 float sum -1 9.1 0.0 0.0 0 9.2 0.0 0.0 0".split()).root
    4
    """
    width = len(tokens)
    stamped = width > 2 and bool(_DATE.fullmatch(tokens[-2]) and _CLOCK.fullmatch(tokens[-1]))
    end = width - 2 * stamped
    if end < 9 or not _WORD.match(tokens[2]):
        return None
    redop = 3 if _WORD.fullmatch(tokens[3]) else -1
    start = 4 if redop >= 0 else 3
    root = start if (end - start) % 2 else -1
    start += root >= 0
    shape = _HALF_WIDTHS.get(end - start)
    if shape is None:
        return None
    step, per_iteration = shape
    halves = tuple(
        Half(
            place,
            at,
            at + 1,
            at + 2,
            at + 3 if step > 3 else -1,
            step > 3 and _is_count(tokens[at + 3]),
            at + 4 if per_iteration else -1,
        )
        for place, at in ((False, start), (True, start + step))
    )
    return Layout(width, 2, redop, root, halves)


def _is_count(token: str) -> bool:
    """Whether a check column without a name counts: `0`, `12`, `2e+06`, but not `1e-07`, `0e+00`.

    Counts are printed with %g, which takes an exponent from a million on.
    """
    mantissa, exponent_mark, exponent = token.partition("e")
    if not exponent_mark:
        return mantissa.isdecimal()
    return exponent.startswith("+") and exponent[1:].isdecimal() and int(exponent[1:]) >= 6


def plausible(size: int, time_us: float, algbw: float, busbw: float) -> bool:
    """Whether size, time and bandwidths are consistent within their printed digits.

    Bus bandwidth is below twice the algorithm bandwidth for every collective.

    Bandwidth has two decimals (none from 10^4 on, one digit from 10^5 on), time at least two
    decimals below 100; five per cent on top of the rounding.

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


def looks_like_row(tokens: list[str], *, in_table: bool) -> bool:
    """Whether an unreadable line was meant as a row or a piece of one.

    Under column names, two integers at the start are the first half of a torn row, and numbers
    alone are the second.
    """
    whole = [token.replace("_", "").isdecimal() for token in tokens[:2]]
    if len(tokens) >= 3 and tokens[2] in DATATYPES and all(whole):
        return True
    if not in_table or len(tokens) < 2:
        return False
    return all(whole) or all(_is_number(token) for token in tokens)


def ends_like_row(tokens: list[str]) -> bool:
    """Whether another program's line has a row glued to its end."""
    return (
        len(tokens) >= 12
        and any(token in DATATYPES for token in tokens[:-8])
        and all(_is_number(token) or token == "N/A" for token in tokens[-8:])
    )


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True
