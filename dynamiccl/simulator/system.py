"""A simulated system, as the rest of the simulator sees it: what NCCL would do, and what it takes.

The quiet, noise-free time of a call comes in parts, since surroundings slow them apart:

    time_us = (fixed_us + max(intra_us x intra, inter_us x inter)) x host x compute

with the slowdowns of `Surroundings`, all 1 when nothing disturbs. Whoever needs many times asks for
the parts once and computes with arrays from there on (`world.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import Algorithm, Collective, Config, NcclVersion, Transport
from dynamiccl.nccl import Protocol as NcclProtocol
from dynamiccl.simulator.group import Group

if TYPE_CHECKING:
    from dynamiccl.simulator.contention import Contention


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of a communicator."""

    group: Group
    collective: Collective
    #: NCCL's nBytes: the whole buffer of all ranks for AllGather and ReduceScatter.
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """What is fixed when a process starts, AutoCCL's NT and T; None leaves it to NCCL."""

    num_threads: int | None = None
    transport: Transport | None = None


#: Nothing set at launch.
UNTOUCHED: Final = Launch()


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs, and its time in parts."""

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

    def time_us(self, around: "Surroundings") -> float:
        """The time under given surroundings."""
        moving = max(self.intra_us * around.intra, self.inter_us * around.inter)
        host = 1.0 + self.host_share * (around.host - 1.0)
        return (self.fixed_us + moving) * host * around.compute

    @property
    def quiet_us(self) -> float:
        """The time when nothing disturbs."""
        return self.fixed_us + max(self.intra_us, self.inter_us)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Slowdowns by everything but the config; 1 = none."""

    intra: float = 1.0
    inter: float = 1.0
    #: CPU threads that serve the network (proxies) or launch kernels are slow.
    host: float = 1.0
    #: Compute kernels hold SMs and memory bandwidth.
    compute: float = 1.0


QUIET: Final = Surroundings()


class System(Protocol):
    """NCCL on some machines, with what is known of its times."""

    @property
    def name(self) -> str:
        """As in the `system` column."""

    @property
    def environment(self) -> Mapping[str, Any]:
        """Facts of the machines, as measurement columns."""

    @property
    def nccl_version(self) -> NcclVersion:
        """The release whose cost model decides."""

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors of a GPU."""

    @property
    def contention(self) -> "Contention":
        """What a call and compute on the same GPU do to each other."""

    def groups(self) -> Sequence[Group]:
        """Shapes of communicators that are known, smallest first."""

    def collectives(self) -> Sequence[Collective]:
        """Collectives that are known."""

    def cells(
        self, group: Group, collective: Collective
    ) -> Sequence[tuple[Algorithm, NcclProtocol]]:
        """The (algorithm, protocol) pairs that NCCL has, in the order of its cost table."""

    def cost_table(self, call: Call) -> npt.NDArray[np.float32]:
        """What NCCL hands to a tuner: (7 algorithms, 3 protocols) in us, -1 = not available."""

    def max_channels(self, group: Group, algorithm: Algorithm) -> int:
        """Channels that a communicator opens for an algorithm."""

    def resolve(self, call: Call, config: Config) -> Config:
        """What runs when `config` is asked for: no knob is AUTO but the chunk.

        ABSTAIN is NCCL's own choice; an AUTO algorithm or protocol is the cheapest by NCCL's own
        cost model among those that are left open; channels are clamped as NCCL does. Raises
        KeyError for a cell that NCCL does not have.
        """

    def parts(self, call: Call, config: Config, launch: Launch = UNTOUCHED) -> Parts:
        """What the call takes under `config`; raises KeyError for a cell that NCCL lacks."""
