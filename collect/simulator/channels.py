"""Channels: how many NCCL uses for a call, and what another number does to its time.

How many is NCCL's own rule (2.27.7, `src/enqueue.cc`: calcCollTuning's loop over threads and the
split of a payload into cells); it gives every channel count that NCCL's code was recorded with.

What the number does is *ours and fitted to nothing*, like the noise. Its form is AutoCCL's
(Xu et al., NSDI 2025, section 3): the bandwidth is the smaller of a transport term that rises with
the channels and saturates, and a protocol's limit, and beyond the optimum channels get in each
other's way. With x = channels / best channels:

    beta0(x) = x (1 + a) / (a + x)      beta(x) = min(beta0(x), 1) / (1 + c max(0, x - 1))

so beta rises up to x = 1 and falls from there. The transfer lasts beta(default) / beta(asked) times
as long as with NCCL's own number, for which everything else in the simulator is stated.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dynamiccl.collect.simulator.group import Group
from dynamiccl.nccl import MAX_CHANNELS, Algorithm, Collective, Protocol

_ONE_NODE_CHANNELS: Final = 24
_CHANNELS: Final = 16
_NVLS_CHANNELS: Final = 16
#: A channel is used from so many bytes of traffic on (`MinTrafficPerChannel`, 2.27.7).
_MIN_TRAFFIC_BYTES: Final = 16 << 10
#: LL moves its payload in packets that are flags for the other half, and counts four times.
_LL_TRAFFIC: Final = 4
#: Threads that the default rule starts from, and the bytes that it wants for each.
_MAX_THREADS: Final[Mapping[Protocol, int]] = {
    Protocol.LL: 512,
    Protocol.LL128: 640,
    Protocol.Simple: 512,
}
_THREAD_BYTES: Final[Mapping[Protocol, int]] = {
    Protocol.LL: 8,
    Protocol.LL128: 8,
    Protocol.Simple: 64,
}
_NVLS_KINDS: Final = frozenset({Algorithm.NVLS, Algorithm.NVLSTree})


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a protocol answers to channels: a and c of the module's formula."""

    half_rise: float
    crowding: float
    #: The best number grows with the square root of the size: one channel for so many bytes.
    unit_bytes: int


_SHAPES: Final[Mapping[Protocol, _Shape]] = {
    Protocol.LL: _Shape(0.12, 0.15, 16 << 10),
    Protocol.LL128: _Shape(0.15, 0.20, 64 << 10),
    Protocol.Simple: _Shape(0.20, 0.20, 128 << 10),
}
#: The best number for large messages as a share of the communicator's channels: between nodes the
#: network is full before they are all in use, inside one a ring could do with more than NCCL opens.
_LARGEST_SHARE: Final[Mapping[Algorithm, float]] = {
    Algorithm.Tree: 0.60,
    Algorithm.Ring: 0.80,
    Algorithm.NVLS: 0.75,
    Algorithm.NVLSTree: 0.70,
}
_ONE_NODE_RING_SHARE: Final = 1.25
#: A tree is short, so that even small messages gain from a second channel.
_TREE_UNIT_SHARE: Final = 0.25


def communicator_channels(group: Group, algorithm: Algorithm) -> int:
    """Channels that NCCL opens on H100 nodes unless told otherwise (`NCCL_MIN/MAX_CTAS`)."""
    if algorithm in _NVLS_KINDS:
        return _NVLS_CHANNELS
    return _ONE_NODE_CHANNELS if group.num_nodes == 1 else _CHANNELS


def default_channels(
    group: Group,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
) -> int:
    """Channels that NCCL uses when nobody asks for a number; 1 or more."""
    return actual_channels(group, collective, algorithm, protocol, size_bytes)


