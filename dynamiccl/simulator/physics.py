"""The time of a call from its route and its parameters (formulas only).

With the channels NC, the chunk C, the threads NT and the route of the algorithm:

    loops  = ceil(size / (NC x C x width))
    piece  = min(C, size / (NC x width))             one channel's bytes in one step
    A      = base + NC x proxy + loops x (hops x hop + slices)    rings: each loop pays the hops
           = base + NC x proxy + hops x hop + loops x turn        pipelines
    beta0  = link x share                            the transport's ceiling (AutoCCL's beta0)
    beta1  = NC x channel x g(NT)                    the protocol's, by channels (AutoCCL's beta1)
    gamma  = (1 + K x^2 / (1 + x^2)) x (1 + k / (1 + (piece / small)^2)),   x = NC / crowd
    M      = wire x size / min(beta0, beta1) x gamma x h(C)
    time   = (A^p + M^p)^(1/p)

This is AutoCCL's two-stage model (NSDI 2025, section 3; docs/simulator.md). `p` says how far A and
M overlap: 1 = one after the other, large = the longer of the two. `g` and `h` are 1 at NCCL's own
value and keep literature's shape; they are fitted to nothing. Times in us, bandwidths in GB/s.

Rings are in lock-step: a rank forwards what its neighbour sent in the step before, so every loop
over the buffers pays all hops again. Trees, NVLS, CollNet, PAT and a ring's Broadcast and Reduce
are pipelines: the hops are paid once, and each further loop costs a turn. Counts of hops are those
of NCCL's own latency model (`src/graph/tuning.cc`, v2.30.7-1), sizes of chunks those of its
`src/init.cc`, `src/enqueue.cc` and `src/device/prims_simple.h`: a buffer has eight steps; a ring's
Simple chunk takes four of them, any other one; half of LL's buffer and a sixteenth of LL128's are
flags.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator.system import Group

MAX_OVERLAP: Final = 8.0
_STEPS: Final = 8
_RING_STEPS: Final = 4
_LL_BUFFER_BYTES: Final = 8 * 512 * 8 * 16
_LL128_BUFFER_BYTES: Final = 120 * 640 * 8 * 8
#: A ring's Simple chunk is sent in two slices of at least so many bytes.
_SLICE_BYTES: Final = 32 << 10
#: Chunks are multiples of it (`ncclProtoGrainSize`, Simple).
GRAIN_BYTES: Final = 512
_NVLS_CHUNK_BYTES: Final = 128 << 10
#: With fewer chunks for each head of each channel NVLS halves its chunk, down to these.
_NVLS_SMALLER: Final = ((64, 64 << 10), (8, 32 << 10), (2, 16 << 10))
NVLS_KINDS: Final = frozenset({Algorithm.NVLS, Algorithm.NVLSTree})
_ROOTED: Final = frozenset({Collective.Broadcast, Collective.Reduce})
GATHERS: Final = frozenset({Collective.AllGather, Collective.ReduceScatter})
_SMALLEST_BEST_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Route:
    """Hops and bytes of one call of an algorithm."""

    hops_inside: float
    hops_between: float
    #: Chunks of a channel in one loop: every rank's in a ring, every head's in NVLS.
    width: int
    lock_step: bool
    #: On the busiest link, for each byte of the call.
    wire_inside: float
    wire_between: float


@cache
def route(group: Group, collective: Collective, algorithm: Algorithm) -> Route:
    """The route of `algorithm` for `collective` among `group`."""
    ranks, nodes, local = group.num_ranks, group.num_nodes, group.ranks_per_node
    depth = math.log2(nodes)
    away = (nodes - 1) / nodes
    gathers, rooted = collective in GATHERS, collective in _ROOTED
    rounds = 2 if collective is Collective.AllReduce else 1
    ring = 1.0 if rooted else rounds * (ranks - 1) / ranks
    inside, between, width, wire_in, wire_out = {
        Algorithm.Ring: (
            rounds * (ranks - nodes),
            rounds * (nodes - 1),
            1 if rooted else ranks,
            ring,
            ring,
        ),
        Algorithm.Tree: (2.0 * (local - 1), 2.0 * depth, 1, 2.0, 2.0),
        Algorithm.NVLS: (2.0, 2.0 * min(nodes - 1, 1), local, 1.0, away * (1 if gathers else 2)),
        Algorithm.NVLSTree: (2.0, 2.0 * depth, local, 1.0, 1.0 if nodes == 2 else 2.0),
        Algorithm.CollNetDirect: (
            2.0 * min(1, local - 1),
            1.0,
            local,
            (1.0 if gathers else 2.0) * (local - 1) / local,
            away if gathers else 1.0,
        ),
        Algorithm.CollNetChain: (2.0 * (local - 1), 1.0, 1, 2.0, 1.0),
        Algorithm.PAT: (0.0, depth, 1, 0.0, away),
    }[algorithm]
    several = nodes > 1
    return Route(
        hops_inside=inside if local > 1 else 0.0,
        hops_between=between if several else 0.0,
        width=width,
        lock_step=algorithm is Algorithm.Ring and not rooted,
        wire_inside=wire_in if local > 1 else 0.0,
        wire_between=wire_out if several else 0.0,
    )


def largest_chunk_bytes(
    collective: Collective, algorithm: Algorithm, protocol: Protocol, buffer_bytes: int
) -> int:
    """Payload of the largest chunk, limited by the buffer."""
    if algorithm in NVLS_KINDS:
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


@dataclass(frozen=True, slots=True)
class CellValues:
    """Parameters of one (algorithm, protocol) in the module's formulas."""

    base_us: float
    hop_us: float
    net_hop_us: float
    slice_us: float
    turn_us: float
    #: For each channel, of what serves them one by one, such as NCCL's proxy thread.
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
    #: Time of a hop inside a node over that with the default transport.
    hop_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """One call as NCCL runs it."""

    route: Route
    protocol: Protocol
    size_bytes: int
    num_channels: int
    chunk_bytes: int
    #: g(NT) and h(C); 1 = NCCL's own.
    thread_factor: float = 1.0
    chunk_factor: float = 1.0


