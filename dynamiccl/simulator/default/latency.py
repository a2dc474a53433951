"""Latency of a cell in NCCL's cost model (`ncclTopoTuneModel`, `src/graph/tuning.cc`)."""

from typing import Final

from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator.default.bandwidth import GATHERS, steps
from dynamiccl.simulator.default.communicator import Communicator
from dynamiccl.simulator.default.constants import BASE_US, HOP_US, Hop
from dynamiccl.simulator.default.graph import Cpu

#: Each inter-node ring step posts to the network (`getNetOverhead`), three times in Simple.
_NET_OVERHEAD_US: Final = 1.0
_NET_OVERHEAD_AMD_US: Final = 2.0
_SIMPLE_POSTS: Final = 3
#: PAT: its logarithmic and its linear part.
_PAT_SHARE: Final = 3.5
_PAT_RANK_US: Final = 2.8


def latency_us(
    comm: Communicator, collective: Collective, algorithm: Algorithm, protocol: Protocol
) -> float:
    """Time of an empty message, before corrections by size."""
    base = BASE_US[algorithm][protocol]
    inside = HOP_US[comm.hop_inside(algorithm)][algorithm][protocol]
    between = _between_us(comm, algorithm, protocol)
    depth = comm.group.num_nodes.bit_length() - 1
    if algorithm is Algorithm.Ring:
        return base + _ring_us(comm, collective, protocol)
    if algorithm is Algorithm.Tree:
        return base + 2 * ((comm.group.ranks_per_node - 1) * inside + depth * between)
    if algorithm is Algorithm.NVLS:
        return inside + (0.0 if comm.one_node else between)
    if algorithm is Algorithm.NVLSTree:
        return base + inside + 2 * depth * between
    return base + depth * between / _PAT_SHARE + comm.group.num_ranks * _PAT_RANK_US


def _between_us(comm: Communicator, algorithm: Algorithm, protocol: Protocol) -> float:
    """One hop over the network; where every node has one rank, no other hop hides it."""
    alone = comm.group.ranks_per_node == 1
    if alone or algorithm is not Algorithm.NVLSTree:
        hop = HOP_US[Hop.NET][Algorithm.Tree if alone else algorithm][protocol]
    else:
        hop = comm.release.nvls_tree_net_us
    card = comm.search(algorithm).inter_latency_us
    return hop + card * (2 if protocol is Protocol.Simple else 1)


def _ring_us(comm: Communicator, collective: Collective, protocol: Protocol) -> float:
    hop = comm.hop_inside(Algorithm.Ring)
    inside = HOP_US[hop][Algorithm.Ring][protocol]
    if collective in GATHERS or collective is Collective.AllReduce:
        rounds = 2 if collective is Collective.AllReduce else 1
        crossings = 0 if comm.one_node else rounds * (comm.group.num_nodes - 1)
        inside = max(inside, _overhead_us(comm, protocol))
        between = _between_us(comm, Algorithm.Ring, protocol)
        return (steps(comm, collective) - crossings) * inside + crossings * between
    crossed = hop if comm.one_node else Hop.NET
    if comm.graph.ring.same_channels:
        return HOP_US[crossed][Algorithm.Ring][protocol]
    # NCCL stands in for waiting on chunks with the tree's hop in Simple.
    like = Algorithm.Tree if protocol is Protocol.Simple else Algorithm.Ring
    return steps(comm, collective) * HOP_US[crossed][like][protocol]


def _overhead_us(comm: Communicator, protocol: Protocol) -> float:
    if comm.one_node:
        return 0.0
    once = _NET_OVERHEAD_AMD_US if comm.machine.cpu is Cpu.AMD else _NET_OVERHEAD_US
    return once * (_SIMPLE_POSTS if protocol is Protocol.Simple else 1)