def actual_channels(  # noqa: PLR0913 - the call, and what was asked for it
    group: Group,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
    num_channels: int | None = None,
    *,
    max_channels: int | None = None,
) -> int:
    """Channels that NCCL really uses when `num_channels` are asked for (None: its own number).

    A request is a maximum: the communicator has only so many channels (`max_channels`, None for
    what NCCL opens by itself), and a small payload does not fill them. NVLSTree takes the number as
    it is; NCCL would not check it there, so neither may more be asked than the communicator has.
    `size_bytes` is NCCL's nBytes, the whole buffer for AllGather and ReduceScatter.
    """
    opened = max_channels or communicator_channels(group, algorithm)
    if num_channels is None:
        limit = _channels_for_threads(group, algorithm, protocol, size_bytes, opened)
    else:
        limit = min(max(num_channels, 1), opened, MAX_CHANNELS)
    if algorithm in _NVLS_KINDS and group.num_nodes > 1:
        return limit
    return _filled(_payload(group, collective, protocol, size_bytes), limit)


def channel_factor(  # noqa: PLR0913 - the call, and what was asked for it
    group: Group,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    size_bytes: int,
    num_channels: int | None = None,
    *,
    max_channels: int | None = None,
) -> float:
    """How many times as long the transfer lasts as with NCCL's own number; 1.0 with that number."""
    call = (group, collective, algorithm, protocol, size_bytes)
    used = actual_channels(*call, num_channels, max_channels=max_channels)
    default = default_channels(*call)
    if used == default:
        return 1.0
    best = best_channels(group, algorithm, protocol, size_bytes)
    shape = _SHAPES[protocol]
    return _beta(default / best, shape) / _beta(used / best, shape)


def best_channels(group: Group, algorithm: Algorithm, protocol: Protocol, size_bytes: int) -> float:
    """Where the bandwidth peaks, as a real number from 1 on; ours, see the module."""
    unit = float(_SHAPES[protocol].unit_bytes)
    if algorithm is Algorithm.Tree:
        unit *= _TREE_UNIT_SHARE
    share = _LARGEST_SHARE[algorithm]
    if algorithm is Algorithm.Ring and group.num_nodes == 1:
        share = _ONE_NODE_RING_SHARE
    largest = share * communicator_channels(group, algorithm)
    return min(max(math.sqrt(size_bytes / unit), 1.0), largest)


def _beta(x: float, shape: _Shape) -> float:
    rise = x * (1.0 + shape.half_rise) / (shape.half_rise + x)
    return min(rise, 1.0) / (1.0 + shape.crowding * max(0.0, x - 1.0))


def _channels_for_threads(
    group: Group, algorithm: Algorithm, protocol: Protocol, size_bytes: int, opened: int
) -> int:
    if algorithm in _NVLS_KINDS:
        return opened
    per_channel = _MAX_THREADS[protocol] * _THREAD_BYTES[protocol]
    if algorithm is Algorithm.Ring and protocol is Protocol.LL:
        per_channel *= group.num_ranks
    return min(max(size_bytes // per_channel, 1), opened)


@dataclass(frozen=True, slots=True)
class _Payload:
    """One rank's bytes, and the traffic that each of them makes."""

    num_bytes: int
    traffic_per_byte: int


def _payload(group: Group, collective: Collective, protocol: Protocol, size_bytes: int) -> _Payload:
    num_bytes, traffic = size_bytes, 1
    if collective is Collective.AllReduce:
        traffic = 2
    elif collective in {Collective.AllGather, Collective.ReduceScatter}:
        num_bytes, traffic = size_bytes // group.num_ranks, group.num_ranks
    return _Payload(num_bytes, traffic * (_LL_TRAFFIC if protocol is Protocol.LL else 1))


def _filled(payload: _Payload, limit: int) -> int:
    """Channels that get a cell of the payload when it is spread over at most `limit`."""
    traffic = payload.traffic_per_byte
    per_channel = max(_MIN_TRAFFIC_BYTES, payload.num_bytes * traffic // limit)
    cell_bytes = _ceil_div(_ceil_div(_MIN_TRAFFIC_BYTES, traffic), 16) * 16
    cells = max(_ceil_div(payload.num_bytes, cell_bytes), 1)
    cells_per_channel = min(cells, _ceil_div(per_channel, cell_bytes * traffic))
    return min(_ceil_div(cells, cells_per_channel), limit)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
