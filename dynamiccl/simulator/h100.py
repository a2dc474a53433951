"""H100 nodes on InfiniBand: NCCL's cost model for them, and measured corrections.

`default_model` is NCCL 2.27's own cost model, the one by which the *default* decides. `true_us` is
the same model times published factors that were fitted to nccl-tests runs (ORIGIN.md); where
neither channels nor a chunk are asked for nothing else is added, so the gap between the default and
the best algorithm and protocol is the gap that those measurements show.

    time_us = latency_us + bytes / (1000 x algbw_gbytes_per_s)

What a number of channels or a chunk does is *ours and fitted to nothing*, like the noise: the form
is AutoCCL's (`physics.saturating`), in channels over their best number.
"""

import csv
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

from dynamiccl.nccl import VALID_PROTOCOLS, Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator import physics
from dynamiccl.simulator.cost_model import CostModel, Pair
from dynamiccl.simulator.machine import find_machine
from dynamiccl.simulator.system import (
    GPUS_PER_NODE,
    UNTOUCHED,
    Call,
    Contention,
    Group,
    Launch,
    Parts,
)

NCCL_VERSION: Final = NcclVersion(2, 27, 5)
ENVIRONMENT: Final[Mapping[str, Any]] = {
    "system_description": "simulated: H100 NVSwitch nodes on InfiniBand, NCCL 2.27.5 model "
    "times published correction factors",
    "gpu": "H100",
    "nccl_version": str(NCCL_VERSION),
    "compute_capability": 9.0,
    "nvlink_generation": 4,
    "nvlinks_per_gpu": 18,
    "nvswitch": True,
    "nic_kind": "infiniband",
    "nic_gbits_per_s": 400.0,
    "nics_per_node": 8,
    "cpu_vendor": "intel",
}
#: NVIDIA H100 SXM5 (data sheet).
_NUM_SMS: Final = 132
_MEMORY_GBYTES_PER_S: Final = 3350.0
_INTRA_BUS_GBYTES_PER_S: Final = 360.0
#: Of the measured bandwidths.
_LARGE_BYTES: Final = 10**9
NIC_GBYTES_PER_S: Final = 50.0
#: LL has 4 bytes of flag for 4 of data, LL128 8 in 128.
_PAYLOAD: Final[Mapping[Protocol, float]] = {
    Protocol.LL: 0.5,
    Protocol.LL128: 120.0 / 128.0,
    Protocol.Simple: 1.0,
}
#: GB/s of a channel over two nodes, and more (Hopper); 5/6 is NCCL's, from bus to algorithm.
_NVLS_TREE: Final = (57.7 * 5.0 / 6.0, 45.5 * 5.0 / 6.0)
BUFFER_BYTES: Final = 4 << 20
_CHUNKS: Final = physics.ChunkValues(curvature=0.012, largest=0.30, pieces=16)
#: Response to channels (`physics.saturating`): half rise and crowding; ours.
_RESPONSE: Final[Mapping[Protocol, tuple[float, float]]] = {
    Protocol.LL: (0.12, 0.15),
    Protocol.LL128: (0.15, 0.20),
    Protocol.Simple: (0.20, 0.20),
}
#: One channel for so many bytes; the best number grows with the square root of the size.
_UNIT_BYTES: Final[Mapping[Protocol, int]] = {
    Protocol.LL: 16 << 10,
    Protocol.LL128: 64 << 10,
    Protocol.Simple: 128 << 10,
}
#: Share of the opened channels: fewer fill a network, a ring inside a node could use more.
_LARGEST_SHARE: Final[Mapping[Algorithm, float]] = {
    Algorithm.Tree: 0.60,
    Algorithm.Ring: 0.80,
    Algorithm.PAT: 0.80,
    Algorithm.NVLS: 0.75,
    Algorithm.NVLSTree: 0.70,
}
_ONE_NODE_RING_SHARE: Final = 1.25
#: A tree is short: even small messages gain from a second channel.
_TREE_UNIT_SHARE: Final = 0.25


