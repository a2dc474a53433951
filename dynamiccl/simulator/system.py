"""What a simulated system is asked, and its answer: how long a call takes, in parts.

Interference slows the parts differently:

    time_us = (fixed_us + max(intra_us x intra, inter_us x inter)) x host x compute

with the slowdowns of `Surroundings`, all 1 when nothing disturbs. Whoever needs many times asks for
the parts once and computes with arrays from there on (`world.py`).

Beside compute (docs/simulator.md) both share multiprocessors and memory until one ends and the
other goes on alone; the slowdown is that by the busy share of the SMs.
"""

from dataclasses import dataclass
from typing import Final

from dynamiccl.nccl import Algorithm, Collective, Protocol, Transport

#: DGX H100.
GPUS_PER_NODE: Final = 8

Cell = tuple[Collective, Algorithm, Protocol]


@dataclass(frozen=True, slots=True)
class Group:
    """The shape of a communicator."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the communicator."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class CostLine:
    """NCCL's prediction for one cell: time_us = latency_us + bytes / (1000 x algbw)."""

    latency_us: float
    algbw_gbytes_per_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of a communicator."""

    group: Group
    collective: Collective
    #: NCCL's nBytes: the whole buffer of all ranks for AllGather and ReduceScatter.
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings fixed at a process's start (AutoCCL's NT and T); None leaves it to NCCL."""

    num_threads: int | None = None
    transport: Transport | None = None


UNTOUCHED: Final = Launch()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Slowdown factors from everything but the config; 1 = none."""

    intra: float = 1.0
    inter: float = 1.0
    host: float = 1.0
    compute: float = 1.0


QUIET: Final = Surroundings()


@dataclass(frozen=True, slots=True)
class Parts:
    """The config that runs, and its time in parts."""

    algorithm: Algorithm
    protocol: Protocol
    num_channels: int
    fixed_us: float
    #: Moving bytes over the busiest link inside a node, and between nodes (0 on one node).
    intra_us: float
    inter_us: float
    #: How much of a slow host's slowdown the call feels, 0..1.
    host_share: float = 0.0

    def time_us(self, around: Surroundings) -> float:
        """The time under slowdowns, us."""
        moving = max(self.intra_us * around.intra, self.inter_us * around.inter)
        host = 1.0 + self.host_share * (around.host - 1.0)
        return (self.fixed_us + moving) * host * around.compute

    @property
    def quiet_us(self) -> float:
        """The time without interference, us."""
        return self.fixed_us + max(self.intra_us, self.inter_us)


@dataclass(frozen=True, slots=True)
class Contention:
    """Parameters of the mutual slowdown; all shares are 0..1."""

    num_sms: int
    #: The GPU's memory, and the share that compute takes alone.
    memory_gbytes_per_s: float
    memory_share: float
    #: A call beside compute that fills the GPU: 0.2 = a fifth longer.
    call_slowdown: float
    #: How long a call's blocks wait for their peers' beside compute.
    held_us: float = 0.0

    def surroundings(self, occupancy: float) -> Surroundings:
        """Slowdown of a call beside compute that fills `occupancy` of the GPU."""
        return Surroundings(compute=1.0 + self.call_slowdown * occupancy)

    def compute_speed(self, parts: Parts, size_bytes: int) -> float:
        """Speed of compute while the call runs, over its speed alone; above 0, at most 1."""
        free = 1.0 - min(parts.num_channels, self.num_sms - 1) / self.num_sms
        # A call reads and writes every byte at least once on each GPU.
        moved = 2.0 * size_bytes / (1000.0 * max(parts.quiet_us, 1e-9)) / self.memory_gbytes_per_s
        lacking = max(0.0, self.memory_share + min(moved, 1.0) - 1.0)
        return free * (1.0 - min(lacking, 0.9))
