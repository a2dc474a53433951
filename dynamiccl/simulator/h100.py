"""H100 nodes on InfiniBand: NCCL's cost model for them, and measured corrections.

`predicted_us` is NCCL 2.27's own cost model (default/), the one by which the *default* decides.
`true_us` is the same model times published factors that were fitted to nccl-tests runs; where
neither channels nor a chunk are asked for nothing else is added, so the gap between the default and
the best algorithm and protocol is the gap that those measurements show. What a number of channels
or a chunk does is ours (channels.py, chunks.py). ORIGIN.md says where the figures come from.

time_us = latency_us + bytes / (1000 x algbw_gbytes_per_s)
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.simulator import tables
from dynamiccl.simulator.channels import actual_channels, channel_factor, default_channels
from dynamiccl.simulator.chunks import chunk_factor
from dynamiccl.simulator.group import GPUS_PER_NODE, Group
from dynamiccl.simulator.nics import least_transfer_us
from dynamiccl.simulator.one_node import correction
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.tables import NCCL_VERSION, default_model, read_csv

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


@cache
def _ramp(table: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    rows = [row for row in read_csv("h100_corrections.csv") if row["table"] == table]
    log2_bytes = np.log2([float(row["index_value"]) for row in rows])
    return log2_bytes, np.array([float(row["factor_or_value"]) for row in rows])


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
        if used < default_channels(*call):
            # What NCCL's own number reaches was measured; fewer have fewer NICs.
            transfer_us = max(transfer_us, least_transfer_us(*call, used))
    transfer_us *= chunk_factor(*call, chunk_bytes) * (1.0 + congestion)
    return line.latency_us + _extra_latency_us(group, collective) + transfer_us


def default_config(group: Group, collective: Collective, size_bytes: int) -> Config:
    """NCCL's own choice of algorithm and protocol."""
    chosen = default_model().resolve(Call(group, collective, size_bytes), ABSTAIN)
    return Config(chosen.algorithm, chosen.protocol)


def cost_table(group: Group, collective: Collective, size_bytes: int) -> npt.NDArray[np.float32]:
    """The table passed to a tuner: (7 algorithms, 3 protocols) us, -1 = unavailable."""
    return default_model().cost_table(Call(group, collective, size_bytes))


def _extra_latency_us(group: Group, collective: Collective) -> float:
    return correction(collective, group.num_ranks).extra_latency_us if group.num_nodes == 1 else 0.0


def _measured_factor(
    group: Group, collective: Collective, algorithm: Algorithm, size_bytes: int
) -> float:
    """Measured / modelled bandwidth, interpolated linearly between the fitted sizes."""
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
