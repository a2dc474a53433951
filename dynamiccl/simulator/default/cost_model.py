"""NCCL's own choice for a call, from its cost model (`src/graph/tuning.cc`, `src/enqueue.cc`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dynamiccl.nccl import (
    COST_IGNORE,
    NUM_ALGORITHMS,
    NUM_PROTOCOLS,
    VALID_PROTOCOLS,
    Algorithm,
    Collective,
    Config,
    NcclVersion,
    Protocol,
)
from dynamiccl.nccl_costs import TREE_CORRECTED, plateau, size_correction
from dynamiccl.simulator.default.bandwidth import GATHERS, algbw_gbytes_per_s, steps
from dynamiccl.simulator.default.channels import used_channels, used_threads
from dynamiccl.simulator.default.communicator import NVLS_KINDS, Communicator, Overrides
from dynamiccl.simulator.default.constants import (
    BASE_US,
    HOP_US,
    NVLS_TREE_CORRECTED,
    Generation,
    Hop,
    release_of,
)
from dynamiccl.simulator.default.graph import Cpu, Machine, Path
from dynamiccl.simulator.group import Cell, CostLine, Group
from dynamiccl.simulator.system import Call

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pair = tuple[Algorithm, Protocol]

#: CollNet needs a plug-in for switches that reduce, and is off.
_NO_COLLNET: Final = frozenset({Algorithm.CollNetDirect, Algorithm.CollNetChain})
#: Each inter-node ring step posts to the network (`getNetOverhead`), three times in Simple.
_NET_OVERHEAD_US: Final = 1.0
_NET_OVERHEAD_AMD_US: Final = 2.0
_SIMPLE_POSTS: Final = 3
#: PAT: its logarithmic and its linear part.
_PAT_SHARE: Final = 3.5
_PAT_RANK_US: Final = 2.8


class CostModel:
    """The decisions of one NCCL release on machines of one kind, for any group on them."""

    def __init__(
        self, version: NcclVersion, machine: Machine, overrides: Overrides | None = None
    ) -> None:
        """Take the release, the machine, and what the job's environment sets.

        Raises UnknownName for a release whose constants nobody has read.
        """
        self.version = version
        self.machine = machine
        self._release = release_of(version)
        self._overrides = overrides or Overrides()
        self._communicators: dict[Group, Communicator] = {}
        self._lines: dict[Group, Mapping[Cell, CostLine]] = {}

    def communicator(self, group: Group) -> Communicator:
        """A group as the model sees it.

        Raises UnknownName for a shape that the machine's description lacks, and ValueError for
        fewer than two ranks, where NCCL has nothing to decide.
        """
        if group not in self._communicators:
            if group.num_ranks < 2:
                raise ValueError(f"{group} has one rank: NCCL decides nothing")
            graph = self.machine.graph(group)
            comm = Communicator(self._release, self.machine, group, graph, self._overrides)
            self._communicators[group] = comm
        return self._communicators[group]

    def lines(self, group: Group) -> Mapping[Cell, CostLine]:
        """Latency and bandwidth of every available cell, before corrections by size."""
        if group not in self._lines:
            comm = self.communicator(group)
            self._lines[group] = {
                (collective, algorithm, protocol): CostLine(
                    latency_us(comm, collective, algorithm, protocol),
                    algbw_gbytes_per_s(comm, collective, algorithm, protocol),
                )
                for collective, algorithms in VALID_PROTOCOLS.items()
                for algorithm, protocols in sorted(algorithms.items())
                if _has(comm, algorithm)
                for protocol in sorted(protocols)
                if protocol is not Protocol.LL128 or _has_ll128(comm, algorithm)
            }
        return self._lines[group]

    def cells(self, group: Group, collective: Collective) -> Sequence[Pair]:
        """The (algorithm, protocol) pairs that NCCL has, in the order of its cost table."""
        return [cell[1:] for cell in self.lines(group) if cell[0] is collective]

    def line(self, call: Call, algorithm: Algorithm, protocol: Protocol) -> CostLine:
        """Latency and bandwidth of one cell at the call's size.

        Raises KeyError for a cell that NCCL lacks.
        """
        line = self.lines(call.group)[call.collective, algorithm, protocol]
        if call.collective is not Collective.AllReduce:
            return line
        comm = self.communicator(call.group)
        latency = _plateau(comm, algorithm, protocol, call.size_bytes)
        bandwidth = _correction(comm, algorithm, protocol, call.size_bytes)
        if latency == bandwidth == 1.0:
            return line
        return CostLine(line.latency_us * latency, line.algbw_gbytes_per_s * bandwidth)

    def cost_us(self, call: Call, algorithm: Algorithm, protocol: Protocol) -> float:
        """NCCL's predicted time of one cell, us. Raises KeyError for a cell that it lacks."""
        line = self.line(call, algorithm, protocol)
        return line.latency_us + call.size_bytes / (1000.0 * line.algbw_gbytes_per_s)

    def cost_table(self, call: Call) -> "npt.NDArray[np.float32]":
        """The table passed to a tuner: (7 algorithms, 3 protocols) us, -1 = unavailable."""
        import numpy as np  # takes most of a start of whoever needs no table

        table = np.full((NUM_ALGORITHMS, NUM_PROTOCOLS), COST_IGNORE, dtype=np.float32)
        for algorithm, protocol in self.cells(call.group, call.collective):
            table[algorithm, protocol] = self.cost_us(call, algorithm, protocol)
        return table

    def max_channels(self, group: Group, algorithm: Algorithm) -> int:
        """Channels that a communicator opens for an algorithm; 0 where it has none."""
        return self.communicator(group).opened(algorithm)

    def num_channels(
        self, call: Call, algorithm: Algorithm, protocol: Protocol, asked: int | None
    ) -> int:
        """Channels that carry data when `asked` are asked for; None = NCCL's own number."""
        comm = self.communicator(call.group)
        return used_channels(comm, call.collective, algorithm, protocol, call.size_bytes, asked)

    def reopened(self, *, least: int | None = None, most: int | None = None) -> "CostModel":
        """The model with at least or at most so many channels opened (`NCCL_MIN/MAX_CTAS`)."""
        low = self._overrides.min_channels if least is None else least
        high = self._overrides.max_channels if most is None else most
        if low is not None and high is not None:
            # NCCL would let the lower bound win; the last one set is meant here.
            low, high = (min(low, high), high) if least is None else (low, max(low, high))
        overrides = replace(self._overrides, min_channels=low, max_channels=high)
        return CostModel(self.version, self.machine, overrides)

    def resolve(self, call: Call, config: Config) -> Config:
        """What runs when `config` is asked for; no knob of the answer is AUTO but the chunk.

        What is AUTO goes to the cheapest cell that is left, ties to the lower index, and channels
        are those that carry something. Raises KeyError for a cell that NCCL lacks.
        """
        cells = [
            cell
            for cell in self.cells(call.group, call.collective)
            if config.algorithm in {None, cell[0]} and config.protocol in {None, cell[1]}
        ]
        if not cells:
            raise KeyError(f"NCCL has no {config.key} for {call.collective.wire} on {call.group}")
        if len(cells) > 1:
            table = self.cost_table(call)
            cells.sort(key=lambda cell: (table[cell], cell))
        algorithm, protocol = cells[0]
        channels = self.num_channels(call, algorithm, protocol, config.num_channels)
        return Config(algorithm, protocol, channels, config.chunk_bytes)

    def threads(self, call: Call, algorithm: Algorithm, protocol: Protocol) -> int:
        """Threads of each channel's block."""
        comm = self.communicator(call.group)
        return used_threads(comm, algorithm, protocol, call.size_bytes)


