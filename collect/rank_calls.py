"""One rank's record of a call, in any trace format, and the joining of the records of all ranks.

Ranks are joined by what names a call for all of them: the communicator's id and NCCL's number, or
the process group and PyTorch's number. Older traces have neither; their calls are joined by order
within a training step, and only where the ranks have the same collectives in the same order there.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa

from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.datasets.schema import CALLS
from dynamiccl.errors import CorruptFile

#: Timing sources of the column `timing_source`.
GPU: Final = "gpu"
CPU: Final = "cpu"
#: Of a joined call, what any of its ranks may tell.
_ANY: Final = (
    *("comm", "group", "group_ranks", "sequence", "group_sequence", "step", "collective"),
    *("datatype", "num_ranks", "num_nodes", "kernel", "asks_tuner", "num_threads"),
)
#: What must be equal for ranks to agree.
_AGREED: Final = ("collective", "size_bytes", "datatype", "algorithm", "protocol", "num_channels")
#: Rows that stand as Python's objects at a time.
_ROWS_AT_ONCE: Final = 10_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: Columns hold 64 bits.
_MOST: Final = 1 << 62


@dataclass(slots=True, kw_only=True)
class RankCall:
    """One rank's record of a call, by columns of `calls`; None is what the trace does not tell."""

    source: CallSource
    source_file: str
    rank: int | None = None
    #: The same in the records that all ranks made of the call; None: it cannot be known.
    key: Hashable = None
    #: Instead: what the call is the n-th of, `order` being n.
    stream: Hashable = None
    order: int = 0
    comm: str | None = None
    group: str | None = None
    group_ranks: tuple[int, ...] | None = None
    sequence: int | None = None
    group_sequence: int | None = None
    step: int | None = None
    #: Since 1970; when this rank began.
    timestamp_us: float | None = None
    collective: str | None = None
    size_bytes: int | None = None
    datatype: str | None = None
    num_ranks: int | None = None
    num_nodes: int | None = None
    kernel: str | None = None
    asks_tuner: bool | None = None
    algorithm: str | None = None
    protocol: str | None = None
    num_channels: int | None = None
    num_threads: int | None = None
    time_us: float | None = None
    exposed_us: float | None = None
    timing_source: str | None = None
    #: Columns of the surroundings: gpu, nccl_version, compute_capability.
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class RankTrace:
    """What one file gives: calls of one rank (or, of the Inspector, of one process)."""

    #: Ranks of the whole job.
    world_size: int | None = None
    #: Whether the trace marks training steps.
    has_steps: bool = False
    #: Where the file ends too early; what comes before is read.
    cut_off: CorruptFile | None = None
    calls: list[RankCall] = field(default_factory=list)
    #: Rows of `steps`, without the columns that the caller knows.
    steps: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Joined:
    """The joined calls, and counts of what could not be joined."""

    #: Of schema CALLS, one row a call.
    table: pa.Table
    #: Records of ranks that the calls are made of.
    records: int
    #: Records that a rank had made already.
    duplicates: int
    #: Why calls have no time -> calls.
    untimed: Counter[str] = field(default_factory=Counter)


def join_ranks(records: Sequence[RankCall], base: dict[str, Any]) -> Joined:
    """Make calls of the records of all ranks; `base` holds the columns that are the same for all.

    Columns that `base` has, what the caller knows, are not taken from traces.
    """
    groups, duplicates = _grouped(records)
    groups.sort(key=_begun)
    untimed: Counter[str] = Counter()
    tables = [CALLS.empty_table()]
    for begin in range(0, len(groups), _ROWS_AT_ONCE):
        rows = []
        for group in groups[begin : begin + _ROWS_AT_ONCE]:
            row = _row(group, base)
            rows.append({name: row.get(name) for name in CALLS.names})
            if row["time_us"] is None:
                untimed[_why_untimed(group, row)] += 1
        tables.append(pa.Table.from_pylist(rows, schema=CALLS))
    table = pa.concat_tables(tables).combine_chunks()
    return Joined(table, len(records) - duplicates, duplicates, untimed)


