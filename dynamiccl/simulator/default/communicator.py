"""A communicator in the cost model, and the number of channels that it opens."""

from dataclasses import dataclass
from functools import cached_property

from dynamiccl.nccl import MAX_CHANNELS, Algorithm
from dynamiccl.simulator.default.constants import (
    LL_MAX,
    NVLS_CHANNELS,
    PCI_GBYTES_PER_S,
    Generation,
    Hop,
    Release,
)
from dynamiccl.simulator.default.graph import Cpu, Graph, Machine, Path, Search
from dynamiccl.simulator.group import Group

NVLS_KINDS = frozenset({Algorithm.NVLS, Algorithm.NVLSTree})


@dataclass(frozen=True, slots=True)
class Overrides:
    """Settings of a job's environment; None leaves them to NCCL."""

    #: `NCCL_MIN_CTAS` and `NCCL_MAX_CTAS`; rings and trees heed `NCCL_MIN/MAX_NCHANNELS` alike.
    min_channels: int | None = None
    max_channels: int | None = None
    #: `NCCL_NTHREADS`.
    num_threads: int | None = None


@dataclass(frozen=True)
class Communicator:
    """A group of ranks on machines of one kind, in one release."""

    release: Release
    machine: Machine
    group: Group
    graph: Graph
    overrides: Overrides = Overrides()

    @cached_property
    def generation(self) -> Generation:
        """Row of the GPU's tables."""
        return Generation.of(self.machine.compute_capability)

    @cached_property
    def one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.group.num_nodes == 1

    @cached_property
    def column(self) -> int:
        """Column of the bandwidth tables: 1, 2 or more nodes."""
        return min(self.group.num_nodes, 3) - 1

    @cached_property
    def ll_max_row(self) -> int:
        """Row of LL's ceilings: by GPU on one node, by CPU on several."""
        if self.one_node:
            return int(self.generation)
        return 1 if self.machine.cpu in {Cpu.AMD, Cpu.MIXED} else 0

    @cached_property
    def ll_max(self) -> float:
        """Largest bus bandwidth of LL."""
        return LL_MAX[self.ll_max_row][self.column]

    @cached_property
    def num_channels(self) -> int:
        """`comm->nChannels`: twice the search's, within bounds (`src/graph/connect.cc`)."""
        channels = min(2 * self.graph.channels, MAX_CHANNELS)
        fast = self.graph.ring.intra_gbytes_per_s > 45.0
        if self.generation >= Generation.Hopper and not self.one_node and fast and channels < 16:
            channels *= 2
        if self.overrides.max_channels is not None:
            channels = min(channels, self.overrides.max_channels)
        if self.overrides.min_channels is not None:
            channels = max(channels, self.overrides.min_channels)
        if self.release.channels_reach_nvls:
            channels = max(channels, self.nvls_channels)
        return min(channels, MAX_CHANNELS)

    @cached_property
    def nvls_channels(self) -> int:
        """`comm->nvlsChannels`; 0 without NVLS."""
        if self.nvls is None:
            return 0
        hopper, blackwell_node, blackwell_nodes = NVLS_CHANNELS
        blackwell = blackwell_node if self.one_node else blackwell_nodes
        channels = blackwell if self.generation >= Generation.Blackwell else hopper
        channels = min(channels, self.overrides.max_channels or MAX_CHANNELS)
        return max(channels, self.overrides.min_channels or 1)

    @cached_property
    def nvls(self) -> Search | None:
        """The NVLS graph, where NVLS is set up."""
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
        """The link that a step inside a node crosses."""
        nvlink = self.search(algorithm).intra_path is Path.NVL
        return Hop.NVLINK if nvlink else Hop.PCI

    def opened(self, algorithm: Algorithm) -> int:
        """Number of channels opened for an algorithm."""
        return self.nvls_channels if algorithm in NVLS_KINDS else self.num_channels

    @cached_property
    def slow_ring(self) -> bool:
        """Whether a ring is no faster than PCI, and gets half the threads in Simple."""
        ring = self.graph.ring
        return ring.intra_gbytes_per_s * self.graph.channels <= PCI_GBYTES_PER_S
