"""Bandwidth limit of few channels between H100 nodes: each channel uses one NIC.

A channel's ring or tree leaves a node through one NIC (`ncclTopoSearchRecNet`,
`src/graph/search.cc`, NCCL 2.29.7), so that one channel has the rate of one, however many there
are; as many take part as a node has ranks. An NVLSTree channel has a head on every GPU of the node
(`headRank`, `src/graph/connect.cc`), so all NICs; there NCCL's own bound for a channel counts
(`perChMaxNVLSTreeBws`, `src/graph/tuning.cc`), which is of a channel of its search.
"""

from collections.abc import Mapping
from typing import Final

from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.routes import route

#: 400 Gbit/s.
NIC_GBYTES_PER_S: Final = 50.0
#: Share of a line that is payload: LL has 4 bytes of flag for 4 of data, LL128 8 in 128.
_PAYLOAD: Final[Mapping[Protocol, float]] = {
    Protocol.LL: 0.5,
    Protocol.LL128: 120.0 / 128.0,
    Protocol.Simple: 1.0,
}
#: GB/s of a channel of NVLSTree over two nodes, and over more (Hopper), times NCCL's 5/6 from bus
#: to algorithm bandwidth.
_NVLS_TREE: Final = (57.7 * 5.0 / 6.0, 45.5 * 5.0 / 6.0)


def least_transfer_us(
    group: Group,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
    num_channels: int,
) -> float:
    """Minimum us in which this many channels move a call's bytes between nodes."""
    if group.num_nodes == 1:
        return 0.0
    heads = algorithm is Algorithm.NVLSTree
    nics = group.ranks_per_node if heads else min(num_channels, group.ranks_per_node)
    rate = nics * NIC_GBYTES_PER_S * _PAYLOAD[protocol]
    algbw = rate / _bytes_out(group, collective, algorithm)
    if heads:
        algbw = min(algbw, num_channels * _NVLS_TREE[group.num_nodes > 2])
    return size_bytes / (1000.0 * algbw)


def _bytes_out(group: Group, collective: Collective, algorithm: Algorithm) -> float:
    """Bytes that leave a node for each byte of the call.

    Of two nodes each is the root of one tree and a leaf of the other: half up and half down.
    """
    if algorithm is Algorithm.Tree and group.num_nodes == 2:
        return 1.0
    return route(group, collective, algorithm).wire_between
