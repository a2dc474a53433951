"""The collectives about which two releases are asked: a job's calls, or a grid.

Sizes of a job are taken as they were called: NCCL's thresholds lie between them, and a bin may have
one on either side.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from dynamiccl.nccl import Collective
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call

#: Sizes of the grid: half-octaves from 1 KiB to 1 GiB, as nccl-tests is swept.
_GRID_HALF_OCTAVES: Final = range(20, 61)
#: Sizes are cut to this, as NCCL's buffers of 16-byte words are.
_WORD_BYTES: Final = 16
_ASKED: Final = ("collective", "size_bytes", "num_ranks", "num_nodes", "asks_tuner")
_TUNED: Final = {collective.wire: collective for collective in Collective if collective.tunable}


@dataclass(frozen=True, slots=True)
class Point:
    """A collective of one size, and its number of calls in a job (0: from a grid)."""

    call: Call
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Points:
    """The points, and the calls that cannot be asked about."""

    points: Sequence[Point]
    #: Reason -> calls that are left out.
    left_out: dict[str, int]


def grid(groups: Iterable[Group], collectives: Iterable[Collective]) -> Points:
    """Half-octave sizes from 1 KiB to 1 GiB of every collective and group."""
    sizes = [round(2 ** (half / 2)) // _WORD_BYTES * _WORD_BYTES for half in _GRID_HALF_OCTAVES]
    kinds = sorted(set(collectives), key=lambda collective: collective.wire)
    return Points(
        [
            Point(Call(group, collective, size))
            for collective in kinds
            for group in groups
            for size in sizes
        ],
        {},
    )


def called(frame: pl.DataFrame, ranks_per_node: int | None = None) -> Points:
    """The points of a `calls` table, with the number of calls of each.

    Where the table does not know the nodes of a communicator, `ranks_per_node` ranks share one.
    """
    counts = frame.group_by(_ASKED).agg(pl.len()).sort(_ASKED)
    points: list[Point] = []
    left_out: dict[str, int] = {}
    for collective, size, ranks, nodes, asks_tuner, count in counts.iter_rows():
        shape = _shape(ranks, nodes, ranks_per_node)
        if collective not in _TUNED or asks_tuner is False:
            reason = "not a call that NCCL's cost model decides"
        elif size is None or size < 1:
            reason = "no size"
        elif isinstance(shape, str):
            reason = shape
        else:
            points.append(Point(Call(shape, _TUNED[collective], size), count))
            continue
        left_out[reason] = left_out.get(reason, 0) + count
    return Points(points, left_out)


def _shape(ranks: int | None, nodes: int | None, ranks_per_node: int | None) -> Group | str:
    """The group, or why there is none."""
    if ranks is None:
        return "the number of ranks is not known"
    if ranks < 2:
        return "one rank"
    if nodes is None:
        if ranks_per_node is None:
            return "the number of nodes is not known (add --ranks-per-node)"
        nodes = -(-ranks // ranks_per_node)
    if ranks % nodes:
        return "nodes with unequally many ranks"
    return Group(nodes, ranks // nodes)


def by_line(points: Sequence[Point]) -> Iterator[list[Point]]:
    """The points of each collective and group together, by size."""
    lines: dict[tuple[str, int, int], list[Point]] = {}
    for point in points:
        call = point.call
        key = (call.collective.wire, call.group.num_nodes, call.group.ranks_per_node)
        lines.setdefault(key, []).append(point)
    for key in sorted(lines):
        yield sorted(lines[key], key=lambda point: point.call.size_bytes)