def _has(comm: Communicator, algorithm: Algorithm) -> bool:
    if algorithm in comm.machine.without or algorithm in _NO_COLLNET:
        return False
    if algorithm in NVLS_KINDS:
        # On several nodes NVLS itself needs CollNet.
        right = comm.one_node == (algorithm is Algorithm.NVLS)
        return right and comm.nvls is not None and comm.nvls.channels >= 2
    if algorithm is Algorithm.PAT:
        return comm.group.ranks_per_node == 1
    return True


def _has_ll128(comm: Communicator, algorithm: Algorithm) -> bool:
    search, generation = comm.search(algorithm), comm.generation
    most = comm.release.ll128_hopper_path if generation >= Generation.Hopper else Path.PXB
    return search.intra_path <= Path.NVB and search.inter_path <= most


def _plateau(comm: Communicator, algorithm: Algorithm, protocol: Protocol, size: int) -> float:
    if algorithm is not Algorithm.Ring or protocol is not Protocol.Simple or comm.one_node:
        return 1.0
    since_ampere = comm.generation >= Generation.Ampere
    return plateau(size, comm.num_channels, comm.group.num_ranks, since_ampere=since_ampere)


def _correction(comm: Communicator, algorithm: Algorithm, protocol: Protocol, size: int) -> float:
    end = 0
    if algorithm is Algorithm.Tree:
        end = TREE_CORRECTED
    elif algorithm is Algorithm.NVLSTree and comm.release.nvls_tree_corrected:
        blackwell = comm.generation >= Generation.Blackwell
        end = NVLS_TREE_CORRECTED if blackwell and comm.machine.cpu.x86 else 0
    return size_correction(protocol, size, end)


