"""Keys and values of the simulator's tables: groups, cells, and NCCL's latency-bandwidth lines."""

from dataclasses import dataclass
from typing import Final

from dynamiccl.nccl import Algorithm, Collective, Protocol

#: GPUs in one node (DGX H100).
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
