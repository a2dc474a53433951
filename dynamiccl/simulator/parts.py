"""The time of a call in parts, which interference slows differently.

    time_us = (fixed_us + max(intra_us x intra, inter_us x inter)) x host x compute

with the slowdowns of `Surroundings`, all 1 when nothing disturbs. Whoever needs many times asks for
the parts once and computes with arrays from there on (`world.py`).
"""

from dataclasses import dataclass
from typing import Final

from dynamiccl.nccl import Algorithm
from dynamiccl.nccl import Protocol as NcclProtocol


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Slowdown factors from everything but the config; 1 = none."""

    intra: float = 1.0
    inter: float = 1.0
    #: CPU threads that serve the network (proxies) or launch kernels are slow.
    host: float = 1.0
    #: Compute kernels hold SMs and memory bandwidth.
    compute: float = 1.0


QUIET: Final = Surroundings()


@dataclass(frozen=True, slots=True)
class Parts:
    """The config that runs, and its time in parts."""

    algorithm: Algorithm
    protocol: NcclProtocol
    #: Channels that really run: each takes an SM from compute.
    num_channels: int
    #: Launch, hops and synchronisation, us.
    fixed_us: float
    #: Moving the bytes over the busiest link inside a node, and between nodes (0 on one node), us.
    intra_us: float
    inter_us: float
    #: How much of a slow host's slowdown the call feels, 0..1.
    host_share: float = 0.0

    def time_us(self, around: Surroundings) -> float:
        """The time under given slowdowns, us."""
        moving = max(self.intra_us * around.intra, self.inter_us * around.inter)
        host = 1.0 + self.host_share * (around.host - 1.0)
        return (self.fixed_us + moving) * host * around.compute

    @property
    def quiet_us(self) -> float:
        """The time without interference, us."""
        return self.fixed_us + max(self.intra_us, self.inter_us)
