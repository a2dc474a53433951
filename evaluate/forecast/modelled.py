"""Gains of each config over NCCL's own choice on a simulated system."""

from collections.abc import Sequence

import numpy as np

from dynamiccl.evaluate.forecast.gains import Gains, unplaced
from dynamiccl.evaluate.forecast.job import Kind
from dynamiccl.nccl import ABSTAIN, Collective, Config
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call, System


class Modelled:
    """Quiet times of a simulated system."""

    def __init__(self, system: System, configs: Sequence[Config] = ()) -> None:
        """Take a system; beside its own algorithms and protocols, it is asked for `configs`."""
        self.system = system.name
        self.nccl_version = str(system.nccl_version)
        self._system, self._configs = system, tuple(configs)

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        """(nodes, ranks a node) of the system."""
        return [(group.num_nodes, group.ranks_per_node) for group in self._system.groups()]

    def gains(self, kind: Kind) -> Gains | str:
        """The gains of a kind of calls, or why there are none."""
        if kind.num_nodes is None or kind.num_ranks is None:
            return unplaced(kind, self.shapes)
        group = Group(kind.num_nodes, kind.num_ranks // kind.num_nodes)
        collective = Collective.parse(kind.collective)
        if group not in self._system.groups() or collective not in self._system.collectives():
            shape = f"{group.num_nodes} x {group.ranks_per_node}"
            return f"the model has no {kind.collective} on {shape}"
        call = Call(group, collective, kind.size_bytes)
        cells = [Config(*cell) for cell in self._system.cells(group, collective)]
        configs = tuple(dict.fromkeys((ABSTAIN, *cells, *self._configs)))
        times = np.array([self._quiet_us(call, config) for config in configs])
        logs = (np.log(times[0]) - np.log(times))[:, None]
        return Gains(
            configs, logs, (), np.zeros(len(configs)), float(times[0]), (kind.size_bytes,), 0.0
        )

    def _quiet_us(self, call: Call, config: Config) -> float:
        try:
            return self._system.parts(call, config).quiet_us
        except KeyError:
            return float("nan")
