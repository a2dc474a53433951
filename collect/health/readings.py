"""From rows of a data set to how much longer each communicator took than its peers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.collect.nccl_log import expand_hosts
from dynamiccl.collect.strategies.samples import MAD_TO_SIGMA
from dynamiccl.collect.sweep.splits import Split
from dynamiccl.datasets.schema import Status

#: A rank by its host and its number on it.
Place = tuple[str, int]
_Float64Array = npt.NDArray[np.float64]
#: So many alike communicators are a reference of their own; fewer are compared with all.
_ENOUGH: Final = 4
#: What tells two launches apart that measured the same communicators.
_LAUNCH: Final = ("system", "sweep", "launch")


@dataclass(frozen=True, slots=True)
class Reading:
    """One communicator, over all of its measurements."""

    members: tuple[Place, ...]
    #: log(time / what its like took): 0 = as fast, above = slower. The least of its launches.
    excess: float
    #: A robust sigma of the rows of one launch.
    spread: float
    rows: int
    launches: int

    @property
    def between_nodes(self) -> bool:
        """Whether it spans several hosts."""
        return len({host for host, _ in self.members}) > 1


@dataclass(frozen=True, slots=True)
class Readings:
    """All communicators of a data set, and the GPU numbers that lag on all hosts."""

    comms: tuple[Reading, ...]
    #: (numbers of the GPUs, whether between nodes) -> log(time / middle of all numbers).
    alike: Mapping[tuple[tuple[int, ...], bool], float]


def lower_median(values: _Float64Array) -> float:
    """The median; of two middle values the lower one.

    >>> lower_median(np.array([1.0, 9.0])), lower_median(np.array([3.0, 1.0, 2.0]))
    (1.0, 2.0)
    """
    return float(np.sort(values)[(len(values) - 1) // 2])


def robust_sigma(values: _Float64Array) -> float:
    """Sigma of a normal distribution with this median absolute deviation."""
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def readings(frame: pl.DataFrame) -> Readings:
    """Read the rows of split launches that have per-process times; there may be none."""
    rows = frame.filter(
        (pl.col("status") == Status.OK.value)
        & pl.col("comm_split").is_not_null()
        & pl.col("process_times_us").is_not_null()
        & pl.col("num_hosts").is_not_null()
    )
    launches = [_launched(launch) for _, launch in rows.group_by(_LAUNCH, maintain_order=True)]
    per_comm: dict[tuple[Place, ...], list[_Float64Array]] = defaultdict(list)
    alike: dict[tuple[tuple[int, ...], bool], list[float]] = defaultdict(list)
    for launch in launches:
        excess = launch.logs - launch.bases(_reference(launch, launches))
        for index, members in enumerate(launch.places):
            per_comm[members].append(excess[:, index])
        for key, lag in launch.lags():
            alike[key].append(lag)
    comms = [_reading(members, found) for members, found in sorted(per_comm.items())]
    return Readings(tuple(comms), {key: float(np.median(v)) for key, v in alike.items()})


@dataclass(frozen=True, slots=True)
class _Launched:
    """The rows of one launch."""

    #: What makes its times comparable with those of another launch.
    like: tuple[object, ...]
    places: list[tuple[Place, ...]]
    #: (rows, communicators) log of us.
    logs: _Float64Array
    classes: list[list[int]]

    @property
    def spans(self) -> list[frozenset[str]]:
        """The hosts of each communicator."""
        return [frozenset(host for host, _ in members) for members in self.places]

    @property
    def is_lonely(self) -> bool:
        """Whether all communicators span the same two nodes: no peers to compare."""
        (first, *others) = {*self.spans}
        return not others and len(first) > 1

    def bases(self, reference: float) -> _Float64Array:
        """(rows, communicators) time of the peers of each; at most `reference`."""
        bases = np.empty_like(self.logs)
        for members in self.classes:
            middle = np.sort(self.logs[:, members], axis=1)[:, (len(members) - 1) // 2]
            bases[:, members] = np.minimum(middle, reference)[:, None]
        return bases

    def lags(self) -> list[tuple[tuple[tuple[int, ...], bool], float]]:
        """Each class of communicators and how much slower it is than the median of all."""
        if len(self.classes) < 2:
            return []
        bases = np.median(self.bases(np.inf), axis=0)
        middle = float(np.median([bases[members[0]] for members in self.classes]))
        found = []
        for first, *_ in self.classes:
            numbers = tuple(sorted({number for _, number in self.places[first]}))
            found.append(((numbers, len(self.spans[first]) > 1), float(bases[first]) - middle))
        return found


def _reference(launch: _Launched, launches: Sequence[_Launched]) -> float:
    """The time of launches between other nodes, for a launch without peers of its own."""
    if not launch.is_lonely:
        return np.inf
    like = [
        other
        for other in launches
        if other.like == launch.like and other.spans[0] != launch.spans[0]
    ]
    between = [other for other in like if len(other.spans[0]) > 1]
    others = [other for other in between if not other.is_lonely] or between
    return (
        float(np.median([np.median(each.bases(np.inf)) for each in others])) if others else np.inf
    )


def _reading(members: tuple[Place, ...], found: Sequence[_Float64Array]) -> Reading:
    return Reading(
        members,
        # A path through the network that one launch happened on is not the hardware's.
        excess=min(map(lower_median, found)),
        spread=float(np.median([robust_sigma(excess) for excess in found])),
        rows=sum(map(len, found)),
        launches=len(found),
    )


def _launched(launch: pl.DataFrame) -> _Launched:
    first = launch.row(0, named=True)
    processes = len(first["process_times_us"])
    members, places = _members(first, processes)
    usable = launch.filter(pl.col("process_times_us").list.len() == processes)
    times = np.array(usable["process_times_us"].to_list(), dtype=np.float64)  # (rows, processes)
    # Both ends of a call count alike; a rank of no communicator is never asked for.
    logs = np.log(np.stack([times[:, each].mean(axis=1) for each in members], axis=1))
    sizes = tuple(usable["size_bytes"].unique().sort())
    like = (first["system"], first["collective"], sizes, first["num_nodes"], first["num_ranks"])
    return _Launched(like, places, logs, _classes(places))


def _members(
    row: Mapping[str, Any], processes: int
) -> tuple[list[list[int]], list[tuple[Place, ...]]]:
    """The communicators of a launch: their processes, and where these ran."""
    hosts = row["num_hosts"]
    comms = Split.parse(row["comm_split"]).comms(hosts, processes // hosts, spare=True)
    known = row["hosts"] if row["hosts"] and len(expand_hosts(row["hosts"])) == hosts else None
    where = place_names(known or ",".join(f"node{host}" for host in range(hosts)), processes)
    return [[*each] for each in comms.members], [
        tuple(where[process] for process in each) for each in comms.members
    ]


def place_names(hosts: str, processes: int) -> list[Place]:
    """The place of each process, node by node, on these hosts."""
    names = expand_hosts(hosts)
    per_host = max(processes // len(names), 1)
    return [(names[min(p // per_host, len(names) - 1)], p % per_host) for p in range(processes)]


def _classes(places: Sequence[tuple[Place, ...]]) -> list[list[int]]:
    """Indices of communicators to compare: same GPU numbers where there are enough, else all.

    So NICs are compared with those on the same rail, and GPUs with those in the same slots.
    """
    by_number: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, each in enumerate(places):
        by_number[tuple(sorted({number for _, number in each}))].append(index)
    if min(map(len, by_number.values())) >= _ENOUGH:
        return [*by_number.values()]
    return [[*range(len(places))]]
