"""The interface of a simulated system: what NCCL runs, and how long it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from dynamiccl.nccl import Algorithm, Collective, Config, NcclVersion, Transport
from dynamiccl.nccl import Protocol as NcclProtocol
from dynamiccl.simulator.contention import Contention
from dynamiccl.simulator.group import Cell, CostLine, Group
from dynamiccl.simulator.parts import Parts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of a communicator."""

    group: Group
    collective: Collective
    #: NCCL's nBytes: the whole buffer of all ranks for AllGather and ReduceScatter.
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings fixed when a process starts (AutoCCL's NT and T); None leaves it to NCCL."""

    num_threads: int | None = None
    transport: Transport | None = None


#: Nothing set at launch.
UNTOUCHED: Final = Launch()


class System(Protocol):
    """NCCL on some machines, with what is known of its times."""

    @property
    def name(self) -> str:
        """Value of the `system` column."""

    @property
    def environment(self) -> Mapping[str, Any]:
        """Environment columns of the machines."""

    @property
    def nccl_version(self) -> NcclVersion:
        """The release whose cost model decides."""

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors of a GPU."""

    @property
    def contention(self) -> Contention:
        """Mutual slowdown of a call and compute on the same GPU."""

    def groups(self) -> Sequence[Group]:
        """Known communicator shapes, smallest first."""

    def collectives(self) -> Sequence[Collective]:
        """Known collectives."""

    def cells(
        self, group: Group, collective: Collective
    ) -> Sequence[tuple[Algorithm, NcclProtocol]]:
        """The (algorithm, protocol) pairs that NCCL has, in the order of its cost table."""

    def cost_table(self, call: Call) -> "npt.NDArray[np.float32]":
        """The table passed to a tuner: (7 algorithms, 3 protocols) us, -1 = unavailable."""

    def lines(self, group: Group) -> Mapping[Cell, CostLine]:
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
        """The time of a call under `config`, in parts; raises KeyError for a missing cell."""
