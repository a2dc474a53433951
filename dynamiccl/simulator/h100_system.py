"""H100 nodes on InfiniBand as a simulated system: assembled from published figures, not fitted."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator import h100
from dynamiccl.simulator.contention import Contention
from dynamiccl.simulator.group import Cell, CostLine, Group
from dynamiccl.simulator.parts import Parts
from dynamiccl.simulator.system import UNTOUCHED, Call, Launch
from dynamiccl.simulator.tables import default_model

#: Bus bandwidth of a ring or tree inside an NVSwitch node (default/).
_INTRA_BUS_GBYTES_PER_S: Final = 360.0
#: NVIDIA H100 SXM5 (data sheet): 132 streaming multiprocessors.
_NUM_SMS: Final = 132
#: The same: 3.35 TB/s of HBM3.
_MEMORY_GBYTES_PER_S: Final = 3350.0


class H100System:
    """The tables of h100.py as a `System`. Launch settings change nothing."""

    name = "h100-ib"
    nccl_version: NcclVersion = h100.NCCL_VERSION
    num_sms = _NUM_SMS

    @property
    def environment(self) -> Mapping[str, Any]:
        """Environment columns of the machines."""
        return h100.ENVIRONMENT

    @property
    def contention(self) -> Contention:
        """What calls and compute do to each other: the GPU's data sheet, and A100's priors."""
        return Contention(_NUM_SMS, _MEMORY_GBYTES_PER_S, 0.35, 0.2, held_us=2400.0)

    def groups(self) -> Sequence[Group]:
        """Shapes that the tables hold."""
        return h100.groups()

    def collectives(self) -> Sequence[Collective]:
        """Collectives that the tables hold."""
        return h100.collectives()

    def cells(self, group: Group, collective: Collective) -> Sequence[tuple[Algorithm, Protocol]]:
        """Pairs that NCCL has."""
        return h100.cells(group, collective)

    def cost_table(self, call: Call) -> npt.NDArray[np.float32]:
        """NCCL's own predictions."""
        return default_model().cost_table(call)

    def lines(self, group: Group) -> Mapping[Cell, CostLine]:
        """NCCL's latencies and bandwidths."""
        return default_model().lines(group)

    def max_channels(self, group: Group, algorithm: Algorithm) -> int:
        """Channels that a communicator opens."""
        return default_model().max_channels(group, algorithm)

    def resolve(self, call: Call, config: Config) -> Config:
        """The config that runs."""
        return default_model().resolve(call, config)

    def parts(self, call: Call, config: Config, launch: Launch = UNTOUCHED) -> Parts:  # noqa: ARG002
        """The tables' line: its latency is fixed, the rest moves bytes over the slowest link."""
        ran = self.resolve(call, config)
        assert ran.algorithm is not None
        assert ran.protocol is not None
        assert ran.num_channels is not None
        cell = (call.group, call.collective, ran.algorithm, ran.protocol, call.size_bytes)

        def time_us(congestion: float) -> float:
            return h100.true_us(
                *cell,
                congestion=congestion,
                num_channels=config.num_channels,
                chunk_bytes=config.chunk_bytes,
            )

        quiet_us = time_us(0.0)
        # Congestion stretches what moves bytes, and nothing else: so the two come apart.
        moving_us = time_us(1.0) - quiet_us
        several = call.group.num_nodes > 1
        bus_bytes = call.size_bytes * call.collective.bus_factor(call.group.num_ranks)
        inside_us = min(bus_bytes / (1000.0 * _INTRA_BUS_GBYTES_PER_S), moving_us)
        return Parts(
            algorithm=ran.algorithm,
            protocol=ran.protocol,
            num_channels=ran.num_channels,
            fixed_us=quiet_us - moving_us,
            intra_us=inside_us if several else moving_us,
            inter_us=moving_us if several else 0.0,
        )
