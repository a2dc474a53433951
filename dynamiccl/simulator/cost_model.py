"""NCCL's own choice for a call, from its cost model (`src/graph/tuning.cc`, `src/enqueue.cc`).

A call takes the cheapest cell (`ncclTopoTuneModel`), with as many channels as its size keeps busy
(`topoGetAlgoInfo`) or as a tuner asks for. `scheduleCollTasksToPlan` spreads the payload in cells,
so that fewer channels may carry data, or one more where the last cell does not fit evenly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from dynamiccl import nccl
from dynamiccl.nccl import Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator import machine as hardware
from dynamiccl.simulator.machine import Cpu, Generation, Graph, Hop, Machine, Path, Release, Search
from dynamiccl.simulator.physics import GATHERS, NVLS_KINDS
from dynamiccl.simulator.system import Call, Cell, CostLine, Group

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pair = tuple[Algorithm, Protocol]
#: The pair that runs, and its channels.
Ran = tuple[Algorithm, Protocol, int]
#: CollNet needs a plug-in for switches that reduce, and is off.
_NO_COLLNET: Final = frozenset({Algorithm.CollNetDirect, Algorithm.CollNetChain})
#: Each inter-node ring step posts to the network (`getNetOverhead`), three times in Simple.
_NET_OVERHEAD_US: Final = 1.0
_NET_OVERHEAD_AMD_US: Final = 2.0
_SIMPLE_POSTS: Final = 3
_PAT_SHARE: Final = 3.5
_PAT_RANK_US: Final = 2.8
#: Of the ring's bandwidth, before limits of their own.
_LL_SHARE: Final = 0.5
_SHARE: Final = 0.92
_TREE_LL_SHARE: Final = 1.0 / 3.8
_TREE_LL128_SHARE: Final = 7.0 / 9.0
_TREE_LL128_SHARE_NODES: Final = 120.0 / 128.0
_PLAIN_TREE_SHARE: Final = 0.85
_PAT_OF_TREE: Final = 0.75
#: Until 2.27: NVLS's algorithm bandwidth over its bus bandwidth.
_NVLS_RATIO: Final = 5.0 / 6.0
_NVLS_NET_SHARE: Final = 0.9
#: Half of LL's packets are flags, and NCCL counts it four times.
_LL_TRAFFIC: Final = 4
_GRAIN_BYTES: Final = 16


@dataclass(frozen=True)
class _Communicator:
    release: Release
    machine: Machine
    group: Group
    graph: Graph
    #: `NCCL_MIN_CTAS` and `NCCL_MAX_CTAS`; rings and trees heed `NCCL_MIN/MAX_NCHANNELS` alike.
    min_channels: int | None
    max_channels: int | None

    @cached_property
    def generation(self) -> Generation:
        return Generation.of(self.machine.compute_capability)

    @cached_property
    def one_node(self) -> bool:
        return self.group.num_nodes == 1

    @cached_property
    def column(self) -> int:
        return min(self.group.num_nodes, 3) - 1

    @cached_property
    def ll_max(self) -> float:
        """Largest bus bandwidth of LL: by GPU on one node, by CPU on several."""
        by_cpu = 1 if self.machine.cpu in {Cpu.AMD, Cpu.MIXED} else 0
        return hardware.LL_MAX[self.generation if self.one_node else by_cpu][self.column]

    @cached_property
    def num_channels(self) -> int:
        """`comm->nChannels` (`src/graph/connect.cc`)."""
        channels = min(2 * self.graph.channels, nccl.MAX_CHANNELS)
        fast = self.graph.ring.gbytes_per_s[0] > 45.0
        if self.generation >= Generation.Hopper and not self.one_node and fast and channels < 16:
            channels *= 2
        if self.max_channels is not None:
            channels = min(channels, self.max_channels)
        if self.min_channels is not None:
            channels = max(channels, self.min_channels)
        if self.release.channels_reach_nvls:
            channels = max(channels, self.nvls_channels)
        return min(channels, nccl.MAX_CHANNELS)

    @cached_property
    def nvls_channels(self) -> int:
        """`comm->nvlsChannels`; 0 without NVLS."""
        if self.nvls is None:
            return 0
        hopper, blackwell_node, blackwell_nodes = hardware.NVLS_CHANNELS
        blackwell = blackwell_node if self.one_node else blackwell_nodes
        channels = blackwell if self.generation >= Generation.Blackwell else hopper
        channels = min(channels, self.max_channels or nccl.MAX_CHANNELS)
        return max(channels, self.min_channels or 1)

    @cached_property
    def nvls(self) -> Search | None:
        enough = self.group.ranks_per_node >= self.release.nvls_min_ranks
        return self.graph.nvls if enough and self.generation >= Generation.Hopper else None

    def search(self, algorithm: Algorithm) -> Search:
        """The graph that an algorithm runs on. Raises KeyError where it has none."""
        if algorithm in NVLS_KINDS:
            if self.nvls is None:
                raise KeyError(f"no NVLS on {self.machine.name} for {self.group}")
            return self.nvls
        return self.graph.ring if algorithm is Algorithm.Ring else self.graph.tree

    def hop_inside(self, algorithm: Algorithm) -> Hop:
        nvlink = self.search(algorithm).paths[0] is Path.NVL
        return Hop.NVLINK if nvlink else Hop.PCI

    def opened(self, algorithm: Algorithm) -> int:
        return self.nvls_channels if algorithm in NVLS_KINDS else self.num_channels


class CostModel:
    """The decisions of one NCCL release on machines of one kind, for any group on them."""

    def __init__(
        self,
        version: NcclVersion,
        machine: Machine,
        min_channels: int | None = None,
        max_channels: int | None = None,
    ) -> None:
        """Channels as by NCCL_MIN_CTAS and NCCL_MAX_CTAS. Raises UnknownName for the release."""
        self.nccl_version = version
        self.machine = machine
        self._release = hardware.release_of(version)
        self._opens = min_channels, max_channels
        self._communicators: dict[Group, _Communicator] = {}
        self._lines: dict[Group, Mapping[Cell, CostLine]] = {}

    def _communicator(self, group: Group) -> _Communicator:
        """Raises UnknownName for an unknown shape, and ValueError for fewer than two ranks."""
        if group not in self._communicators:
            if group.num_ranks < 2:
                raise ValueError(f"{group} has one rank: NCCL decides nothing")
            graph = self.machine.graph(group)
            comm = _Communicator(self._release, self.machine, group, graph, *self._opens)
            self._communicators[group] = comm
        return self._communicators[group]

    def lines(self, group: Group) -> Mapping[Cell, CostLine]:
        """Latency and bandwidth of every available cell, before corrections by size."""
        if group not in self._lines:
            comm = self._communicator(group)
            self._lines[group] = {
                (collective, algorithm, protocol): CostLine(
                    _latency_us(comm, collective, algorithm, protocol),
                    _algbw_gbytes_per_s(comm, collective, algorithm, protocol),
                )
                for collective, algorithms in nccl.VALID_PROTOCOLS.items()
                for algorithm, protocols in sorted(algorithms.items())
                if _has(comm, algorithm)
                for protocol in sorted(protocols)
                if protocol is not Protocol.LL128 or _has_ll128(comm, algorithm)
            }
        return self._lines[group]

    def cells(self, group: Group, collective: Collective) -> Sequence[Pair]:
        """The pairs that NCCL has, in the order of its cost table."""
        return [cell[1:] for cell in self.lines(group) if cell[0] is collective]

    def line(self, call: Call, algorithm: Algorithm, protocol: Protocol) -> CostLine:
        """Latency and bandwidth of one cell at the call's size; KeyError where NCCL lacks it."""
        line = self.lines(call.group)[call.collective, algorithm, protocol]
        if call.collective is not Collective.AllReduce:
            return line
        comm = self._communicator(call.group)
        latency, bandwidth = _corrections(comm, algorithm, protocol, call.size_bytes)
        return CostLine(line.latency_us * latency, line.algbw_gbytes_per_s * bandwidth)

    def cost_us(self, call: Call, algorithm: Algorithm, protocol: Protocol) -> float:
        """NCCL's predicted time of one cell, us; KeyError where it lacks the cell."""
        line = self.line(call, algorithm, protocol)
        return line.latency_us + call.size_bytes / (1000.0 * line.algbw_gbytes_per_s)

    def cost_table(self, call: Call) -> "npt.NDArray[np.float32]":
        """The table passed to a tuner: (7 algorithms, 3 protocols) us, -1 = unavailable."""
        import numpy as np  # takes most of a start of whoever needs no table

        table = np.full(
            (nccl.NUM_ALGORITHMS, nccl.NUM_PROTOCOLS), nccl.COST_IGNORE, dtype=np.float32
        )
        for algorithm, protocol in self.cells(call.group, call.collective):
            table[algorithm, protocol] = self.cost_us(call, algorithm, protocol)
        return table

    def max_channels(self, group: Group, algorithm: Algorithm) -> int:
        """Channels that a communicator opens for an algorithm; 0 where it has none."""
        return self._communicator(group).opened(algorithm)

    def num_channels(
        self, call: Call, algorithm: Algorithm, protocol: Protocol, asked: int | None = None
    ) -> int:
        """Channels, >= 1, that carry data when `asked` are asked for; None = NCCL's own number."""
        comm = self._communicator(call.group)
        opened = comm.opened(algorithm)
        most = min(max(asked or 0, 1), opened)
        if asked is None:
            most = _tuned(comm, algorithm, protocol, call.size_bytes)
        num_bytes, per_byte = _payload(comm, call.collective, protocol, call.size_bytes)
        least = comm.release.min_traffic_bytes
        # NCCL rounds this up to 16 bytes since 2.29, which no count below can tell.
        per_channel = max(least, num_bytes * per_byte // most)
        cell = _up(_up(least, per_byte), _GRAIN_BYTES) * _GRAIN_BYTES
        cells = max(_up(num_bytes, cell), 1)
        cells_each = min(cells, _up(per_channel, cell * per_byte))
        return min(_up(cells, cells_each), opened)

    def reopened(self, *, least: int | None = None, most: int | None = None) -> "CostModel":
        """The model with at least or at most so many channels opened (`NCCL_MIN/MAX_CTAS`)."""
        low = self._opens[0] if least is None else least
        high = self._opens[1] if most is None else most
        if low is not None and high is not None:
            # NCCL would let the lower bound win; here the last one set does.
            low, high = (min(low, high), high) if least is None else (low, max(low, high))
        return CostModel(self.nccl_version, self.machine, low, high)

    def resolve(self, call: Call, config: Config) -> Config:
        """`ran`, as a config."""
        return Config(*self.ran(call, config), config.chunk_bytes)

    def ran(self, call: Call, config: Config) -> Ran:
        """What runs. AUTO takes the cheapest cell, ties the lower index. KeyError: none is left."""
        cells = [
            cell
            for cell in self.cells(call.group, call.collective)
            if config.algorithm in {None, cell[0]} and config.protocol in {None, cell[1]}
        ]
        if not cells:
            raise KeyError(f"NCCL has no {config.key} for {call.collective.wire}")
        if len(cells) > 1:
            table = self.cost_table(call)
            cells.sort(key=lambda cell: (table[cell], cell))
        return *cells[0], self.num_channels(call, *cells[0], config.num_channels)


def _has(comm: _Communicator, algorithm: Algorithm) -> bool:
    if algorithm in comm.machine.without or algorithm in _NO_COLLNET:
        return False
    if algorithm in NVLS_KINDS:
        # On several nodes NVLS itself needs CollNet.
        right = comm.one_node == (algorithm is Algorithm.NVLS)
        return right and comm.nvls is not None and comm.nvls.channels >= 2
    if algorithm is Algorithm.PAT:
        return comm.group.ranks_per_node == 1
    return True


def _has_ll128(comm: _Communicator, algorithm: Algorithm) -> bool:
    inside, between = comm.search(algorithm).paths
    is_hopper = comm.generation >= Generation.Hopper
    most = comm.release.ll128_hopper_path if is_hopper else Path.PXB
    return inside <= Path.NVB and between <= most


def _corrections(
    comm: _Communicator, algorithm: Algorithm, protocol: Protocol, size: int
) -> tuple[float, float]:
    latency, end = 1.0, 0
    if algorithm is Algorithm.Ring and protocol is Protocol.Simple and not comm.one_node:
        since_ampere = comm.generation >= Generation.Ampere
        ranks = comm.group.num_ranks
        latency = nccl.plateau(size, comm.num_channels, ranks, since_ampere=since_ampere)
    elif algorithm is Algorithm.Tree:
        end = nccl.TREE_CORRECTED
    elif algorithm is Algorithm.NVLSTree and comm.release.nvls_tree_corrected:
        blackwell = comm.generation >= Generation.Blackwell
        end = hardware.NVLS_TREE_CORRECTED if blackwell and comm.machine.cpu.x86 else 0
    return latency, nccl.size_correction(protocol, size, end)


def _latency_us(
    comm: _Communicator, collective: Collective, algorithm: Algorithm, protocol: Protocol
) -> float:
    """Time of an empty message, before corrections by size (`ncclTopoTuneModel`)."""
    base = hardware.BASE_US[algorithm][protocol]
    inside = hardware.HOP_US[comm.hop_inside(algorithm)][algorithm][protocol]
    between = _between_us(comm, algorithm, protocol)
    depth = comm.group.num_nodes.bit_length() - 1
    if algorithm is Algorithm.Ring:
        return base + _ring_us(comm, collective, protocol)
    if algorithm is Algorithm.Tree:
        return base + 2 * ((comm.group.ranks_per_node - 1) * inside + depth * between)
    if algorithm is Algorithm.NVLS:
        return inside + (0.0 if comm.one_node else between)
    if algorithm is Algorithm.NVLSTree:
        return base + inside + 2 * depth * between
    return base + depth * between / _PAT_SHARE + comm.group.num_ranks * _PAT_RANK_US


def _between_us(comm: _Communicator, algorithm: Algorithm, protocol: Protocol) -> float:
    """One hop over the network; where nodes have one rank, no other hop hides it."""
    alone = comm.group.ranks_per_node == 1
    if alone or algorithm is not Algorithm.NVLSTree:
        hop = hardware.HOP_US[Hop.NET][Algorithm.Tree if alone else algorithm][protocol]
    else:
        hop = comm.release.nvls_tree_net_us
    card = comm.search(algorithm).inter_latency_us
    return hop + card * (2 if protocol is Protocol.Simple else 1)


def _ring_us(comm: _Communicator, collective: Collective, protocol: Protocol) -> float:
    hop = comm.hop_inside(Algorithm.Ring)
    inside = hardware.HOP_US[hop][Algorithm.Ring][protocol]
    if collective in GATHERS or collective is Collective.AllReduce:
        rounds = 2 if collective is Collective.AllReduce else 1
        crossings = 0 if comm.one_node else rounds * (comm.group.num_nodes - 1)
        inside = max(inside, _overhead_us(comm, protocol))
        between = _between_us(comm, Algorithm.Ring, protocol)
        return (_steps(comm, collective) - crossings) * inside + crossings * between
    crossed = hop if comm.one_node else Hop.NET
    if comm.graph.ring.same_channels:
        return hardware.HOP_US[crossed][Algorithm.Ring][protocol]
    # In Simple, NCCL uses the tree's hop for waiting on chunks.
    like = Algorithm.Tree if protocol is Protocol.Simple else Algorithm.Ring
    return _steps(comm, collective) * hardware.HOP_US[crossed][like][protocol]


def _overhead_us(comm: _Communicator, protocol: Protocol) -> float:
    if comm.one_node:
        return 0.0
    once = _NET_OVERHEAD_AMD_US if comm.machine.cpu is Cpu.AMD else _NET_OVERHEAD_US
    return once * (_SIMPLE_POSTS if protocol is Protocol.Simple else 1)


def _algbw_gbytes_per_s(
    comm: _Communicator, collective: Collective, algorithm: Algorithm, protocol: Protocol
) -> float:
    bus = _bus(comm, collective, algorithm, protocol)
    if algorithm is not Algorithm.Ring and collective in GATHERS:
        return bus
    by_steps = comm.group.num_ranks / _steps(comm, collective)
    if algorithm is Algorithm.Ring:
        return bus * by_steps
    if algorithm in {Algorithm.NVLS, Algorithm.NVLSTree}:
        return bus * (by_steps if comm.release.nvls_by_efficiency else _NVLS_RATIO)
    return bus * 0.5


def _steps(comm: _Communicator, collective: Collective) -> int:
    """What each link of a ring carries, in shares of one rank."""
    if collective is Collective.AllReduce:
        return 2 * (comm.group.num_ranks - 1)
    return comm.group.num_ranks - 1 if collective in GATHERS else comm.group.num_ranks


def _bus(
    comm: _Communicator, collective: Collective, algorithm: Algorithm, protocol: Protocol
) -> float:
    if algorithm is Algorithm.Ring:
        return _ring(comm, protocol)
    if algorithm is Algorithm.Tree:
        return _tree(comm, protocol)
    if algorithm is Algorithm.PAT:
        return comm.graph.channels * _per_channel(comm, comm.graph.tree) * _PAT_OF_TREE
    return _nvls(comm, collective) if algorithm is Algorithm.NVLS else _nvls_tree(comm, collective)


def _per_channel(comm: _Communicator, search: Search) -> float:
    return search.gbytes_per_s[comm.group.num_nodes > 2]


def _ring(comm: _Communicator, protocol: Protocol) -> float:
    channels = comm.graph.channels
    bus = channels * _per_channel(comm, comm.graph.ring)
    if protocol is Protocol.LL:
        return min(comm.ll_max, bus * _LL_SHARE)
    if protocol is Protocol.LL128:
        most = comm.release.ring_ll128[comm.generation][comm.column]
        return min(bus * _SHARE, channels * most)
    return bus


def _tree(comm: _Communicator, protocol: Protocol) -> float:
    channels = comm.graph.channels
    bus = channels * _per_channel(comm, comm.graph.tree)
    most = comm.release.tree[comm.generation][comm.column]
    bus = min(bus * _SHARE, channels * most)
    if protocol is Protocol.LL:
        bus = min(bus * _TREE_LL_SHARE, comm.ll_max)
    elif protocol is Protocol.LL128:
        share = _TREE_LL128_SHARE if comm.one_node else _TREE_LL128_SHARE_NODES
        most = comm.release.tree_ll128[comm.generation][comm.column]
        bus = min(bus * share, channels * most)
    return bus * (_PLAIN_TREE_SHARE if comm.graph.tree.plain_tree else 1.0)


def _nvls(comm: _Communicator, collective: Collective) -> float:
    search = comm.search(Algorithm.NVLS)
    intra, inter = search.gbytes_per_s
    if comm.release.nvls_by_efficiency:
        return search.channels * min(_nvls_intra(comm, collective), inter)
    if collective in GATHERS:
        ranks = comm.group.ranks_per_node
        intra, inter = intra * (ranks - 1) / ranks, inter * _NVLS_NET_SHARE
    return search.channels * min(intra, inter)


def _nvls_tree(comm: _Communicator, collective: Collective) -> float:
    search = comm.search(Algorithm.NVLSTree)
    two, (intra, inter) = comm.group.num_nodes <= 2, search.gbytes_per_s
    if comm.release.nvls_by_efficiency:
        most = comm.release.nvls_tree[comm.generation][comm.column]
        inter = min(inter * (2 if two else 1), most)
        return search.channels * min(_nvls_intra(comm, collective), inter)
    return search.channels * min(intra, inter if two else inter / 2)


def _nvls_intra(comm: _Communicator, collective: Collective) -> float:
    search = comm.search(Algorithm.NVLS)
    share = (search.channels - 1) / search.channels
    intra = search.gbytes_per_s[0] * hardware.NVLS_EFFICIENCY[comm.generation] * share
    if collective is Collective.AllReduce:
        return 2.0 * intra
    ranks = comm.group.ranks_per_node
    return intra * (ranks - 1) / ranks


def _tuned(comm: _Communicator, algorithm: Algorithm, protocol: Protocol, size_bytes: int) -> int:
    channels, threads = comm.opened(algorithm), _most_threads(comm, algorithm, protocol)
    if threads == 0 or algorithm in NVLS_KINDS:
        return channels
    each = hardware.THREAD_BYTES[protocol]
    if algorithm is Algorithm.Ring and protocol is Protocol.LL:
        each *= comm.group.num_ranks
    return min(max(int(size_bytes // (threads * each)), 1), channels)


def _most_threads(comm: _Communicator, algorithm: Algorithm, protocol: Protocol) -> int:
    """`comm->maxThreads`. PAT has none, so that its channels never shrink."""
    if algorithm is Algorithm.PAT:
        return 0
    if algorithm in NVLS_KINDS or protocol is Protocol.LL128:
        return hardware.MAX_THREADS
    is_slow = comm.graph.ring.gbytes_per_s[0] * comm.graph.channels <= hardware.PCI_GBYTES_PER_S
    halved = algorithm is Algorithm.Ring and protocol is Protocol.Simple and is_slow
    return hardware.THREADS // 2 if halved else hardware.THREADS


def _payload(
    comm: _Communicator, collective: Collective, protocol: Protocol, size_bytes: int
) -> tuple[int, int]:
    num_bytes, traffic = size_bytes, 1
    if collective is Collective.AllReduce:
        traffic = 2
    elif collective in GATHERS:
        num_bytes, traffic = size_bytes // comm.group.num_ranks, comm.group.num_ranks
    return num_bytes, traffic * (_LL_TRAFFIC if protocol is Protocol.LL else 1)


def _up(a: int, b: int) -> int:
    return -(-a // b)
