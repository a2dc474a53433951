"""How NCCL's cost model makes a time of a latency and a bandwidth (`src/graph/tuning.cc`).

    time = latency + bytes / (bandwidth x correction)

NCCL logs latency and bandwidth of every cell once for each communicator; the correction is Tree's,
by size, for AllReduce (`ncclTopoGetAlgoTime`, 2.19 to 2.30.7). What else it corrects (the latency
of rings of many bytes between nodes, NVLSTree on some Blackwell machines from 2.29.2 on) depends on
what it does not log, and is left to the simulator's full model.
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


def size_correction(protocol: Protocol, size_bytes: int, entries: int = TREE_CORRECTED) -> float:
    """What share of its bandwidth a tree gets at a size; 1 beyond the first `entries` octaves.

    >>> size_correction(Protocol.LL, 1 << 18), size_correction(Protocol.LL, 32)
    (0.4, 1.0)
    """
    index = (size_bytes >> 6).bit_length() - 1
    return TREE_CORRECTION[protocol][index] if 0 <= index < entries else 1.0
