"""A simulated system, as the rest of the simulator sees it: what NCCL would do, what it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import Algorithm, Collective, Config, NcclVersion, Transport
from dynamiccl.nccl import Protocol as NcclProtocol
from dynamiccl.simulator.contention import Contention
from dynamiccl.simulator.group import Cell, Group, Line
from dynamiccl.simulator.parts import Parts


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
    def contention(self) -> Contention:
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

    def lines(self, group: Group) -> Mapping[Cell, Line]:
        """Latency and bandwidth of every cell, as NCCL logs them once for each communicator."""

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
