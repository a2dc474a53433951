"""Search tasks of simulated systems: choices and their true times.

A task is (system, group, collective, size). What may run is every (algorithm, protocol) of the
system with the channels, threads, chunk sizes and transports below. Combinations that come to the
same thing are one: this spares coordinate descent probes that could tell it nothing, and plateaus
to get stuck on.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import ABSTAIN, Collective, Config, Transport
from dynamiccl.serve.search.autoccl import DEFAULT, Choice, SearchSpace
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call, Launch
from dynamiccl.simulator.systems import System

CHANNELS: Final = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CHUNKS: Final = (None, *(1 << k for k in range(15, 23)))
THREADS: Final = (None, 128, 256, 384, 512)
TRANSPORTS: Final = (None, Transport.SHM)
COLLECTIVES: Final = (Collective.AllReduce, Collective.AllGather, Collective.ReduceScatter)
SIZES: Final = tuple(1 << k for k in range(16, 31, 2))
#: A fact that is not known.
_UNKNOWN: Final = -1.0
#: Transport, threads, channels, chunk bytes.
_Place = tuple[Transport | None, int | None, int, int | None]


@dataclass(frozen=True)
class Task:
    """One task key with true times."""

    system: str
    call: Call
    #: What tells systems apart, as a policy sees it.
    facts: dict[str, float]
    space: SearchSpace
    #: (A,) true times, us.
    times_us: npt.NDArray[np.float64]

    @property
    def name(self) -> str:
        """The task's name."""
        group = self.call.group
        return (
            f"{self.system} {group.num_nodes}x{group.ranks_per_node} "
            f"{self.call.collective.wire} {self.call.size_bytes}"
        )

    @cached_property
    def log_ratio(self) -> npt.NDArray[np.float64]:
        """(A,) log(time / NCCL's own choice)."""
        found: npt.NDArray[np.float64] = np.log(self.times_us / self.times_us[self.space.default])
        return found

    @cached_property
    def headroom(self) -> float:
        """Time of NCCL's own choice / best time - 1."""
        return float(self.times_us[self.space.default] / self.times_us.min() - 1.0)


def tasks_of(system: System, groups: Sequence[Group]) -> list[Task]:
    """Every task of a system's groups."""
    known = [c for c in COLLECTIVES if c in system.collectives()]
    calls = [Call(g, c, s) for g, c, s in product(groups, known, SIZES)]
    return [task for call in calls if (task := make_task(system, call)) is not None]


def make_task(system: System, call: Call) -> Task | None:
    """The task of a call; None where there is nothing to choose from."""
    found: dict[Choice, float] = {DEFAULT: system.parts(call, ABSTAIN).quiet_us}
    for algorithm, protocol in system.cells(call.group, call.collective):
        found |= _subspace(system, call, Config(algorithm, protocol))
    if len(found) < 3:
        return None
    ran = Choice(system.resolve(call, ABSTAIN))
    space = SearchSpace(list(found), default_runs=ran)
    return Task(system.name, call, _facts(system, call), space, np.array(list(found.values())))


def running(task: Task) -> Task:
    """The choices that a running job can make: threads and transport are fixed at start."""
    kept = [
        action
        for action, choice in enumerate(task.space.choices)
        if choice.num_threads is None and choice.transport is None
    ]
    choices = [task.space.choices[action] for action in kept]
    space = SearchSpace(choices, default_runs=task.space.default_runs)
    return replace(task, space=space, times_us=task.times_us[kept])


def _subspace(system: System, call: Call, cell: Config) -> dict[Choice, float]:
    times: dict[_Place, float] = {}
    assert cell.algorithm is not None
    opened = system.max_channels(call.group, cell.algorithm)
    counts = [count for count in CHANNELS if count <= opened]
    launches = (TRANSPORTS, THREADS) if _feels_launch(system, call, cell) else ((None,), (None,))
    for transport, threads, count, chunk in product(*launches, counts, CHUNKS):
        asked = Config(cell.algorithm, cell.protocol, count, chunk)
        ran = system.resolve(call, asked).num_channels
        if ran == count:  # more than are filled is the same again
            parts = system.parts(call, asked, Launch(threads, transport))
            times[transport, threads, count, chunk] = parts.quiet_us
    for axis in (0, 1, 3):
        times = _without_repeats(times, axis)
    return {
        Choice(Config(cell.algorithm, cell.protocol, count, chunk), threads, transport): time_us
        for (transport, threads, count, chunk), time_us in times.items()
    }


def _feels_launch(system: System, call: Call, cell: Config) -> bool:
    launches = [Launch(n, t) for t, n in product(TRANSPORTS, THREADS)]
    return len({system.parts(call, cell, launch).quiet_us for launch in launches}) > 1


def _without_repeats(times: dict[_Place, float], axis: int) -> dict[_Place, float]:
    """Drop values of a knob that equal NCCL's own value."""
    kept = {}
    for place, time_us in times.items():
        alone = times[(*place[:axis], None, *place[axis + 1 :])]  # type: ignore[index]
        if place[axis] is None or not math.isclose(time_us, alone, rel_tol=1e-9):
            kept[place] = time_us
    return kept


def _facts(system: System, call: Call) -> dict[str, float]:
    facts = system.environment
    numbers = ("compute_capability", "nvlink_generation", "nvlinks_per_gpu", "nic_gbits_per_s",
               "nics_per_node")  # fmt: skip
    kinds = {"infiniband": 2.0, "roce": 1.0, "socket": 0.0}
    found = {name: float(facts.get(name) or _UNKNOWN) for name in numbers}
    return found | {
        "nvswitch": float(bool(facts.get("nvswitch"))),
        "nic_kind": kinds.get(str(facts.get("nic_kind")), _UNKNOWN),
        "num_nodes": float(call.group.num_nodes),
        "ranks_per_node": float(call.group.ranks_per_node),
        "log2_size": math.log2(call.size_bytes),
        "log2_size_per_rank": math.log2(call.size_bytes / call.group.num_ranks),
        "collective": float(call.collective),
    }


def chosen_groups(system: System) -> list[Group]:
    """At most four shapes with as many ranks a node as there are, spread over the node counts."""
    known = list(system.groups())
    most = max(group.ranks_per_node for group in known)
    full = [group for group in known if group.ranks_per_node == most and group.num_ranks > 1]
    picks = np.unique(np.linspace(0, len(full) - 1, 4).round().astype(int))
    return [full[pick] for pick in picks]


def by_system(systems: Sequence[System]) -> Iterator[tuple[str, list[Task]]]:
    """The tasks of each system."""
    for system in systems:
        yield system.name, tasks_of(system, chosen_groups(system))
