"""Bandwidth of a cell in NCCL's cost model (`ncclTopoTuneModel`, `src/graph/tuning.cc`)."""

from collections.abc import Callable, Mapping
from typing import Final

from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator.default.communicator import Communicator
from dynamiccl.simulator.default.constants import NVLS_EFFICIENCY
from dynamiccl.simulator.default.graph import Search

#: Share of the ring's bandwidth that LL, LL128 and trees get before their own limits.
_LL_SHARE: Final = 0.5
_SHARE: Final = 0.92
_TREE_LL_SHARE: Final = 1.0 / 3.8
_TREE_LL128_SHARE: Final = 7.0 / 9.0
_TREE_LL128_SHARE_NODES: Final = 120.0 / 128.0
_PLAIN_TREE_SHARE: Final = 0.85
_PAT_SHARE: Final = 0.75
#: Until 2.27: NVLS's algorithm bandwidth over its bus bandwidth.
_NVLS_RATIO: Final = 5.0 / 6.0
_NVLS_NET_SHARE: Final = 0.9
GATHERS: Final = frozenset({Collective.AllGather, Collective.ReduceScatter})


def algbw_gbytes_per_s(
    comm: Communicator, collective: Collective, algorithm: Algorithm, protocol: Protocol
) -> float:
    """Bytes of the whole buffer over time, before corrections by size."""
    bus = _BUS[algorithm](comm, collective, protocol)
    if algorithm is not Algorithm.Ring and collective in GATHERS:
        return bus
    by_steps = comm.group.num_ranks / steps(comm, collective)
    if algorithm is Algorithm.Ring:
        return bus * by_steps
    if algorithm in {Algorithm.NVLS, Algorithm.NVLSTree}:
        return bus * (by_steps if comm.release.nvls_by_efficiency else _NVLS_RATIO)
    return bus * 0.5


def steps(comm: Communicator, collective: Collective) -> int:
    """Steps of a ring: what each link carries, in shares of one rank."""
    if collective is Collective.AllReduce:
        return 2 * (comm.group.num_ranks - 1)
    return comm.group.num_ranks - 1 if collective in GATHERS else comm.group.num_ranks


def _per_channel(comm: Communicator, search: Search) -> float:
    slow = comm.group.num_nodes > 2
    return search.inter_gbytes_per_s if slow else search.intra_gbytes_per_s


def _ring(comm: Communicator, collective: Collective, protocol: Protocol) -> float:  # noqa: ARG001
    channels = comm.graph.channels
    bus = channels * _per_channel(comm, comm.graph.ring)
    if protocol is Protocol.LL:
        return min(comm.ll_max, bus * _LL_SHARE)
    if protocol is Protocol.LL128:
        most = comm.release.ring_ll128(comm.generation)[comm.column]
        return min(bus * _SHARE, channels * most)
    return bus


def _tree(comm: Communicator, collective: Collective, protocol: Protocol) -> float:  # noqa: ARG001
    channels = comm.graph.channels
    bus = channels * _per_channel(comm, comm.graph.tree)
    most = comm.release.tree(comm.generation)[comm.column]
    bus = min(bus * _SHARE, channels * most)
    if protocol is Protocol.LL:
        bus = min(bus * _TREE_LL_SHARE, comm.ll_max)
    elif protocol is Protocol.LL128:
        share = _TREE_LL128_SHARE if comm.one_node else _TREE_LL128_SHARE_NODES
        most = comm.release.tree_ll128(comm.generation)[comm.column]
        bus = min(bus * share, channels * most)
    return bus * (_PLAIN_TREE_SHARE if comm.graph.tree.plain_tree else 1.0)


def _pat(comm: Communicator, collective: Collective, protocol: Protocol) -> float:  # noqa: ARG001
    return comm.graph.channels * _per_channel(comm, comm.graph.tree) * _PAT_SHARE


def _nvls(comm: Communicator, collective: Collective, protocol: Protocol) -> float:  # noqa: ARG001
    search = comm.search(Algorithm.NVLS)
    if comm.release.nvls_by_efficiency:
        return search.channels * min(_nvls_intra(comm, collective), search.inter_gbytes_per_s)
    intra, inter = search.intra_gbytes_per_s, search.inter_gbytes_per_s
    if collective in GATHERS:
        ranks = comm.group.ranks_per_node
        intra, inter = intra * (ranks - 1) / ranks, inter * _NVLS_NET_SHARE
    return search.channels * min(intra, inter)


def _nvls_tree(comm: Communicator, collective: Collective, protocol: Protocol) -> float:  # noqa: ARG001
    search = comm.search(Algorithm.NVLSTree)
    two, inter = comm.group.num_nodes <= 2, search.inter_gbytes_per_s
    if comm.release.nvls_by_efficiency:
        most = comm.release.nvls_tree(comm.generation)[comm.column]
        inter = min(inter * (2 if two else 1), most)
        return search.channels * min(_nvls_intra(comm, collective), inter)
    return search.channels * min(search.intra_gbytes_per_s, inter if two else inter / 2)


def _nvls_intra(comm: Communicator, collective: Collective) -> float:
    search = comm.search(Algorithm.NVLS)
    share = (search.channels - 1) / search.channels
    intra = search.intra_gbytes_per_s * NVLS_EFFICIENCY[comm.generation] * share
    if collective is Collective.AllReduce:
        return 2.0 * intra
    ranks = comm.group.ranks_per_node
    return intra * (ranks - 1) / ranks


_BUS: Final[Mapping[Algorithm, Callable[[Communicator, Collective, Protocol], float]]] = {
    Algorithm.Ring: _ring,
    Algorithm.Tree: _tree,
    Algorithm.PAT: _pat,
    Algorithm.NVLS: _nvls,
    Algorithm.NVLSTree: _nvls_tree,
}