class H100System(CostModel):
    """NCCL's decisions and `true_us`, by published figures. `launch` changes nothing."""

    name = "h100-ib"
    environment = ENVIRONMENT
    num_sms = _NUM_SMS
    #: The GPU's data sheet, and A100's priors.
    contention = Contention(_NUM_SMS, _MEMORY_GBYTES_PER_S, 0.35, 0.2, held_us=2400.0)

    def __init__(self) -> None:
        super().__init__(NCCL_VERSION, find_machine(self.name))

    def groups(self) -> Sequence[Group]:
        """Two GPUs to all of one node, and the measured shapes of several nodes."""
        one_node = [Group(1, ranks) for ranks in range(2, GPUS_PER_NODE + 1)]
        return [*one_node, *(Group(n, r) for n in (2, 4, 8, 16, 32) for r in (1, 2, 4, 8))]

    def collectives(self) -> Sequence[Collective]:
        """All collectives that NCCL tunes."""
        return sorted(VALID_PROTOCOLS)

    def parts(self, call: Call, config: Config, launch: Launch = UNTOUCHED) -> Parts:  # noqa: ARG002
        """Latency is fixed; the rest moves bytes over the slowest link."""
        ran = self.ran(call, config)
        fixed_us, moving_us = parts_us(call, ran[:2], config.num_channels, config.chunk_bytes)
        several = call.group.num_nodes > 1
        bus_bytes = call.size_bytes * call.collective.bus_factor(call.group.num_ranks)
        inside_us = min(bus_bytes / (1000.0 * _INTRA_BUS_GBYTES_PER_S), moving_us)
        return Parts(
            *(*ran, fixed_us),
            intra_us=inside_us if several else moving_us,
            inter_us=moving_us if several else 0.0,
        )


@cache
def default_model(num_channels: int | None = None) -> CostModel:
    """NCCL's decisions; `num_channels` is what a communicator was made with."""
    return CostModel(NCCL_VERSION, find_machine(H100System.name), num_channels, num_channels)


def true_us(
    call: Call,
    cell: Pair,
    num_channels: int | None = None,
    chunk_bytes: int | None = None,
    *,
    max_channels: int | None = None,
) -> float:
    """Noise-free us by one (algorithm, protocol); None: NCCL's own. KeyError where NCCL lacks it.

    `max_channels` is what the communicator was made with, the rest what a tuner asks for.
    """
    return sum(parts_us(call, cell, num_channels, chunk_bytes, max_channels))


def parts_us(
    call: Call,
    cell: Pair,
    num_channels: int | None,
    chunk_bytes: int | None,
    max_channels: int | None = None,
) -> tuple[float, float]:
    """Latency and transfer of `true_us`."""
    line = default_model().line(call, *cell)
    algbw = line.algbw_gbytes_per_s * _measured_factor(call, cell[0])
    transfer_us = call.size_bytes / (1000.0 * algbw)
    if num_channels is not None or max_channels is not None:
        transfer_us *= channel_factor(call, cell, num_channels, max_channels=max_channels)
        used = default_model(max_channels).num_channels(call, *cell, num_channels)
        if used < default_model().num_channels(call, *cell):
            # What NCCL's own number reaches was measured; fewer have fewer NICs.
            transfer_us = max(transfer_us, least_transfer_us(call, cell, used))
    if cell[1] is Protocol.Simple and chunk_bytes is not None:
        own = physics.largest_chunk_bytes(call.collective, *cell, BUFFER_BYTES)
        asked = physics.asked_chunk_bytes(own, chunk_bytes)
        rank_bytes = call.size_bytes / call.group.num_ranks
        transfer_us *= physics.chunk_factor(_CHUNKS, rank_bytes, own, asked)
    alone = call.group.num_nodes == 1
    extra_us = _correction(call.collective, call.group.num_ranks)[1] if alone else 0.0
    return line.latency_us + extra_us, transfer_us


@cache
def _points(
    table: str, applies_to: str = "", *, is_log2: bool = False
) -> list[tuple[float, float]]:
    held = resources.files(__package__).joinpath("h100_corrections.csv")
    rows = csv.DictReader(held.read_text(encoding="utf-8").splitlines())
    return [
        (math.log2(index) if is_log2 else index, float(row["factor_or_value"]))
        for row in rows
        if row["table"] == table and applies_to in {"", row["applies_to"]}
        for index in [float(row["index_value"])]
    ]


