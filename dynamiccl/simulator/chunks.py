"""Chunk sizes: what NCCL uses for a request, and a mild effect on transfer time.

Bounds and grain are NCCL's (2.30.7, `src/enqueue.cc` and `src/init.cc`: 4 MiB buffers in 8 steps,
four of which a ring takes at once). The effect is *ours and fitted to nothing*: a parabola in the
logarithm, for Simple alone, 1.0 at NCCL's own chunk.
"""

import math
from typing import Final

from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator.group import Group

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
    """The Simple chunk that NCCL uses: within its buffers, in whole grains, at least one."""
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
    """Transfer time / transfer time with NCCL's own chunk; 1.0 unless Simple."""
    if protocol is not Protocol.Simple or chunk_bytes is None:
        return 1.0
    default = default_chunk_bytes(collective, algorithm)
    best = min(max(size_bytes / (group.num_ranks * _PIECES), 64 << 10), default)
    used = actual_chunk_bytes(collective, algorithm, chunk_bytes)
    return _cost(used / best) / _cost(default / best)


def _cost(ratio: float) -> float:
    return 1.0 + min(_CURVATURE * math.log2(ratio) ** 2, _LARGEST)
