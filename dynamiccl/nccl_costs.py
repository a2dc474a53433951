"""NCCL's cost model: from latency and bandwidth to a time (`src/graph/tuning.cc`).

    time = latency x plateau + bytes / (bandwidth x correction)

NCCL logs latency and bandwidth of every cell once for each communicator. Both corrections are
AllReduce's (`ncclTopoGetAlgoTime`, 2.19 to 2.30.7): Tree's bandwidth by size, and the latency of
Ring/Simple between nodes from 64 bytes per channel and rank on. NVLSTree's, on some Blackwell
machines from 2.29.2 on, depends on what is not logged, and is left to the simulator's full model.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from dynamiccl.nccl import Protocol

#: `treeCorrectionFactor` by floor(log2(bytes / 64)): bandwidth that medium sizes really get.
TREE_CORRECTION: Final[Mapping[Protocol, Sequence[float]]] = {
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
#: Entries that Tree uses of them.
TREE_CORRECTED: Final = 23
#: From so many bytes per channel and rank on, Ring/Simple's latency is that times as long between
#: nodes: before Ampere, and since.
PLATEAU_BYTES: Final = 64
PLATEAU: Final = (1.9, 1.4)


def size_correction(protocol: Protocol, size_bytes: int, entries: int = TREE_CORRECTED) -> float:
    """Fraction of its bandwidth that a tree reaches at a size; 1 beyond `entries` octaves.

    >>> size_correction(Protocol.LL, 1 << 18), size_correction(Protocol.LL, 32)
    (0.4, 1.0)
    """
    index = (size_bytes >> 6).bit_length() - 1
    return TREE_CORRECTION[protocol][index] if 0 <= index < entries else 1.0


def plateau(size_bytes: int, num_channels: int, num_ranks: int, *, since_ampere: bool) -> float:
    """Factor on Ring/Simple's latency in an AllReduce between nodes.

    >>> plateau(1 << 20, 16, 64, since_ampere=True), plateau(1 << 10, 16, 64, since_ampere=True)
    (1.4, 1.0)
    """
    if size_bytes // (num_channels * num_ranks) < PLATEAU_BYTES:
        return 1.0
    return PLATEAU[since_ampere]