class Times(NamedTuple):
    """Parts of a call's time, us: fixed + max(inside, between)."""

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
    in_two = work.protocol is Protocol.Simple and piece > _SLICE_BYTES
    return base + loops * (hops + (steps * cell.slice_us if in_two else 0.0))


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


def saturating(x: float, half: float, crowding: float) -> float:
    """Bandwidth at x times the best number of channels or threads, over that at the best.

        min(x (1 + half) / (half + x), 1) / (1 + crowding max(0, x - 1))

    It rises, saturates and falls (AutoCCL, NSDI 2025, section 3).
    """
    return min(x * (1.0 + half) / (half + x), 1.0) / (1.0 + crowding * max(0.0, x - 1.0))


@dataclass(frozen=True, slots=True)
class ChunkValues:
    """Strength and largest effect of a chunk, and pieces that a rank's share wants."""

    curvature: float
    largest: float
    pieces: float


def chunk_factor(
    chunks: ChunkValues, rank_bytes: float, default_bytes: int, used_bytes: int
) -> float:
    """Time with a chunk of `used_bytes` over that with NCCL's own.

    q(C / best) / q(default / best)    q(r) = 1 + min(curvature log2(r)^2, largest)
    """
    if used_bytes == default_bytes:
        return 1.0
    best = min(max(rank_bytes / chunks.pieces, _SMALLEST_BEST_BYTES), default_bytes)
    return _parabola(used_bytes / best, chunks) / _parabola(default_bytes / best, chunks)


def _parabola(ratio: float, chunks: ChunkValues) -> float:
    return 1.0 + min(chunks.curvature * math.log2(ratio) ** 2, chunks.largest)
