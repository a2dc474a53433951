"""A trial: a setting, which needs a process of its own, a size and a config."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from dynamiccl.collect.sweep.sizes import benchmark_bytes
from dynamiccl.collect.sweep.splits import Comms, Split
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET
from dynamiccl.nccl import Collective, Config

#: Kinds of interference that are real processes (disturb.py).
REAL: Final = ("cpu", "gemm", "traffic")
#: Kinds of the simulator: their level is a slowdown, not a share.
SIMULATED: Final = ("congestion",)
KINDS: Final = (QUIET, *REAL, *SIMULATED)


@dataclass(frozen=True, slots=True, order=True)
class LaunchProfile:
    """Settings that NCCL reads once per process; `environment` is sorted (name, value) pairs."""

    name: str = DEFAULT_PROFILE
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Interference:
    """The kind and level of what runs beside the collective."""

    kind: str = QUIET
    level: float = 0.0

    @property
    def word(self) -> str:
        """A short name, empty when the collective runs alone."""
        return "" if self.kind == QUIET else f"+{self.kind}{self.level:g}"


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Everything that is fixed for a process: trials of one setting can share a process."""

    collective: Collective
    num_nodes: int
    ranks_per_node: int
    datatype: str = "float"
    profile: LaunchProfile = LaunchProfile()
    interference: Interference = Interference()
    #: Hosts that it is started on; 0 = as many as NCCL counts nodes.
    num_hosts: int = 0
    #: How the processes of these are shared out to several communicators (splits.py); empty: one.
    split: str = ""
    #: Whether that leaves single processes over.
    spare: bool = False
    #: Processes of the launch; 0 = as many as the communicator has ranks.
    num_processes: int = 0

    @property
    def hosts(self) -> int:
        """Number of hosts of the job."""
        return self.num_hosts or self.num_nodes

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each host of the job, over all communicators."""
        return (self.num_processes or self.num_ranks) // self.hosts

    @property
    def comms(self) -> Comms | None:
        """The communicators that run at the same time; None for a single one."""
        if not self.split:
            return None
        shape = (self.hosts, self.ranks_per_host)
        return Split.parse(self.split).comms(*shape, spare=self.spare)

    @property
    def num_ranks(self) -> int:
        """Ranks of the communicator."""
        return self.num_nodes * self.ranks_per_node

    def benchmark_bytes(self, size_bytes: int) -> int:
        """The size that nccl-tests runs in place of `size_bytes`, and NCCL's nBytes."""
        return benchmark_bytes(self.collective, size_bytes, self.num_ranks, self.datatype)

    @property
    def key(self) -> str:
        """A stable, readable name."""
        shape = f"{self.num_nodes}x{self.ranks_per_node}"
        words = [self.collective.wire, shape]
        if self.datatype != "float":
            words.append(self.datatype)
        if self.split:
            words.append(f"{self.split.replace(' ', '')}-of-{self.hosts}x{self.ranks_per_host}")
        elif self.hosts != self.num_nodes:
            words.append(f"{self.hosts}hosts")
        if self.profile.name != DEFAULT_PROFILE:
            words.append(self.profile.name)
        return ":".join(words) + self.interference.word


@dataclass(frozen=True)
class Trial:
    """What is asked: a point of the grid (a workload and a config), and which repeat of it."""

    setting: Setting
    size_bytes: int
    config: Config
    #: Why NCCL cannot run it; None when it can.
    infeasible: str | None = None
    #: Number of the repeat within its round, from 0 on.
    repeat: int = 0
    #: P(config | task, history) of the strategy's random draw; None = it was not drawn.
    probability: float | None = None

    @property
    def task(self) -> tuple[Setting, int]:
        """The workload without the config: (setting, size in bytes)."""
        return (self.setting, self.size_bytes)

    @cached_property
    def key(self) -> str:  # asked for many times in planning
        """Stable, readable id within a sweep, the same for all repeats."""
        return f"{self.setting.key}:{self.size_bytes}:{self.config.key}"
