"""Channels and threads that NCCL uses for a call (`src/enqueue.cc`).

`topoGetAlgoInfo` takes as many channels as the size keeps busy; what a tuner asks for replaces that
number. `scheduleCollTasksToPlan` then spreads the payload over them in cells, so that fewer may
carry anything; where the last cell does not fit evenly it is one more than asked for.
"""

from dataclasses import dataclass
from typing import Final

from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator.default.communicator import NVLS_KINDS, Communicator
from dynamiccl.simulator.default.constants import MAX_THREADS, THREAD_BYTES, THREADS

_WARP: Final = 32
#: LL moves its payload in packets that are flags for the other half, and counts four times.
_LL_TRAFFIC: Final = 4
_GRAIN_BYTES: Final = 16
_GATHERS: Final = frozenset({Collective.AllGather, Collective.ReduceScatter})


def used_channels(
    comm: Communicator,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
    asked: int | None = None,
) -> int:
    """Channels that carry data when `asked` are requested (None: NCCL's own number); >= 1."""
    opened = comm.opened(algorithm)
    if asked is None:
        most, _ = _tuned(comm, algorithm, protocol, size_bytes)
    else:
        most = min(max(asked, 1), opened)
    payload = _payload(comm, collective, protocol, size_bytes)
    least = comm.release.min_traffic_bytes
    # NCCL rounds this up to 16 bytes since 2.29, which no count below can tell.
    per_channel = max(least, payload.num_bytes * payload.per_byte // most)
    cell = _up(_up(least, payload.per_byte), _GRAIN_BYTES) * _GRAIN_BYTES
    cells = max(_up(payload.num_bytes, cell), 1)
    cells_each = min(cells, _up(per_channel, cell * payload.per_byte))
    return min(_up(cells, cells_each), opened)


def used_threads(comm: Communicator, algorithm: Algorithm, protocol: Protocol, size: int) -> int:
    """Threads of each channel's block."""
    _, threads = _tuned(comm, algorithm, protocol, size)
    if algorithm in {Algorithm.Tree, Algorithm.PAT, *NVLS_KINDS}:
        return MAX_THREADS
    if protocol is Protocol.Simple:
        threads += _WARP
    return max(threads, 3 * _WARP)


def _tuned(
    comm: Communicator, algorithm: Algorithm, protocol: Protocol, size_bytes: int
) -> tuple[int, int]:
    """Channels and threads that NCCL assigns to a size."""
    channels, threads = comm.opened(algorithm), _most_threads(comm, algorithm, protocol)
    if threads == 0 or algorithm in NVLS_KINDS:
        return channels, threads
    each = THREAD_BYTES[protocol]
    if algorithm is Algorithm.Ring and protocol is Protocol.LL:
        each *= comm.group.num_ranks
    channels = min(max(int(size_bytes // (threads * each)), 1), channels)
    while size_bytes < channels * threads * each and threads % 128 == 0:
        threads //= 2
    return channels, threads


def _most_threads(comm: Communicator, algorithm: Algorithm, protocol: Protocol) -> int:
    """`comm->maxThreads`. PAT has none, so that its channels never shrink."""
    if algorithm is Algorithm.PAT:
        return 0
    if algorithm in NVLS_KINDS or protocol is Protocol.LL128:
        return MAX_THREADS
    asked = comm.overrides.num_threads
    if asked is not None:
        return min(max(asked, 2 * _WARP), THREADS)
    halved = algorithm is Algorithm.Ring and protocol is Protocol.Simple and comm.slow_ring
    return THREADS // 2 if halved else THREADS


@dataclass(frozen=True, slots=True)
class _Payload:
    """One rank's bytes, and the traffic of each."""

    num_bytes: int
    per_byte: int


def _payload(
    comm: Communicator, collective: Collective, protocol: Protocol, size_bytes: int
) -> _Payload:
    num_bytes, traffic = size_bytes, 1
    if collective is Collective.AllReduce:
        traffic = 2
    elif collective in _GATHERS:
        num_bytes, traffic = size_bytes // comm.group.num_ranks, comm.group.num_ranks
    return _Payload(num_bytes, traffic * (_LL_TRAFFIC if protocol is Protocol.LL else 1))


def _up(a: int, b: int) -> int:
    return -(-a // b)
