"""The time of a call from its parameters (formulas only).

With the channels NC, the chunk C, the threads NT and the route of the algorithm (routes.py):

    loops  = ceil(size / (NC x C x width))
    piece  = min(C, size / (NC x width))             one channel's bytes in one step
    A      = base + NC x proxy + loops x (hops x hop + slices)    rings: each loop pays the hops
           = base + NC x proxy + hops x hop + loops x turn        pipelines
    beta0  = link x share                            the transport's ceiling (AutoCCL's beta0)
    beta1  = NC x channel x g(NT)                    the protocol's, by channels (AutoCCL's beta1)
    gamma  = (1 + K x^2 / (1 + x^2)) x (1 + k / (1 + (piece / small)^2)),   x = NC / crowd
    M      = wire x size / min(beta0, beta1) x gamma x h(C)
    time   = (A^p + M^p)^(1/p)

This is AutoCCL's two-stage model (Xu et al., NSDI 2025, section 3): its latency of each of
M / (NC x C) serial steps is A, its two saturating bandwidths are beta0 and beta1, its congestion is
gamma. `p` says how far A and M overlap: 1 = one after the other, large = the longer of the two.
`g` (threads) and `h` (chunk) are 1 at NCCL's own value and keep literature's shape; they are fitted
to nothing. All times in us, bandwidths in GB/s.
"""

import math
from dataclasses import dataclass
from typing import Final

from dynamiccl.nccl import Protocol
from dynamiccl.simulator.buffers import num_slices
from dynamiccl.simulator.routes import Route

#: Above this the smaller of the two terms is below a thousandth anyway.
MAX_OVERLAP: Final = 8.0


@dataclass(frozen=True, slots=True)
class CellValues:
    """Parameters of one (algorithm, protocol); see the module for what they do."""

    base_us: float
    hop_us: float
    net_hop_us: float
    slice_us: float
    turn_us: float
    #: Time for each channel of whoever serves them one by one, NCCL's proxy thread for one.
    proxy_us: float
    channel_gbytes_per_s: float
    link_share: float
    overlap: float
    crowd_penalty: float
    crowd_channels: float
    small_penalty: float
    small_bytes: float
    host_share: float


@dataclass(frozen=True, slots=True)
class LinkValues:
    """Bandwidth limits of the links."""

    inside_gbytes_per_s: float
    between_gbytes_per_s: float
    #: A hop inside a node lasts so many times NVLink's (or whatever the default transport is).
    hop_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """One call as NCCL runs it, as numbers."""

    route: Route
    protocol: Protocol
    size_bytes: int
    num_channels: int
    chunk_bytes: int
    #: g(NT) and h(C) of the module; 1 = NCCL's own.
    thread_factor: float = 1.0
    chunk_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Times:
    """The parts of a call's time, us; time = fixed + max(inside, between)."""

    fixed_us: float
    inside_us: float
    between_us: float

    @property
    def total_us(self) -> float:
        """The whole time."""
        return self.fixed_us + max(self.inside_us, self.between_us)


def times(work: Work, cell: CellValues, links: LinkValues) -> Times:
    """The formulas of the module."""
    route, channels = work.route, work.num_channels
    lanes = channels * route.width
    loops = max(1, math.ceil(work.size_bytes / (lanes * work.chunk_bytes)))
    piece = min(work.chunk_bytes, work.size_bytes / lanes)
    latency = _latency_us(work, cell, links, loops, piece)
    gamma = 1.0
    if cell.crowd_penalty > 0.0:
        gamma += cell.crowd_penalty / (1.0 + (cell.crowd_channels / channels) ** 2)
    if cell.small_penalty > 0.0:
        gamma *= 1.0 + cell.small_penalty / (1.0 + (piece / cell.small_bytes) ** 2)
    per_channel = channels * cell.channel_gbytes_per_s * work.thread_factor
    moved = work.size_bytes * gamma * work.chunk_factor / 1000.0

    def moving_us(wire: float, link: float) -> float:
        if wire == 0.0:
            return 0.0
        return wire * moved / min(link * cell.link_share, per_channel)

    inside = moving_us(route.wire_inside, links.inside_gbytes_per_s)
    between = moving_us(route.wire_between, links.between_gbytes_per_s)
    longest = max(inside, between)
    return Times(blend(latency, longest, cell.overlap) - longest, inside, between)


def _latency_us(work: Work, cell: CellValues, links: LinkValues, loops: int, piece: float) -> float:
    route = work.route
    hops = route.hops_inside * cell.hop_us * links.hop_factor
    hops += route.hops_between * cell.net_hop_us
    base = cell.base_us + work.num_channels * cell.proxy_us
    if not route.lock_step:
        return base + hops + loops * cell.turn_us
    steps = route.hops_inside + route.hops_between
    slices = steps * cell.slice_us * (num_slices(work.protocol, piece) - 1)
    return base + loops * (hops + slices)


def blend(latency_us: float, moving_us: float, overlap: float) -> float:
    """(A^p + M^p)^(1/p), never below the larger of the two.

    >>> blend(3.0, 4.0, 1.0), blend(3.0, 4.0, 2.0)
    (7.0, 5.0)
    """
    large, small = max(latency_us, moving_us), min(latency_us, moving_us)
    if small <= 0.0:
        return large
    if overlap == 1.0:
        return large + small
    both: float = large * (1.0 + (small / large) ** overlap) ** (1.0 / overlap)
    return both
