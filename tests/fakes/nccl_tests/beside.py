"""Our own program on gloo, each call of which the stand-in's NCCL is told of, and so the plugin.

    python beside.py PYTHON -m dynamiccl.collect.beside all_reduce_perf ...

as a launcher's prefix. The calls and the products are real; what is made up is NCCL, which is asked
in the order and as often as gloo is called, and logs.
"""

import os
import platform
import runpy
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from dynamiccl.nccl import Collective
from tests.fakes.nccl_tests.nccl import Nccl
from tests.fakes.nccl_tests.world import World

#: PyTorch's functions, and which of their tensors NCCL counts.
FUNCTIONS = {
    "all_reduce": (Collective.AllReduce, 0),
    "all_gather_into_tensor": (Collective.AllGather, 1),
    "reduce_scatter_single": (Collective.ReduceScatter, 0),
    "broadcast": (Collective.Broadcast, 0),
    "reduce": (Collective.Reduce, 0),
}


@cache
def nccl() -> Nccl:
    """NCCL in this rank's process, when all ranks have met."""
    world = World(dist.get_rank(), (platform.node(),) * dist.get_world_size(), dist.get_rank())
    made = Nccl(os.environ, world, 1, 0)
    made.connect()
    return made


def told(name: str, collective: Collective, counted: int) -> Callable[..., Any]:
    """The function, which tells NCCL of the calls of a group of its own."""
    real = getattr(dist, name)

    def call(*tensors: Any, group: Any = None, **more: Any) -> Any:
        if group is not None:
            tensor: torch.Tensor = tensors[counted]
            nccl().call(collective, tensor.numel() * tensor.element_size())
        return real(*tensors, group=group, **more)

    return call


if __name__ == "__main__":
    for name, what in FUNCTIONS.items():
        setattr(dist, name, told(name, *what))
    sys.argv = [*sys.argv[3:], "--cpu"]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
