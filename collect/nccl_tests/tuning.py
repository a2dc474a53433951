"""Parses NCCL's tuning log lines: algorithm, protocol, channels of each call.

    2.20-2.22  <B> Bytes -> Algo <int> proto <int> time <float>
    2.23       <Func>: <B> Bytes -> Algo <int> proto <int> time <float>
    2.24-      <Func>: <B> Bytes -> Algo <NAME> proto <NAME> channel{Lo..Hi}={<lo>..<hi>} ...

From 2.24 on, B is count times type size: the bytes of one rank for AllGather and ReduceScatter.
Symmetric kernels and the copy engine print another tail; they are none of the configs we know.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Algorithm, Collective, Protocol

_LINE: Final = re.compile(
    r"(?:(?P<func>[A-Za-z]+)(?P<special> \[[^\]]+\])?: )?(?P<size>\d{1,18}) Bytes -> "
    r"(?:Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)"
    r"(?: time [\d.]+| channel\{Lo\.\.Hi\}=\{(?P<low>\d{1,3})\.\.(?P<high>\d{1,3})\})"
    r"|(?P<other>\w+))"
)
_Kind = TypeVar("_Kind", Algorithm, Protocol)
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter})


@dataclass(frozen=True, slots=True)
class Choice:
    """What NCCL ran for one call; channels are None where its version does not print them."""

    algorithm: Algorithm
    protocol: Protocol
    num_channels: int | None


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One line: collective, bytes as printed, choice (None: not one of our names)."""

    collective: Collective | None
    printed_bytes: int
    per_rank: bool
    choice: Choice | None

    def whole_bytes(self, num_ranks: int) -> int:
        """NCCL's nBytes: the whole buffer, over all ranks where printed per rank."""
        return self.printed_bytes * num_ranks if self.per_rank else self.printed_bytes


def logged_calls(lines: Iterable[str]) -> Iterator[LoggedCall]:
    """The calls of a log, in order."""
    for line in lines:
        call = _call(line)
        if call is not None:
            yield call


def _call(line: str) -> LoggedCall | None:
    if " Bytes -> " not in line:
        return None
    match = _LINE.search(line)
    if match is None:
        return None
    collective = None
    if match["func"]:
        try:
            collective = Collective.parse(match["func"])
        except UnknownName:
            return None
    per_rank = match["low"] is not None and collective in _PER_RANK
    return LoggedCall(collective, int(match["size"]), per_rank, _choice(match))


@dataclass(slots=True)
class TuningLog:
    """All choices seen, by (collective, bytes as printed, whether these are per rank).

    The collective is None in the oldest format; a `None` choice is one that we cannot name.
    """

    seen: dict[tuple[Collective | None, int, bool], set[Choice | None]] = field(
        default_factory=dict
    )

    def add(self, line: str) -> bool:
        """Parse a line; returns whether it is a tuning line."""
        call = _call(line)
        if call is None:
            return False
        key = (call.collective, call.printed_bytes, call.per_rank)
        self.seen.setdefault(key, set()).add(call.choice)
        return True

    def merge(self, other: "TuningLog") -> None:
        """Add the choices of another log."""
        for key, choices in other.seen.items():
            self.seen.setdefault(key, set()).update(choices)

    def resolve(
        self, collective: Collective, num_ranks: int | None
    ) -> tuple[dict[int, Choice], list[int]]:
        """Choice by size in bytes (whole buffer), and the sizes whose lines disagree.

        Lines in bytes per rank are left out when the number of ranks is not known.
        """
        by_size: dict[int, set[Choice | None]] = {}
        for (named, size, per_rank), choices in self.seen.items():
            if named is not None and named is not collective:
                continue
            if per_rank and num_ranks is None:
                continue
            whole = size * num_ranks if per_rank and num_ranks is not None else size
            by_size.setdefault(whole, set()).update(choices)
        agreed: dict[int, Choice] = {}
        for size, choices in by_size.items():
            only = next(iter(choices)) if len(choices) == 1 else None
            if only is not None:
                agreed[size] = only
        return agreed, sorted(by_size.keys() - agreed.keys())


def _choice(match: re.Match[str]) -> Choice | None:
    if match["other"] or match["special"]:
        return None
    try:
        algorithm = _member(Algorithm, match["algorithm"])
        protocol = _member(Protocol, match["protocol"])
    except (UnknownName, ValueError):
        return None
    if match["low"] is None:
        return Choice(algorithm, protocol, None)
    count = int(match["high"]) - int(match["low"]) + 1
    return Choice(algorithm, protocol, count) if count > 0 else None


def _member(kind: type[_Kind], text: str) -> _Kind:
    return kind(int(text)) if text.isdecimal() else kind.parse(text)
