"""How NCCL cuts a call into chunks, by protocol and requested chunk size.

Sizes are those of NCCL v2.30.7-1 (`src/init.cc`, `src/enqueue.cc`, `src/device/prims_simple.h`): a
buffer has eight steps; a ring's Simple chunk takes four of them, any other one; half of LL's buffer
and a sixteenth of LL128's are flags. NVLS takes smaller chunks for smaller calls.
"""

from typing import Final

from dynamiccl.nccl import Algorithm, Collective, Protocol

_STEPS: Final = 8
_RING_STEPS: Final = 4
_LL_BUFFER_BYTES: Final = 8 * 512 * 8 * 16
_LL128_BUFFER_BYTES: Final = 120 * 640 * 8 * 8
#: A Simple chunk of a ring is sent in two slices as soon as each has so many bytes.
_SLICE_BYTES: Final = 32 << 10
#: Chunks are multiples of it (`ncclProtoGrainSize`, Simple).
GRAIN_BYTES: Final = 512
_NVLS_CHUNK_BYTES: Final = 128 << 10
#: NVLS halves its chunk down to these while a call has less than so many chunks for each head of
#: each channel.
_NVLS_SMALLER: Final = ((64, 64 << 10), (8, 32 << 10), (2, 16 << 10))
_NVLS_KINDS: Final = frozenset({Algorithm.NVLS, Algorithm.NVLSTree})
_ROOTED: Final = frozenset({Collective.Broadcast, Collective.Reduce})


def largest_chunk_bytes(
    collective: Collective, algorithm: Algorithm, protocol: Protocol, buffer_bytes: int
) -> int:
    """Payload of the largest chunk, limited by the buffer."""
    if algorithm in _NVLS_KINDS:
        return _NVLS_CHUNK_BYTES
    if protocol is Protocol.LL:
        return _LL_BUFFER_BYTES // _STEPS // 2
    if protocol is Protocol.LL128:
        return _LL128_BUFFER_BYTES // _STEPS * 15 // 16
    steps = _RING_STEPS if algorithm is Algorithm.Ring and collective not in _ROOTED else 1
    return buffer_bytes // _STEPS * steps


def nvls_chunk_bytes(size_bytes: int, num_channels: int, heads: int) -> int:
    """NCCL's own NVLS chunk for a call.

    >>> [nvls_chunk_bytes(size << 20, 24, 8) >> 10 for size in (1, 16, 128, 4096)]
    [16, 32, 64, 128]
    """
    chunk = _NVLS_CHUNK_BYTES
    for count, smaller in _NVLS_SMALLER:
        if chunk > smaller and size_bytes < count * num_channels * heads * chunk:
            chunk = smaller
    return chunk


def asked_chunk_bytes(largest_bytes: int, chunk_bytes: int | None) -> int:
    """The chunk that NCCL uses for a request: clamped, and rounded down to the grain."""
    if chunk_bytes is None:
        return largest_bytes
    return max(min(chunk_bytes, largest_bytes) // GRAIN_BYTES, 1) * GRAIN_BYTES


def num_slices(protocol: Protocol, piece_bytes: float) -> int:
    """Slices that a ring's chunk of `piece_bytes` is sent in: 1, or 2 for Simple.

    >>> num_slices(Protocol.Simple, 32 << 10), num_slices(Protocol.Simple, 64 << 10)
    (1, 2)
    """
    return 2 if protocol is Protocol.Simple and piece_bytes > _SLICE_BYTES else 1
