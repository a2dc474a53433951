"""The kinds of interference that a sweep file may name, and the runners that support them."""

from collections.abc import Mapping
from typing import Final

from dynamiccl.datasets.schema import QUIET

#: Kinds that are a process of ours on each node -> its module.
MODULES: Final[Mapping[str, str]] = {
    "cpu": "dynamiccl.collect.interference.cpu",
    "gemm": "dynamiccl.collect.interference.gemm",
}
#: Kinds that disturb a sweep of real processes; traffic is a second benchmark.
REAL: Final = (*MODULES, "traffic")
#: Kinds of the simulator: their level is a slowdown, not a share.
SIMULATED: Final = ("congestion",)
KINDS: Final = (QUIET, *REAL, *SIMULATED)
