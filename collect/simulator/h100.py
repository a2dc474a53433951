"""H100 nodes, one or several on InfiniBand: NCCL's model of them, and what was measured of them.

`predicted_us` is NCCL 2.27's own cost model, the one by which the *default* decides. `true_us` is
the same model times published factors that were fitted to nccl-tests runs; where neither channels
nor a chunk are asked for nothing else is added, so the gap between the default and the best
algorithm and protocol is the gap that those measurements show. What a number of channels or a chunk
does is ours (channels.py, chunks.py). ORIGIN.md says where the figures come from.

time_us = latency_us + bytes / (1000 x algbw_gbytes_per_s)
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.simulator.channels import channel_factor
from dynamiccl.collect.simulator.chunks import chunk_factor
from dynamiccl.collect.simulator.group import GPUS_PER_NODE, Group, Line
from dynamiccl.collect.simulator.one_node import correction
from dynamiccl.collect.simulator.tables import lines, read_csv
from dynamiccl.nccl import (
    COST_IGNORE,
    NUM_ALGORITHMS,
    NUM_PROTOCOLS,
    Algorithm,
    Collective,
    Config,
    NcclVersion,
    Protocol,
)

__all__ = [
    "ENVIRONMENT",
    "GPUS_PER_NODE",
    "NCCL_VERSION",
    "Group",
    "cells",
    "collectives",
    "cost_table",
    "default_config",
    "groups",
    "predicted_us",
    "true_us",
]

NCCL_VERSION: Final = NcclVersion(2, 27, 5)
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
#: Channels in the plateau rule below, NCCL's default on Hopper in the source.
_CHANNELS: Final = 16
#: NCCL multiplies Ring/Simple's all-reduce latency by 1.4 from 64 bytes per channel and rank on
#: (NCCL 2.27 `src/graph/tuning.cc`, ncclTopoGetAlgoTime).
_PLATEAU_BYTES: Final = 64
_PLATEAU_FACTOR: Final = 1.4
#: treeCorrectionFactor by floor(log2(bytes / 64)), same source: part of the model, not measured.
_TREE_CORRECTION: Final[Mapping[Protocol, Sequence[float]]] = {
    Protocol.LL: (
        1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5,
        0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0,
    ),
    Protocol.LL128: (
        1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6,
        0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0,
    ),
    Protocol.Simple: (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5,
        0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9,
    ),
}  # fmt: skip
#: NCCL applies the tree correction below this index (`logSize < 23`).
_TREE_CORRECTION_END: Final = 23


@cache
def _ramp(table: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    rows = [row for row in read_csv("h100_corrections.csv") if row["table"] == table]
    log2_bytes = np.log2([float(row["index_value"]) for row in rows])
    return log2_bytes, np.array([float(row["factor_or_value"]) for row in rows])


def groups() -> list[Group]:
    """Every group shape that the tables hold, smallest first."""
    return sorted(lines(), key=lambda group: (group.num_nodes, group.ranks_per_node))


def collectives() -> list[Collective]:
    """Every collective that the tables hold."""
    return sorted({cell[0] for cells in lines().values() for cell in cells})


def cells(group: Group, collective: Collective) -> list[tuple[Algorithm, Protocol]]:
    """The (algorithm, protocol) pairs that NCCL has for this group, in cost-table order."""
    return sorted((a, p) for c, a, p in lines()[group] if c is collective)


def predicted_us(
    group: Group, collective: Collective, algorithm: Algorithm, protocol: Protocol, size_bytes: int
) -> float:
    """What NCCL 2.27.5 thinks one call takes, in us; it decides by this. KeyError: no such cell."""
    line = lines()[group][collective, algorithm, protocol]
    algbw = line.algbw_gbytes_per_s * _tree_correction(collective, algorithm, protocol, size_bytes)
    return _latency_us(line, group, collective, algorithm, protocol, size_bytes) + size_bytes / (
        1000.0 * algbw
    )


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
    line = lines()[group][collective, algorithm, protocol]
    algbw = line.algbw_gbytes_per_s * _tree_correction(collective, algorithm, protocol, size_bytes)
    algbw *= _measured_factor(group, collective, algorithm, size_bytes)
    transfer_us = size_bytes / (1000.0 * algbw) * (1.0 + congestion)
    call = (group, collective, algorithm, protocol, size_bytes)
    if num_channels is not None or max_channels is not None:
        transfer_us *= channel_factor(*call, num_channels, max_channels=max_channels)
    transfer_us *= chunk_factor(*call, chunk_bytes)
    return _latency_us(line, *call) + _extra_latency_us(group, collective) + transfer_us


def default_config(group: Group, collective: Collective, size_bytes: int) -> Config:
    """NCCL's own choice: the argmin of its model, ties to the lower index (`src/enqueue.cc`)."""
    predicted = [
        (predicted_us(group, collective, algorithm, protocol, size_bytes), algorithm, protocol)
        for algorithm, protocol in cells(group, collective)
    ]
    _, algorithm, protocol = min(predicted)
    return Config(algorithm, protocol)


def cost_table(group: Group, collective: Collective, size_bytes: int) -> npt.NDArray[np.float32]:
    """What NCCL hands to a tuner: (7 algorithms, 3 protocols) in us, -1 = not available."""
    table = np.full((NUM_ALGORITHMS, NUM_PROTOCOLS), COST_IGNORE, dtype=np.float32)
    for algorithm, protocol in cells(group, collective):
        table[algorithm, protocol] = predicted_us(
            group, collective, algorithm, protocol, size_bytes
        )
    return table


def _latency_us(
    line: Line,
    group: Group,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
) -> float:
    ring_simple = algorithm is Algorithm.Ring and protocol is Protocol.Simple
    plateau = size_bytes / (_CHANNELS * group.num_ranks) >= _PLATEAU_BYTES
    if collective is Collective.AllReduce and ring_simple and plateau and group.num_nodes > 1:
        return line.latency_us * _PLATEAU_FACTOR
    return line.latency_us


def _tree_correction(
    collective: Collective, algorithm: Algorithm, protocol: Protocol, size_bytes: int
) -> float:
    if algorithm is not Algorithm.Tree or collective is not Collective.AllReduce:
        return 1.0
    index = (size_bytes >> 6).bit_length() - 1
    return _TREE_CORRECTION[protocol][index] if 0 <= index < _TREE_CORRECTION_END else 1.0


def _extra_latency_us(group: Group, collective: Collective) -> float:
    return correction(collective, group.num_ranks).extra_latency_us if group.num_nodes == 1 else 0.0


def _measured_factor(
    group: Group, collective: Collective, algorithm: Algorithm, size_bytes: int
) -> float:
    """Share of the model's bandwidth that was measured, linear between the fitted sizes."""
    if group.num_nodes == 1:
        return correction(collective, group.num_ranks).bandwidth_factor
    if algorithm is Algorithm.NVLSTree:
        table = "nvls_tree_ramp"
    elif algorithm is Algorithm.Ring and group.ranks_per_node == GPUS_PER_NODE:
        table = "ring_full_mesh_ramp"
    else:
        return 1.0
    log2_bytes, factors = _ramp(table)
    log2_per_gpu = math.log2(max(size_bytes / group.num_ranks, 1.0))
    # Beyond the last fitted size the source takes the table's bandwidth as it is.
    return float(np.interp(log2_per_gpu, log2_bytes, factors, right=1.0))
