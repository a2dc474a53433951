"""NCCL's decisions for the machines of a system file: the cost model of `default`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.default.channels import used_channels
from dynamiccl.simulator.default.communicator import Overrides
from dynamiccl.simulator.default.cost_model import CostModel
from dynamiccl.simulator.default.graph import Machine
from dynamiccl.simulator.default.machines import find_machine, read_machine
from dynamiccl.simulator.group import Cell, CostLine, Group
from dynamiccl.simulator.parameters import SystemFile
from dynamiccl.simulator.system import Call


class NcclDecisions:
    """`default.CostModel` as a parametric system asks it."""

    def __init__(self, version: NcclVersion, machine: Machine, overrides: Overrides) -> None:
        """Take the release, the machine, and what the environment sets."""
        self._version, self._machine, self._overrides = version, machine, overrides
        self._model = CostModel(version, machine, overrides)

    def cells(self, group: Group, collective: Collective) -> Sequence[tuple[Algorithm, Protocol]]:
        """(algorithm, protocol) pairs that NCCL has."""
        return self._model.cells(group, collective)

    def cost_table(self, call: Call) -> npt.NDArray[np.float32]:
        """NCCL's predicted times, us."""
        return self._model.cost_table(call)

    def lines(self, group: Group) -> Mapping[Cell, CostLine]:
        """NCCL's latency and bandwidth of each cell."""
        return self._model.lines(group)

    def max_channels(self, group: Group, algorithm: Algorithm) -> int:
        """Channels that a communicator opens."""
        return self._model.max_channels(group, algorithm)

    def num_channels(
        self, call: Call, algorithm: Algorithm, protocol: Protocol, asked: int | None
    ) -> int:
        """Number of channels that carry data."""
        comm = self._model.communicator(call.group)
        return used_channels(comm, call.collective, algorithm, protocol, call.size_bytes, asked)

    def reopened(self, *, least: int | None = None, most: int | None = None) -> "NcclDecisions":
        """With other bounds on the number of opened channels."""
        low = self._overrides.min_channels if least is None else least
        high = self._overrides.max_channels if most is None else most
        if low is not None and high is not None:
            # NCCL would let the lower bound win; the last one set is meant here.
            low, high = (min(low, high), high) if least is None else (low, max(low, high))
        overrides = replace(self._overrides, min_channels=low, max_channels=high)
        return NcclDecisions(self._version, self._machine, overrides)


def decisions_of(file: SystemFile) -> NcclDecisions:
    """NCCL's decisions for a file's `[nccl]` table. Raises UnknownName for machine or release."""
    told = file.nccl
    path = Path(told.machine)
    machine = read_machine(path) if path.suffix == ".toml" else find_machine(told.machine)
    overrides = Overrides(told.min_channels, told.max_channels)
    return NcclDecisions(file.version, machine, overrides)