def latency_us(
    comm: Communicator, collective: Collective, algorithm: Algorithm, protocol: Protocol
) -> float:
    """Time of an empty message, before corrections by size (`ncclTopoTuneModel`)."""
    base = BASE_US[algorithm][protocol]
    inside = HOP_US[comm.hop_inside(algorithm)][algorithm][protocol]
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


def _between_us(comm: Communicator, algorithm: Algorithm, protocol: Protocol) -> float:
    """One hop over the network; where every node has one rank, no other hop hides it."""
    alone = comm.group.ranks_per_node == 1
    if alone or algorithm is not Algorithm.NVLSTree:
        hop = HOP_US[Hop.NET][Algorithm.Tree if alone else algorithm][protocol]
    else:
        hop = comm.release.nvls_tree_net_us
    card = comm.search(algorithm).inter_latency_us
    return hop + card * (2 if protocol is Protocol.Simple else 1)


def _ring_us(comm: Communicator, collective: Collective, protocol: Protocol) -> float:
    hop = comm.hop_inside(Algorithm.Ring)
    inside = HOP_US[hop][Algorithm.Ring][protocol]
    if collective in GATHERS or collective is Collective.AllReduce:
        rounds = 2 if collective is Collective.AllReduce else 1
        crossings = 0 if comm.one_node else rounds * (comm.group.num_nodes - 1)
        inside = max(inside, _overhead_us(comm, protocol))
        between = _between_us(comm, Algorithm.Ring, protocol)
        return (steps(comm, collective) - crossings) * inside + crossings * between
    crossed = hop if comm.one_node else Hop.NET
    if comm.graph.ring.same_channels:
        return HOP_US[crossed][Algorithm.Ring][protocol]
    # NCCL stands in for waiting on chunks with the tree's hop in Simple.
    like = Algorithm.Tree if protocol is Protocol.Simple else Algorithm.Ring
    return steps(comm, collective) * HOP_US[crossed][like][protocol]


def _overhead_us(comm: Communicator, protocol: Protocol) -> float:
    if comm.one_node:
        return 0.0
    once = _NET_OVERHEAD_AMD_US if comm.machine.cpu is Cpu.AMD else _NET_OVERHEAD_US
    return once * (_SIMPLE_POSTS if protocol is Protocol.Simple else 1)