def _measured_factor(call: Call, algorithm: Algorithm) -> float:
    """Measured / modelled bandwidth, linear between the fitted sizes."""
    group = call.group
    if group.num_nodes == 1:
        return _correction(call.collective, group.num_ranks)[0]
    if algorithm is Algorithm.NVLSTree:
        table = "nvls_tree_ramp"
    elif algorithm is Algorithm.Ring and group.ranks_per_node == GPUS_PER_NODE:
        table = "ring_full_mesh_ramp"
    else:
        return 1.0
    log2_per_gpu = math.log2(max(call.size_bytes / group.num_ranks, 1.0))
    # Beyond the last fitted size the source uses the table's bandwidth as it is.
    return _interpolated(log2_per_gpu, _points(table, is_log2=True), beyond=1.0)


@cache
def _correction(collective: Collective, num_ranks: int) -> tuple[float, float]:
    """Bandwidth factor and further latency in us of `num_ranks` GPUs of one node; else (1, 0).

    Bandwidth at 1 GB and latency were measured on 2, 4 and 8 GPUs (ORIGIN.md). Nothing tells cells
    apart, so that all get what moves the cell of NCCL's choice through these points.
    """
    name = collective.wire.lower()
    algbw, latency = _points("one_node_algbw", name), _points("one_node_latency", name)
    if not algbw or not latency:
        return 1.0, 0.0
    model = default_model().lines(Group(1, num_ranks))
    lines = [line for cell, line in model.items() if cell[0] is collective]
    large = min(
        lines, key=lambda line: line.latency_us + _LARGE_BYTES / (1000.0 * line.algbw_gbytes_per_s)
    )
    small = min(lines, key=lambda line: line.latency_us)
    return (
        _interpolated(num_ranks, algbw) / large.algbw_gbytes_per_s,
        _interpolated(num_ranks, latency) - small.latency_us,
    )


def _interpolated(
    x: float, points: Sequence[tuple[float, float]], *, beyond: float | None = None
) -> float:
    if beyond is not None and x > points[-1][0]:
        return beyond
    after = bisect(points, x, key=lambda point: point[0])
    if after in {0, len(points)}:
        return points[max(after - 1, 0)][1]
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return (y1 - y0) / (x1 - x0) * (x - x0) + y0


def channel_factor(
    call: Call, cell: Pair, num_channels: int | None, *, max_channels: int | None = None
) -> float:
    """Transfer time over that with NCCL's own number of channels."""
    used = default_model(max_channels).num_channels(call, *cell, num_channels)
    default = default_model().num_channels(call, *cell)
    if used == default:
        return 1.0
    best, response = _best_channels(call, cell), _RESPONSE[cell[1]]
    of_default, of_used = (
        physics.saturating(number / best, *response) for number in (default, used)
    )
    return of_default / of_used


def _best_channels(call: Call, cell: Pair) -> float:
    """Channels with the largest bandwidth, a real number >= 1 (our assumption)."""
    algorithm, protocol = cell
    unit = float(_UNIT_BYTES[protocol])
    if algorithm is Algorithm.Tree:
        unit *= _TREE_UNIT_SHARE
    share = _LARGEST_SHARE[algorithm]
    if algorithm is Algorithm.Ring and call.group.num_nodes == 1:
        share = _ONE_NODE_RING_SHARE
    largest = share * default_model().max_channels(call.group, algorithm)
    return min(max(math.sqrt(call.size_bytes / unit), 1.0), largest)


def least_transfer_us(call: Call, cell: Pair, num_channels: int) -> float:
    """Minimum us in which this many channels move a call's bytes between nodes.

    A channel's ring or tree leaves a node through one NIC (`ncclTopoSearchRecNet`,
    `src/graph/search.cc`, NCCL 2.29.7). An NVLSTree channel has a head on every GPU (`headRank`,
    `src/graph/connect.cc`): all NICs, and a bound (`perChMaxNVLSTreeBws`, `src/graph/tuning.cc`).
    """
    (algorithm, protocol), group = cell, call.group
    if group.num_nodes == 1:
        return 0.0
    bytes_out = physics.route(group, call.collective, algorithm).wire_between
    if algorithm is Algorithm.Tree and group.num_nodes == 2:
        # Each node is the root of one tree and a leaf of the other.
        bytes_out = 1.0
    heads = algorithm is Algorithm.NVLSTree
    nics = group.ranks_per_node if heads else min(num_channels, group.ranks_per_node)
    algbw = nics * NIC_GBYTES_PER_S * _PAYLOAD[protocol] / bytes_out
    if heads:
        algbw = min(algbw, num_channels * _NVLS_TREE[group.num_nodes > 2])
    return call.size_bytes / (1000.0 * algbw)
