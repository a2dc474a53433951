"""Hops, loops and wire bytes of every algorithm.

Rings are in lock-step: a rank forwards what its neighbour sent in the step before, so every loop
over the buffers pays all hops again. Trees, NVLS, CollNet, PAT and a ring's Broadcast and Reduce
are pipelines: the hops are paid once, and each further loop costs a turn. Counts of hops are those
of NCCL's own latency model (`src/graph/tuning.cc`, v2.30.7-1).
"""

import math
from dataclasses import dataclass
from functools import cache

from dynamiccl.nccl import Algorithm, Collective
from dynamiccl.simulator.group import Group

_GATHERS = frozenset({Collective.AllGather, Collective.ReduceScatter})
_ROOTED = frozenset({Collective.Broadcast, Collective.Reduce})


@dataclass(frozen=True, slots=True)
class Route:
    """Hops and bytes of one call of an algorithm."""

    #: Hops one after another inside a node and between nodes, for the first chunk to arrive.
    hops_inside: float
    hops_between: float
    #: Chunks of a channel in one loop: every rank's in a ring, every head's in NVLS.
    width: int
    lock_step: bool
    #: Bytes on the busiest link inside a node, and out of a node, for each byte of the call.
    wire_inside: float
    wire_between: float


@cache
def route(group: Group, collective: Collective, algorithm: Algorithm) -> Route:
    """The route of `algorithm` for `collective` among `group`."""
    if algorithm is Algorithm.Ring:
        return _ring(group, collective)
    return _pipeline(group, collective, algorithm)


def _ring(group: Group, collective: Collective) -> Route:
    ranks, nodes = group.num_ranks, group.num_nodes
    rounds = 2 if collective is Collective.AllReduce else 1
    steps, between = rounds * (ranks - 1), rounds * (nodes - 1)
    wire = 1.0 if collective in _ROOTED else rounds * (ranks - 1) / ranks
    return Route(
        hops_inside=steps - between,
        hops_between=between,
        width=1 if collective in _ROOTED else ranks,
        lock_step=collective not in _ROOTED,
        wire_inside=wire if group.ranks_per_node > 1 else 0.0,
        wire_between=wire if nodes > 1 else 0.0,
    )


def _pipeline(group: Group, collective: Collective, algorithm: Algorithm) -> Route:
    nodes, local = group.num_nodes, group.ranks_per_node
    depth = math.log2(nodes)
    away = (nodes - 1) / nodes
    gathers = collective in _GATHERS
    inside, between, width, wire_in, wire_out = {
        Algorithm.Tree: (2.0 * (local - 1), 2.0 * depth, 1, 2.0, 2.0),
        Algorithm.NVLS: (2.0, 2.0 * min(nodes - 1, 1), local, 1.0, away * (1 if gathers else 2)),
        Algorithm.NVLSTree: (2.0, 2.0 * depth, local, 1.0, 1.0 if nodes == 2 else 2.0),
        Algorithm.CollNetDirect: (
            2.0 * min(1, local - 1),
            1.0,
            local,
            (1.0 if gathers else 2.0) * (local - 1) / local,
            away if gathers else 1.0,
        ),
        Algorithm.CollNetChain: (2.0 * (local - 1), 1.0, 1, 2.0, 1.0),
        Algorithm.PAT: (0.0, depth, 1, 0.0, away),
    }[algorithm]
    several = nodes > 1
    return Route(
        hops_inside=inside if local > 1 else 0.0,
        hops_between=between if several else 0.0,
        width=width,
        lock_step=False,
        wire_inside=wire_in if local > 1 else 0.0,
        wire_between=wire_out if several else 0.0,
    )
