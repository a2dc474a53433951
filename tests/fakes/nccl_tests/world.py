"""The processes of a launch: what its launcher says of them, and who shares a communicator."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import and_, floordiv, mod, or_
from typing import Final

from dynamiccl.collect.grid import expand_hosts

#: `NCCL_TESTS_SPLIT` (`src/common.cu`, run).
_OPERATIONS: Final = {"AND": and_, "OR": or_, "MOD": mod, "DIV": floordiv}


@dataclass(frozen=True, slots=True)
class World:
    """Processes of a job step or of a communicator; `hosts` names the node of each."""

    rank: int
    hosts: tuple[str, ...]
    local_rank: int = 0

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def num_nodes(self) -> int:
        return len(set(self.hosts))


def world_of(environment: Mapping[str, str]) -> World:
    """Open MPI's variables first, then PMIx's and Slurm's; a single process without any."""

    def first(*names: str) -> int | None:
        return next((int(environment[name]) for name in names if environment.get(name)), None)

    # Several slurmd of one machine share its host name and differ by their node names.
    own = (environment.get("SLURMD_NODENAME") or os.uname().nodename).partition(".")[0]
    rank = first("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID") or 0
    size = first("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMIX_SIZE")
    # Of a batch script itself, SLURM_NTASKS is what its job asked for.
    if size is None and not ("SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment):
        size = first("SLURM_NTASKS")
    size = max(size or 1, rank + 1)
    nodes = first("SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
    # As tests/gpu have it, where each rank has one of its own.
    alone = 1 if "NCCL_HOSTID" in environment else None
    on_one = alone or first("OMPI_COMM_WORLD_LOCAL_SIZE") or -(-size // min(nodes, size))
    here = rank // on_one
    named = dict(enumerate(expand_hosts(environment.get("SLURM_STEP_NODELIST", "")))) | {here: own}
    hosts = (named.get(process // on_one, f"{own}-n{process // on_one}") for process in range(size))
    told = first("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    local_rank = rank % on_one if told is None else told
    return World(rank, tuple(hosts), local_rank)


def colours(size: int, environment: Mapping[str, str]) -> list[int]:
    """The colour of each process; those of one colour make a communicator."""
    split = environment.get("NCCL_TESTS_SPLIT")
    if split is None:
        return [0] * size
    operation, value = split.split()
    return [_OPERATIONS[operation](process, int(value, 0)) for process in range(size)]


def communicator(world: World, colour_of: list[int]) -> World:
    """The processes of one's own colour, as one's communicator sees them."""
    members = [p for p in range(world.size) if colour_of[p] == colour_of[world.rank]]
    hosts = tuple(world.hosts[process] for process in members)
    return replace(world, rank=members.index(world.rank), hosts=hosts)
