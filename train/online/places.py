"""Where an actor plays: `SYSTEM:WORKLOADS:SCENARIO`, and optionally the group shape.

b300-nvlink:decode+lora:busy-host            the largest group of the system
h100-ib:decode:congested:4x8                 4 nodes of 8 ranks
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import polars as pl

from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.errors import UserError
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.record_jobs import check_workload
from dynamiccl.simulator.scenario import Scenario, find_scenario
from dynamiccl.simulator.system import System
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import Workload, make_workload


@dataclass(frozen=True, slots=True)
class Place:
    """A simulated system, its workload and its interference scenario."""

    text: str
    system: System
    workload: Workload
    scenario: Scenario

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text. Raises UserError for another form, and as the look-ups of its parts."""
        parts = text.split(":")
        shape = re.fullmatch(r"(\d+)x(\d+)", parts[3]) if len(parts) == 4 else None
        if len(parts) not in {3, 4} or (len(parts) == 4 and shape is None):
            raise UserError(
                f"'{text}' is no place to train in; give SYSTEM:WORKLOAD+WORKLOAD:SCENARIO, and "
                "the group's shape behind it where it is not the largest, as h100-ib:ddp:quiet:4x8"
            )
        system = find_system(parts[0])
        group = Group(int(shape[1]), int(shape[2])) if shape else system.groups()[-1]
        workload = make_workload(parts[1].split("+"), group)
        check_workload(system, workload)
        return cls(text, system, workload, find_scenario(parts[2]))

    @property
    def for_training(self) -> Workload:
        """The workload with sizes of training octaves only, so that test sizes stay unseen."""
        calls = self.workload.calls
        moved = (replace(call, size_bytes=training_size(call.size_bytes)) for call in calls)
        return Workload(self.workload.name, tuple(moved))


@cache
def training_size(size_bytes: int) -> int:
    """The size, or the next one by octaves above it that is in a training octave.

    >>> training_size(1 << 20), training_size(1 << 19)
    (1048576, 1048576)
    """
    sizes = pl.DataFrame({"size_bytes": [size_bytes << up for up in range(5)]})
    for row in with_split(sizes).iter_rows(named=True):
        if row["split"] == Split.TRAIN:
            return int(row["size_bytes"])
    raise UserError(
        f"{size_bytes} bytes lie in no octave that is split; give sizes of 64 B or more"
    )
