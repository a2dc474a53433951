"""H100 nodes on InfiniBand: NCCL's cost model for them, and measured corrections.

`predicted_us` is NCCL 2.27's own cost model (default/), the one by which the *default* decides.
`true_us` is the same model times published factors that were fitted to nccl-tests runs; where
neither channels nor a chunk are asked for nothing else is added, so the gap between the default and
the best algorithm and protocol is the gap that those measurements show. What a number of channels
or a chunk does is ours (channels.py, `chunk_factor`). ORIGIN.md says where the figures come from.

time_us = latency_us + bytes / (1000 x algbw_gbytes_per_s)
"""

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.simulator import tables
from dynamiccl.simulator.channels import actual_channels, channel_factor
from dynamiccl.simulator.group import GPUS_PER_NODE, Group
from dynamiccl.simulator.routes import route
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.tables import NCCL_VERSION, default_model, read_csv

if TYPE_CHECKING:  # it takes most of a start of whoever needs no table
    import numpy as np
    import numpy.typing as npt

#: Names of other modules that belong here, too.
__all__ = ["GPUS_PER_NODE", "NCCL_VERSION", "Group"]

#: Facts of the nodes that the tables describe (DGX H100 class), as measurement columns.
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


#: Of the messages of which bandwidths were measured.
_LARGE_BYTES: Final = 10**9


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

_STEP_BYTES: Final = (4 << 20) // 8
_RING_STEPS: Final = 4
_NVLS_CHUNK_BYTES: Final = 128 << 10
#: Chunks are multiples of it; a chunk of none would be divided by (`ncclProtoGrainSize`, Simple).
GRAIN_BYTES: Final = 512
_NVLS_KINDS: Final = frozenset({Algorithm.NVLS, Algorithm.NVLSTree})
_RING_PIPELINED: Final = frozenset(
    {Collective.AllReduce, Collective.AllGather, Collective.ReduceScatter}
)
#: Strength, largest effect, and pieces that a rank's share wants to be cut into; ours.
_CURVATURE: Final = 0.012
_LARGEST: Final = 0.30
_PIECES: Final = 16


@cache
def _ramp(table: str) -> list[tuple[float, float]]:
    rows = [row for row in read_csv("h100_corrections.csv") if row["table"] == table]
    return [(math.log2(float(r["index_value"])), float(r["factor_or_value"])) for r in rows]


def groups() -> list[Group]:
    """All group shapes with measurements, smallest first."""
    return [*tables.groups()]


def collectives() -> list[Collective]:
    """All collectives that NCCL tunes."""
    return sorted({cell[0] for cells in tables.lines().values() for cell in cells})


def cells(group: Group, collective: Collective) -> list[tuple[Algorithm, Protocol]]:
    """The (algorithm, protocol) pairs that NCCL has for this group, in cost-table order."""
    return [*default_model().cells(group, collective)]


def predicted_us(
    group: Group, collective: Collective, algorithm: Algorithm, protocol: Protocol, size_bytes: int
) -> float:
    """NCCL 2.27.5's predicted time of a call, us; it decides by this. KeyError: no such cell."""
    return default_model().cost_us(Call(group, collective, size_bytes), algorithm, protocol)


def true_us(  # noqa: PLR0913 - a call, and everything that can be set about it
    group: Group,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
    *,
    congestion: float = 0.0,
    num_channels: int | None = None,
    chunk_bytes: int | None = None,
    max_channels: int | None = None,
) -> float:
    """Noise-free time of one call in us: NCCL's model times the measured factors.

    `congestion` slows the bandwidth term: 1.0 makes it last twice as long. `num_channels` and
    `chunk_bytes` are what a tuner asks for, None for NCCL's own; `max_channels` is what the
    communicator was made with, None for what NCCL opens. KeyError: no such cell.
    """
    line = default_model().line(Call(group, collective, size_bytes), algorithm, protocol)
    algbw = line.algbw_gbytes_per_s * _measured_factor(group, collective, algorithm, size_bytes)
    transfer_us = size_bytes / (1000.0 * algbw)
    call = (group, collective, algorithm, protocol, size_bytes)
    if num_channels is not None or max_channels is not None:
        transfer_us *= channel_factor(*call, num_channels, max_channels=max_channels)
        used = actual_channels(*call, num_channels, max_channels=max_channels)
        if used < actual_channels(*call):
            # What NCCL's own number reaches was measured; fewer have fewer NICs.
            transfer_us = max(transfer_us, least_transfer_us(*call, used))
    transfer_us *= chunk_factor(*call, chunk_bytes) * (1.0 + congestion)
    return line.latency_us + _extra_latency_us(group, collective) + transfer_us


def default_config(group: Group, collective: Collective, size_bytes: int) -> Config:
    """NCCL's own choice of algorithm and protocol."""
    chosen = default_model().resolve(Call(group, collective, size_bytes), ABSTAIN)
    return Config(chosen.algorithm, chosen.protocol)


def cost_table(group: Group, collective: Collective, size_bytes: int) -> "npt.NDArray[np.float32]":
    """The table passed to a tuner: (7 algorithms, 3 protocols) us, -1 = unavailable."""
    return default_model().cost_table(Call(group, collective, size_bytes))


def _extra_latency_us(group: Group, collective: Collective) -> float:
    one_node = group.num_nodes == 1
    return _correction(collective, group.num_ranks).extra_latency_us if one_node else 0.0


