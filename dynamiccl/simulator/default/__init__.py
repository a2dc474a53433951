"""NCCL's own cost model for any group, from a description of the machine and an NCCL release.

    from dynamiccl.simulator.default import CostModel, find_machine
    from dynamiccl.simulator.group import Group
    from dynamiccl.simulator.system import Call
    from dynamiccl.nccl import ABSTAIN, Collective, NcclVersion

    model = CostModel(NcclVersion(2, 29, 7), find_machine("b300"))
    call = Call(Group(1, 8), Collective.AllReduce, 64 << 20)
    model.resolve(call, ABSTAIN)        # Config(NVLS, Simple, 24 channels): what NCCL would do
    model.cost_table(call)              # (7, 3) float32 us, -1 = lacking: what a tuner is handed
    model.cells(call.group, call.collective), model.max_channels(call.group, Algorithm.Ring)

Simulated systems are cost models, too. Machines are TOML files (`machines/`, `machine_names`,
`read_machine`). The model assumes one collective to a group call, unregistered buffers, sums of a
type that NVLS can add, GPUs of one kind, equally many ranks on every node, and CollNet off.
"""

from dynamiccl.simulator.default.cost_model import CostModel, Overrides
from dynamiccl.simulator.default.machine import (
    Basis,
    Cpu,
    Graph,
    Machine,
    Path,
    Pattern,
    Search,
    find_machine,
    machine_names,
    parse_machine,
    read_machine,
)

__all__ = [
    "Basis",
    "CostModel",
    "Cpu",
    "Graph",
    "Machine",
    "Overrides",
    "Path",
    "Pattern",
    "Search",
    "find_machine",
    "machine_names",
    "parse_machine",
    "read_machine",
]
