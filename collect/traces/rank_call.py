"""One rank's record of a call, in any trace format; None is what the trace does not tell."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from dynamiccl.datasets.call_columns import CallSource
from dynamiccl.errors import CorruptFile

#: Timing sources of the column `timing_source`.
GPU: Final = "gpu"
CPU: Final = "cpu"


@dataclass(slots=True, kw_only=True)
class RankCall:
    """One rank's record of a call; the names are those of the columns of `calls`."""

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
    root: int | None = None
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
    #: Of the process that called: a number of our own.
    thread: int | None = None
    #: Columns of the surroundings: gpu, nccl_version, compute_capability.
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class RankTrace:
    """What one file gives: calls of one rank (or, of the Inspector, of one process)."""

    rank: int | None = None
    #: Ranks of the whole job.
    world_size: int | None = None
    #: The process's number on its host.
    process: int | None = None
    #: Whether the trace marks training steps.
    has_steps: bool = False
    #: Where the file ends too early; what comes before is read.
    cut_off: CorruptFile | None = None
    calls: list[RankCall] = field(default_factory=list)
    #: Rows of `steps`, without the columns that the caller knows.
    steps: list[dict[str, Any]] = field(default_factory=list)