def _measured_factor(
    group: Group, collective: Collective, algorithm: Algorithm, size_bytes: int
) -> float:
    """Measured / modelled bandwidth, interpolated linearly between the fitted sizes."""
    if group.num_nodes == 1:
        return _correction(collective, group.num_ranks).bandwidth_factor
    if algorithm is Algorithm.NVLSTree:
        table = "nvls_tree_ramp"
    elif algorithm is Algorithm.Ring and group.ranks_per_node == GPUS_PER_NODE:
        table = "ring_full_mesh_ramp"
    else:
        return 1.0
    log2_per_gpu = math.log2(max(size_bytes / group.num_ranks, 1.0))
    # Beyond the last fitted size the source takes the table's bandwidth as it is.
    return _interpolated(log2_per_gpu, _ramp(table), beyond=1.0)


@dataclass(frozen=True, slots=True)
class _Correction:
    """Measured over predicted: a factor of the bandwidth, and a difference of latencies in us."""

    bandwidth_factor: float = 1.0
    extra_latency_us: float = 0.0


@cache
def _correction(collective: Collective, num_ranks: int) -> _Correction:
    """The correction for `num_ranks` GPUs of one node; none where nothing was measured.

    What was measured (ORIGIN.md) is a bandwidth of 1 GB messages and a latency for 2, 4 and 8 GPUs,
    linear between these, for whatever NCCL chose. Nothing tells the cells of a collective apart, so
    all of them get the same factor and extra latency: those that make the chosen cell's line go
    through the measured points.
    """
    model = default_model().lines(Group(1, num_ranks))
    lines = [line for cell, line in model.items() if cell[0] is collective]
    algbw = _points("one_node_algbw").get(collective.wire.lower())
    latency = _points("one_node_latency").get(collective.wire.lower())
    if algbw is None or latency is None:
        return _Correction()
    large_us = {
        line: line.latency_us + _LARGE_BYTES / (1000.0 * line.algbw_gbytes_per_s) for line in lines
    }
    large = min(lines, key=lambda line: large_us[line])
    small = min(lines, key=lambda line: line.latency_us)
    return _Correction(
        _interpolated(num_ranks, algbw) / large.algbw_gbytes_per_s,
        _interpolated(num_ranks, latency) - small.latency_us,
    )


@cache
def _points(table: str) -> Mapping[str, Sequence[tuple[float, float]]]:
    """(GPU count, value) pairs by collective."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in read_csv("h100_corrections.csv"):
        if row["table"] == table:
            pair = (float(row["index_value"]), float(row["factor_or_value"]))
            points.setdefault(row["applies_to"], []).append(pair)
    return points


def _interpolated(
    x: float, points: Sequence[tuple[float, float]], *, beyond: float | None = None
) -> float:
    """Linear between (x, y) points in order; before them the first y, after them `beyond`."""
    if beyond is not None and x > points[-1][0]:
        return beyond
    after = bisect(points, x, key=lambda point: point[0])
    if after in {0, len(points)}:
        return points[max(after - 1, 0)][1]
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return (y1 - y0) / (x1 - x0) * (x - x0) + y0


def least_transfer_us(
    group: Group,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
    num_channels: int,
) -> float:
    """Minimum us in which this many channels move a call's bytes between nodes.

    A channel's ring or tree leaves a node through one NIC (`ncclTopoSearchRecNet`,
    `src/graph/search.cc`, NCCL 2.29.7), so that one channel has the rate of one, however many there
    are; as many take part as a node has ranks. An NVLSTree channel has a head on every GPU of the
    node (`headRank`, `src/graph/connect.cc`), so all NICs; there NCCL's own bound for a channel
    counts (`perChMaxNVLSTreeBws`, `src/graph/tuning.cc`), which is of a channel of its search.
    """
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


def default_chunk_bytes(collective: Collective, algorithm: Algorithm) -> int:
    """NCCL's own Simple chunk, which is also the largest that can be asked for."""
    if algorithm in _NVLS_KINDS:
        return _NVLS_CHUNK_BYTES
    if algorithm is Algorithm.Ring and collective in _RING_PIPELINED:
        return _RING_STEPS * _STEP_BYTES
    return _STEP_BYTES


def actual_chunk_bytes(
    collective: Collective, algorithm: Algorithm, chunk_bytes: int | None = None
) -> int:
    """The Simple chunk that NCCL uses: within its buffers, in whole grains, at least one.

    Bounds and grain are NCCL's (2.30.7, `src/enqueue.cc` and `src/init.cc`: 4 MiB buffers in 8
    steps, four of which a ring takes at once).
    """
    default = default_chunk_bytes(collective, algorithm)
    if chunk_bytes is None:
        return default
    return max(min(chunk_bytes, default) // GRAIN_BYTES, 1) * GRAIN_BYTES


def chunk_factor(
    group: Group,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
    chunk_bytes: int | None,
) -> float:
    """Transfer time / transfer time with NCCL's own chunk; 1.0 unless Simple.

    *Ours and fitted to nothing*: a parabola in the logarithm.
    """
    if protocol is not Protocol.Simple or chunk_bytes is None:
        return 1.0
    default = default_chunk_bytes(collective, algorithm)
    best = min(max(size_bytes / (group.num_ranks * _PIECES), 64 << 10), default)
    used = actual_chunk_bytes(collective, algorithm, chunk_bytes)
    return _cost(used / best) / _cost(default / best)


def _cost(ratio: float) -> float:
    return 1.0 + min(_CURVATURE * math.log2(ratio) ** 2, _LARGEST)