def _grouped(records: Iterable[RankCall]) -> tuple[list[list[RankCall]], int]:
    """The records of each call by rank, and how many were there twice."""
    by_key: dict[Hashable, dict[int, RankCall]] = defaultdict(dict)
    streams: dict[Hashable, dict[int, list[RankCall]]] = defaultdict(lambda: defaultdict(list))
    alone: list[list[RankCall]] = []
    duplicates = 0
    for record in records:
        if record.rank is None or (record.key is None and record.stream is None):
            alone.append([record])
        elif record.key is None:
            streams[record.source, record.stream][record.rank].append(record)
        elif record.rank in by_key[record.source, record.key]:
            duplicates += 1
        else:
            by_key[record.source, record.key][record.rank] = record
    joined = [[ranks[rank] for rank in sorted(ranks)] for ranks in by_key.values()]
    for ranks in streams.values():
        joined += _by_order(ranks)
    return [*joined, *alone], duplicates


def _by_order(ranks: dict[int, list[RankCall]]) -> list[list[RankCall]]:
    """The n-th call of each rank together, where all ranks made the same calls."""
    lines = [sorted(ranks[rank], key=lambda each: each.order) for rank in sorted(ranks)]
    kinds = {tuple((c.collective, c.datatype, c.group_sequence) for c in line) for line in lines}
    if len(kinds) > 1:
        return [[call] for line in lines for call in line]
    return [list(calls) for calls in zip(*lines, strict=True)]


def _begun(group: list[RankCall]) -> float:
    """When a call began (any rank); calls without a time stay in the order of their trace."""
    return min((c.timestamp_us for c in group if c.timestamp_us is not None), default=0.0)


def _row(group: list[RankCall], base: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {name: _first(group, name) for name in _ANY}
    for record in group:
        row.update({name: value for name, value in record.facts.items() if name not in row})
    sizes = [call.size_bytes for call in group if call.size_bytes is not None]
    times = [call.time_us for call in group if call.time_us is not None]
    begun = [call.timestamp_us for call in group if call.timestamp_us is not None]
    exposed = [call.exposed_us for call in group if call.exposed_us is not None]
    sources = {call.timing_source for call in group if call.time_us is not None}
    is_whole = row["num_ranks"] is not None and len(times) == row["num_ranks"]
    row |= {
        "source": group[0].source.value,
        "source_file": group[0].source_file,
        # Ranks send as much as they like in an all-to-all of unequal parts: the most of it.
        "size_bytes": max(sizes, default=None),
        "timestamp": moment(min(begun)) if begun else None,
        "actual_algorithm": _first(group, "algorithm"),
        "actual_protocol": _first(group, "protocol"),
        "actual_num_channels": _first(group, "num_channels"),
        # A rank's time includes waiting for the others: the least of all is the call's.
        "time_us": min(times) if is_whole else None,
        "time_at_most_us": min(times, default=None),
        "skew_us": max(times) - min(times) if is_whole else None,
        "exposed_us": min(exposed, default=None),
        "timing_source": None if not sources else GPU if sources == {GPU} else CPU,
        "ranks_seen": len(group),
        "ranks_timed": len(times),
        "ranks_agree": all(len({getattr(c, name) for c in group}) == 1 for name in _AGREED),
        **base,
    }
    ranks, nodes = row["num_ranks"], row["num_nodes"]
    if ranks and nodes and ranks % nodes == 0:
        row["ranks_per_node"] = ranks // nodes
    return row


def _first(group: list[RankCall], name: str) -> Any:
    return next((v for call in group if (v := getattr(call, name)) is not None), None)


def _why_untimed(group: list[RankCall], row: dict[str, Any]) -> str:
    if not row["ranks_timed"]:
        return "no trace has their time"
    if row["num_ranks"] is None:
        return "their number of ranks is not known"
    if all(call.key is None and call.stream is None for call in group) and row["num_ranks"] > 1:
        return "nothing says which call of the other ranks they are"
    return "the traces of other ranks are missing, or have other calls"


def moment(since_1970_us: float) -> datetime:
    """A time of a trace as a date."""
    return _EPOCH + timedelta(microseconds=round(since_1970_us))


def whole(value: object) -> int | None:
    """A JSON value if it is a non-negative integer that a column holds, else None."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return int(str(value)) if is_whole and 0 <= int(str(value)) < _MOST else None


def number(value: object) -> float | None:
    """A JSON value if it is a finite number of less than 10^18 (a moment, a time), else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < 1e18 and math.isfinite(value) else None


def text(value: object) -> str | None:
    """A JSON value if it is text that says something, else None."""
    return value if isinstance(value, str) and value not in {"", "undefined"} else None


def mapping(value: object) -> dict[str, Any]:
    """A JSON value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}
