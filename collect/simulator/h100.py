"""H100 + InfiniBand, several nodes: NCCL's model of it, and what was measured of it.

`predicted_us` is NCCL 2.27.5's own cost model, the one by which the *default* decides. `true_us` is
the same model times published factors that were fitted to nccl-tests runs; nothing else is added,
so the gap between the default and the best config is the gap that those measurements show.
ORIGIN.md says where both come from.

time_us = latency_us + bytes / (1000 x algbw_gbytes_per_s)
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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
#: GPUs in one node: with all of them in the group, the full-mesh factor of Ring applies.
GPUS_PER_NODE: Final = 8
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

_Cell = tuple[Collective, Algorithm, Protocol]


@dataclass(frozen=True, slots=True)
class Group:
    """The shape of a communicator."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the communicator."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class _Line:
    latency_us: float
    algbw_gbytes_per_s: float


def _read_csv(name: str) -> list[dict[str, str]]:
    text = resources.files("dynamiccl.collect.simulator").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def _lines() -> Mapping[Group, Mapping[_Cell, _Line]]:
    lines: dict[Group, dict[_Cell, _Line]] = {}
    for row in _read_csv("h100_ib_nccl2.27.5.csv"):
        group = Group(int(row["nodes"]), int(row["ranks_per_node"]))
        cell = (
            Collective.parse(row["collective"]),
            Algorithm.parse(row["algorithm"]),
            Protocol.parse(row["protocol"]),
        )
        line = _Line(float(row["latency_us"]), float(row["algbw_gbytes_per_s"]))
        lines.setdefault(group, {})[cell] = line
    return lines


@cache
def _ramp(table: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    rows = [row for row in _read_csv("h100_corrections.csv") if row["table"] == table]
    log2_bytes = np.log2([float(row["index_value"]) for row in rows])
    return log2_bytes, np.array([float(row["factor_or_value"]) for row in rows])


def groups() -> list[Group]:
    """Every group shape that the tables hold, smallest first."""
    return sorted(_lines(), key=lambda group: (group.num_nodes, group.ranks_per_node))


def collectives() -> list[Collective]:
    """Every collective that the tables hold."""
    return sorted({cell[0] for cells in _lines().values() for cell in cells})


def cells(group: Group, collective: Collective) -> list[tuple[Algorithm, Protocol]]:
    """The (algorithm, protocol) pairs that NCCL has for this group, in cost-table order."""
    return sorted((a, p) for c, a, p in _lines()[group] if c is collective)


def predicted_us(
    group: Group, collective: Collective, algorithm: Algorithm, protocol: Protocol, size_bytes: int
) -> float:
    """What NCCL 2.27.5 thinks one call takes, in us; it decides by this. KeyError: no such cell."""
    line = _lines()[group][collective, algorithm, protocol]
    algbw = line.algbw_gbytes_per_s * _tree_correction(collective, algorithm, protocol, size_bytes)
    return _latency_us(line, group, collective, algorithm, protocol, size_bytes) + size_bytes / (
        1000.0 * algbw
    )


def true_us(
    group: Group,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
    *,
    congestion: float = 0.0,
) -> float:
    """Noise-free time of one call in us: NCCL's model times the measured factors.

    `congestion` slows the bandwidth term: 1.0 makes it last twice as long. KeyError: no such cell.
    """
    line = _lines()[group][collective, algorithm, protocol]
    algbw = line.algbw_gbytes_per_s * _tree_correction(collective, algorithm, protocol, size_bytes)
    algbw *= _measured_factor(group, algorithm, size_bytes)
    transfer_us = size_bytes / (1000.0 * algbw) * (1.0 + congestion)
    return _latency_us(line, group, collective, algorithm, protocol, size_bytes) + transfer_us


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
    line: _Line,
    group: Group,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
) -> float:
    ring_simple = algorithm is Algorithm.Ring and protocol is Protocol.Simple
    plateau = size_bytes / (_CHANNELS * group.num_ranks) >= _PLATEAU_BYTES
    if collective is Collective.AllReduce and ring_simple and plateau:
        return line.latency_us * _PLATEAU_FACTOR
    return line.latency_us


def _tree_correction(
    collective: Collective, algorithm: Algorithm, protocol: Protocol, size_bytes: int
) -> float:
    if algorithm is not Algorithm.Tree or collective is not Collective.AllReduce:
        return 1.0
    index = (size_bytes >> 6).bit_length() - 1
    return _TREE_CORRECTION[protocol][index] if 0 <= index < _TREE_CORRECTION_END else 1.0


def _measured_factor(group: Group, algorithm: Algorithm, size_bytes: int) -> float:
    """Share of the model's bandwidth that was measured, linear between the fitted sizes."""
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
