"""Rank and size of this process, from a launcher's environment variables."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """Processes of the job step: `hosts` names the node of each."""

    rank: int
    size: int
    local_rank: int
    hosts: tuple[str, ...]
    #: NCCL_HOSTID is set: NCCL takes each process for a node (`src/misc/utils.cc`, getHostHash).
    has_host_id: bool = False

    @property
    def host(self) -> str:
        """Where this process runs."""
        return self.hosts[self.rank]

    @property
    def num_nodes(self) -> int:
        """Nodes as NCCL counts them: different hosts, or different NCCL_HOSTIDs."""
        return self.size if self.has_host_id else len(set(self.hosts))


def world_of(environment: Mapping[str, str]) -> World:
    """Open MPI's variables first, then PMIx's and Slurm's; a single process without any.

    A program that was built without MPI looks at none of them.
    """
    if "FAKE_NO_MPI" in environment:
        return World(0, 1, 0, (own_host(environment),), "NCCL_HOSTID" in environment)
    rank = _first(environment, "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID") or 0
    size = max(_size(environment), rank + 1)
    nodes = _first(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
    local_size = _first(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") or -(-size // min(nodes, size))
    local_rank = _first(environment, "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    hosts = tuple(_host(environment, rank, process, local_size) for process in range(size))
    local = rank % local_size if local_rank is None else local_rank
    return World(rank, size, local, hosts, "NCCL_HOSTID" in environment)


def own_host(environment: Mapping[str, str]) -> str:
    """Name of this node, up to its first dot, as nccl-tests prints it.

    Several slurmd of one machine share its host name and differ by their node names.
    """
    return (environment.get("SLURMD_NODENAME") or os.uname().nodename).partition(".")[0]


def _size(environment: Mapping[str, str]) -> int:
    found = _first(environment, "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMIX_SIZE")
    if found is not None:
        return found
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
        return 1  # a batch script itself: SLURM_NTASKS is what the job asked for
    return _first(environment, "SLURM_NTASKS") or 1


def _host(environment: Mapping[str, str], rank: int, process: int, local_size: int) -> str:
    here, there = rank // local_size, process // local_size
    own = own_host(environment)
    if here == there:
        return own
    named = expand_nodes(environment.get("SLURM_STEP_NODELIST", ""))
    return named[there] if there < len(named) else f"{own}-n{there}"


def expand_nodes(text: str) -> list[str]:
    """Node names of Slurm's compact list.

    >>> expand_nodes("a[01-03,7],b")
    ['a01', 'a02', 'a03', 'a7', 'b']
    """
    names: list[str] = []
    for prefix, inside in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?", text):
        if not inside:
            names.append(prefix)
        for part in filter(None, inside.split(",")):
            low, _, high = part.partition("-")
            span = range(int(low), int(high or low) + 1)
            names += [f"{prefix}{number:0{len(low)}d}" for number in span]
    return names


def _first(environment: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        value = environment.get(name, "")
        if value.isdecimal():
            return int(value)
    return None
