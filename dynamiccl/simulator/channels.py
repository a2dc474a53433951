"""Channels on H100 nodes: how many NCCL uses, and how their number changes a call's time.

How many is NCCL's own rule (default/channels.py).

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

from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator.default.channels import used_channels
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.tables import default_model


@dataclass(frozen=True, slots=True)
class _Shape:
    """Response of a protocol to channels: a and c of the module's formula."""

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
    Algorithm.PAT: 0.80,
    Algorithm.NVLS: 0.75,
    Algorithm.NVLSTree: 0.70,
}
_ONE_NODE_RING_SHARE: Final = 1.25
#: A tree is short, so that even small messages gain from a second channel.
_TREE_UNIT_SHARE: Final = 0.25


def communicator_channels(group: Group, algorithm: Algorithm) -> int:
    """Channels that NCCL opens on H100 nodes unless told otherwise (`NCCL_MIN/MAX_CTAS`)."""
    return default_model().max_channels(group, algorithm)


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
    """Channels that NCCL uses when `num_channels` are requested (None: its own number).

    The communicator has only so many channels (`max_channels`, None for what NCCL opens by itself),
    and a small payload does not fill them. `size_bytes` is NCCL's nBytes, the whole buffer for
    AllGather and ReduceScatter.
    """
    comm = default_model(max_channels).communicator(group)
    return used_channels(comm, collective, algorithm, protocol, size_bytes, num_channels)


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
    """Transfer time / transfer time with NCCL's own number of channels."""
    call = (group, collective, algorithm, protocol, size_bytes)
    used = actual_channels(*call, num_channels, max_channels=max_channels)
    default = actual_channels(*call)
    if used == default:
        return 1.0
    best = best_channels(group, algorithm, protocol, size_bytes)
    shape = _SHAPES[protocol]
    return _beta(default / best, shape) / _beta(used / best, shape)


def best_channels(group: Group, algorithm: Algorithm, protocol: Protocol, size_bytes: int) -> float:
    """Number of channels with the largest bandwidth, a real number >= 1 (our assumption)."""
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
