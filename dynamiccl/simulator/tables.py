"""Tables of H100 nodes: NCCL's cost model of them, and measured figures."""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Final

from dynamiccl.nccl import NcclVersion
from dynamiccl.simulator.default import CostModel, Overrides, find_machine
from dynamiccl.simulator.group import GPUS_PER_NODE, Cell, CostLine, Group

#: The release of the published corrections, and so of the default.
NCCL_VERSION: Final = NcclVersion(2, 27, 5)


def read_csv(name: str) -> list[dict[str, str]]:
    """Rows of a CSV file beside this module."""
    text = resources.files("dynamiccl.simulator").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def groups() -> Sequence[Group]:
    """One node of two GPUs up to all, and the shapes of several nodes that were measured."""
    one_node = [Group(1, ranks) for ranks in range(2, GPUS_PER_NODE + 1)]
    return [*one_node, *(Group(n, r) for n in (2, 4, 8, 16, 32) for r in (1, 2, 4, 8))]


@cache
def default_model(num_channels: int | None = None) -> CostModel:
    """What NCCL decides on these nodes; `num_channels` is what a communicator was made with."""
    made = Overrides(min_channels=num_channels, max_channels=num_channels)
    return CostModel(NCCL_VERSION, find_machine("h100-ib"), made)


@cache
def lines() -> Mapping[Group, Mapping[Cell, CostLine]]:
    """NCCL's lines by group, before corrections by size."""
    return {group: default_model().lines(group) for group in groups()}
