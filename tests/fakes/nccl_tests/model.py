"""Costs and times of the stand-in, by the simulator."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import COST_IGNORE, NUM_PROTOCOLS, Algorithm, Collective, Protocol
from dynamiccl.simulator import h100
from tests.fakes.nccl_tests.point_to_point import point_to_point_us
from tests.fakes.nccl_tests.settings import Settings

#: One rank has nobody to talk to: a copy within the GPU, made up.
_ALONE_US = 3.0
_ALONE_GBYTES_PER_S = 1500.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The config of one call."""

    algorithm: Algorithm
    protocol: Protocol
    #: Channels really used, and as asked for by a plugin (None: NCCL's own number).
    num_channels: int
    asked_channels: int | None
    chunk_bytes: int | None
    #: Whether anybody but NCCL decided anything.
    requested: bool
    #: Cost of the cell as NCCL saw it; None where a plugin chose without a table.
    predicted_us: float | None

    @property
    def cell(self) -> tuple[Algorithm, Protocol]:
        """Algorithm and protocol."""
        return self.algorithm, self.protocol


class Model:
    """Costs and times for one communicator."""

    def __init__(self, num_nodes: int, num_ranks: int, settings: Settings) -> None:
        """Take the shape; the nearest group that the simulator has stands for it."""
        self.num_ranks = num_ranks
        self.group = nearest_group(num_nodes, max(num_ranks // num_nodes, 1))
        self._settings = settings

    def cells(self, collective: Collective, *, forced: bool) -> list[tuple[Algorithm, Protocol]]:
        """Cells that NCCL has here; with `forced`, those that the environment allows too."""
        held = []
        for algorithm, protocol in h100.cells(self.group, collective):
            nvls = algorithm in {Algorithm.NVLS, Algorithm.NVLSTree}
            if nvls and not (self._settings.nvls and self._settings.has_nvlink):
                continue
            if protocol is Protocol.LL128 and not self._settings.has_nvlink:
                continue
            if not forced or (algorithm, protocol) in self._settings.allowed[collective]:
                held.append((algorithm, protocol))
        return held

    def cost_table(
        self, collective: Collective, size_bytes: int, num_algorithms: int, *, forced: bool = True
    ) -> npt.NDArray[np.float32]:
        """What NCCL hands to a tuner: predicted us, -1 where a cell is not available."""
        table = np.full((num_algorithms, NUM_PROTOCOLS), COST_IGNORE, dtype=np.float32)
        for cell in self.cells(collective, forced=forced):
            table[cell] = h100.predicted_us(self.group, collective, *cell, size_bytes)
        return table

    def time_us(self, collective: Collective, size_bytes: int, choice: Choice | None) -> float:
        """Noise-free time of one call; `choice` is None where NCCL makes none."""
        if self.num_ranks == 1:
            return _ALONE_US + size_bytes / (1000.0 * _ALONE_GBYTES_PER_S)
        factor = self._settings.transport_factor(self.group.num_nodes)
        if choice is None:
            return point_to_point_us(self.group, collective, size_bytes) * factor
        time_us = h100.true_us(
            self.group,
            collective,
            *choice.cell,
            size_bytes,
            num_channels=choice.num_channels,
            chunk_bytes=choice.chunk_bytes,
            max_channels=choice.num_channels,
        )
        return time_us * factor * self._settings.detail_factor(choice.protocol)


def nearest_group(num_nodes: int, ranks_per_node: int) -> h100.Group:
    """The group of the simulator that is most like a shape, nodes before ranks.

    >>> nearest_group(3, 2)
    Group(num_nodes=4, ranks_per_node=2)
    """

    def distance(group: h100.Group) -> tuple[bool, float, float]:
        return (
            (group.num_nodes == 1) != (num_nodes == 1),
            abs(math.log2(group.num_nodes / num_nodes)),
            abs(math.log2(group.ranks_per_node / ranks_per_node)),
        )

    return min(h100.groups(), key=distance)
