"""From rows of a data set to how much longer each communicator took than its like."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.collect.nccl_tests.hosts import expand_hosts
from dynamiccl.collect.sweep.splits import Split
from dynamiccl.datasets.schema import Status

#: A rank by its host and its number on it.
Place = tuple[str, int]
#: So many alike communicators are a reference of their own; fewer are compared with all.
_ENOUGH: Final = 4
#: What tells two launches apart that measured the same communicators.
_LAUNCH: Final = ("system", "sweep", "launch")


@dataclass(frozen=True, slots=True)
class Reading:
    """One communicator, over all that was measured of it."""

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
    """All communicators of a data set, and by how much GPUs of one number lag on all hosts."""

    comms: tuple[Reading, ...]
    #: (numbers of the GPUs, whether between nodes) -> log(time / middle of all numbers).
    alike: Mapping[tuple[tuple[int, ...], bool], float]


def lower_median(values: npt.NDArray[np.float64]) -> float:
    """The middle value, of two middle ones the lower: what is slow by chance is never fast.

    >>> lower_median(np.array([1.0, 9.0])), lower_median(np.array([3.0, 1.0, 2.0]))
    (1.0, 2.0)
    """
    return float(np.sort(values)[(len(values) - 1) // 2])


def robust_sigma(values: npt.NDArray[np.float64]) -> float:
    """The median distance from the median, as the sigma of a normal distribution that has it."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def readings(frame: pl.DataFrame) -> Readings:
    """Read the rows of split launches that have times of single processes; none is fine."""
    rows = frame.filter(
        (pl.col("status") == Status.OK.value)
        & pl.col("comm_split").is_not_null()
        & pl.col("process_times_us").is_not_null()
        & pl.col("num_hosts").is_not_null()
    )
    per_launch: dict[tuple[Place, ...], list[npt.NDArray[np.float64]]] = defaultdict(list)
    alike: dict[tuple[tuple[int, ...], bool], list[float]] = defaultdict(list)
    for _, launch in rows.group_by(_LAUNCH, maintain_order=True):
        for members, found in _launch(launch, alike).items():
            per_launch[members].append(found)
    comms = [_reading(members, found) for members, found in sorted(per_launch.items())]
    return Readings(tuple(comms), {key: float(np.median(v)) for key, v in alike.items()})


def _reading(members: tuple[Place, ...], found: Sequence[npt.NDArray[np.float64]]) -> Reading:
    return Reading(
        members,
        # A path through the network that one launch happened on is not the hardware's.
        excess=min(map(lower_median, found)),
        spread=float(np.median([robust_sigma(excess) for excess in found])),
        rows=sum(map(len, found)),
        launches=len(found),
    )


def _launch(
    launch: pl.DataFrame, alike: dict[tuple[tuple[int, ...], bool], list[float]]
) -> dict[tuple[Place, ...], npt.NDArray[np.float64]]:
    """Members -> (rows,) log of the time over the class's, of one launch."""
    first = launch.row(0, named=True)
    processes = len(first["process_times_us"])
    members, places = _members(first, processes)
    usable = launch.filter(pl.col("process_times_us").list.len() == processes)
    times = np.array(usable["process_times_us"].to_list(), dtype=np.float64)  # (rows, processes)
    # Both ends of a call count alike; a rank of no communicator is never asked for.
    logs = np.log(np.stack([times[:, each].mean(axis=1) for each in members], axis=1))
    excess = _over_class(logs, places, alike)
    return {each: excess[:, index] for index, each in enumerate(places)}


def _members(
    row: Mapping[str, Any], processes: int
) -> tuple[list[list[int]], list[tuple[Place, ...]]]:
    """The communicators of a launch: their processes, and where these ran."""
    hosts = row["num_hosts"]
    comms = Split.parse(row["comm_split"]).comms(hosts, processes // hosts, spare=True)
    named = row["hosts"] or ",".join(f"node{host}" for host in range(hosts))
    where = place_names(named, processes)
    return [[*each] for each in comms.members], [
        tuple(where[process] for process in each) for each in comms.members
    ]


def place_names(hosts: str, processes: int) -> list[Place]:
    """Where each process ran: on these hosts, node by node."""
    names = expand_hosts(hosts)
    per_host = max(processes // len(names), 1)
    return [(names[min(p // per_host, len(names) - 1)], p % per_host) for p in range(processes)]


def _classes(places: Sequence[tuple[Place, ...]]) -> list[list[int]]:
    """Communicators that are alike: of GPUs of the same numbers where these are enough, else all.

    So NICs are compared with those on the same rail, and GPUs with those in the same slots.
    """
    by_number: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, each in enumerate(places):
        by_number[tuple(sorted({number for _, number in each}))].append(index)
    if min(map(len, by_number.values())) >= _ENOUGH:
        return [*by_number.values()]
    return [[*range(len(places))]]


def _over_class(
    logs: npt.NDArray[np.float64],
    places: Sequence[tuple[Place, ...]],
    alike: dict[tuple[tuple[int, ...], bool], list[float]],
) -> npt.NDArray[np.float64]:
    """(rows, communicators) over the lower median of each class; notes what classes differ by."""
    excess = np.empty_like(logs)
    bases = []
    classes = _classes(places)
    for members in classes:
        row_bases = np.sort(logs[:, members], axis=1)[:, (len(members) - 1) // 2]
        excess[:, members] = logs[:, members] - row_bases[:, None]
        bases.append(float(np.median(row_bases)))
    if len(classes) > 1:
        middle = float(np.median(bases))
        for members, base in zip(classes, bases, strict=True):
            first = members[0]
            numbers = tuple(sorted({number for _, number in places[first]}))
            between = len({host for host, _ in places[first]}) > 1
            alike[numbers, between].append(base - middle)
    return excess
