"""Lines of NCCL's cost model that no table holds: one node, and Broadcast and Reduce.

Formulas and constants are those of NCCL 2.27 for sm90 (`src/graph/tuning.cc`, ncclTopoTuneModel);
with them every cost that NCCL's own code was recorded with for one and for two nodes of eight H100
comes out. What its topology search gives for fewer GPUs of the same node is taken to be the same.
"""

from collections.abc import Mapping
from typing import Final

from dynamiccl.collect.simulator.group import GPUS_PER_NODE, Cell, Group, Line
from dynamiccl.nccl import Algorithm, Collective, Protocol

#: Bus bandwidth that the search finds in one NVSwitch node: 12 ring or tree channels of 30 GB/s,
#: and 16 NVLS channels of 20 GB/s.
_RING_BUS_GBYTES_PER_S: Final = 360.0
_RING_CHANNELS: Final = 12
_NVLS_BUS_GBYTES_PER_S: Final = 320.0
#: `llMaxBws` and the per-channel LL128 bandwidth of Hopper in one node.
_LL_MAX_GBYTES_PER_S: Final = 141.0
_LL128_GBYTES_PER_S_PER_CHANNEL: Final = 36.7
_LL128_SHARE: Final = 0.92
_NVLS_ALL_REDUCE_RATIO: Final = 5.0 / 6.0
#: `baseLatencies`, us. Ring and Tree have the same Simple value.
_RING_BASE_US: Final[Mapping[Protocol, float]] = {
    Protocol.LL: 6.6,
    Protocol.LL128: 14.0,
    Protocol.Simple: 8.4,
}
_TREE_BASE_US: Final[Mapping[Protocol, float]] = {
    Protocol.LL: 6.8,
    Protocol.LL128: 14.0,
    Protocol.Simple: 8.4,
}
#: `hwLatencies` of one hop, us: NVLink inside a node, NET between nodes.
_RING_NVLINK_US: Final[Mapping[Protocol, float]] = {
    Protocol.LL: 0.6,
    Protocol.LL128: 1.9,
    Protocol.Simple: 3.4,
}
_TREE_NVLINK_US: Final[Mapping[Protocol, float]] = {
    Protocol.LL: 0.6,
    Protocol.LL128: 1.25,
    Protocol.Simple: 4.0,
}
_RING_NET_US: Final[Mapping[Protocol, float]] = {
    Protocol.LL: 2.7,
    Protocol.LL128: 4.0,
    Protocol.Simple: 14.0,
}
_NVLS_NVLINK_US: Final = 25.0
#: Tree loses this share of the ring's bus bandwidth before its protocol's own limit.
_TREE_SHARE: Final = 0.92
_TREE_LL_SHARE: Final = 1.0 / 3.8
_TREE_LL128_SHARE: Final = 7.0 / 9.0

ROOTED: Final = (Collective.Broadcast, Collective.Reduce)
_GATHERS: Final = (Collective.AllGather, Collective.ReduceScatter)


def one_node_groups() -> list[Group]:
    """One node with two GPUs up to all of them."""
    return [Group(1, ranks) for ranks in range(2, GPUS_PER_NODE + 1)]


def one_node_lines(num_ranks: int) -> dict[Cell, Line]:
    """The cost model for `num_ranks` GPUs of one NVSwitch node; Broadcast and Reduce apart."""
    lines: dict[Cell, Line] = {}
    for protocol, bus in _ring_bus().items():
        base_us, hop_us = _RING_BASE_US[protocol], _RING_NVLINK_US[protocol]
        for collective, steps in (
            (Collective.AllReduce, 2 * (num_ranks - 1)),
            (Collective.AllGather, num_ranks - 1),
            (Collective.ReduceScatter, num_ranks - 1),
        ):
            lines[collective, Algorithm.Ring, protocol] = Line(
                base_us + steps * hop_us, bus * num_ranks / steps
            )
    for protocol, bus in _tree_bus().items():
        latency_us = _TREE_BASE_US[protocol] + 2 * (num_ranks - 1) * _TREE_NVLINK_US[protocol]
        lines[Collective.AllReduce, Algorithm.Tree, protocol] = Line(latency_us, bus / 2.0)
    nvls = (Algorithm.NVLS, Protocol.Simple)
    reduced = _NVLS_BUS_GBYTES_PER_S * _NVLS_ALL_REDUCE_RATIO
    lines[Collective.AllReduce, *nvls] = Line(_NVLS_NVLINK_US, reduced)
    gathered = _NVLS_BUS_GBYTES_PER_S * (num_ranks - 1) / num_ranks
    for collective in _GATHERS:
        lines[collective, *nvls] = Line(_NVLS_NVLINK_US, gathered)
    return lines


def rooted_lines(group: Group, lines: Mapping[Cell, Line]) -> dict[Cell, Line]:
    """Broadcast and Reduce of a group, from the ring that its AllGather `lines` run on.

    A ring moves every byte over each link once, so the algorithm bandwidth is the bus bandwidth. A
    hop counts once where all channels run the same way, else once for every rank.
    """
    rooted: dict[Cell, Line] = {}
    share = (group.num_ranks - 1) / group.num_ranks
    hop_us = _RING_NVLINK_US if group.num_nodes == 1 else _RING_NET_US
    hops = 1 if group.num_nodes == 1 or group.ranks_per_node == 1 else group.num_ranks
    for protocol, base_us in _RING_BASE_US.items():
        bus = lines[Collective.AllGather, Algorithm.Ring, protocol].algbw_gbytes_per_s * share
        for collective in ROOTED:
            rooted[collective, Algorithm.Ring, protocol] = Line(
                base_us + hops * hop_us[protocol], bus
            )
    return rooted


def _ring_bus() -> dict[Protocol, float]:
    return {
        Protocol.LL: min(_LL_MAX_GBYTES_PER_S, 0.5 * _RING_BUS_GBYTES_PER_S),
        Protocol.LL128: min(
            _LL128_SHARE * _RING_BUS_GBYTES_PER_S, _RING_CHANNELS * _LL128_GBYTES_PER_S_PER_CHANNEL
        ),
        Protocol.Simple: _RING_BUS_GBYTES_PER_S,
    }


def _tree_bus() -> dict[Protocol, float]:
    bus = _TREE_SHARE * _RING_BUS_GBYTES_PER_S
    return {
        Protocol.LL: min(bus * _TREE_LL_SHARE, _LL_MAX_GBYTES_PER_S),
        Protocol.LL128: min(
            bus * _TREE_LL128_SHARE, _RING_CHANNELS * _LL128_GBYTES_PER_S_PER_CHANNEL
        ),
        Protocol.Simple: bus,
    }
