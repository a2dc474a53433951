"""What NCCL's cost model starts from: searches on a machine, and constants of a release.

`NCCL_DEBUG_SUBSYS=GRAPH` prints searches (`src/graph/search.cc`, ncclTopoPrintGraph): `Pattern 4,
crossNic 0, nChannels 12, bw 30.000000/30.000000, type NVL/PIX, sameChannels 1` is a ring of H100.
Constants are from `src/graph/tuning.cc` unless another file is named, in NVIDIA/nccl at v2.27.3-1,
v2.27.5-1, v2.27.7-1, v2.28.3-1, v2.28.7-1, v2.28.9-1, v2.29.2-1, v2.29.7-1, v2.30.3-1 and
v2.30.7-1. Latencies are us, bandwidths GB/s (10^9).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, StrEnum
from functools import cache
from importlib import resources
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator

from dynamiccl.errors import MissingPath, UnknownName, UserError
from dynamiccl.files import toml_names
from dynamiccl.nccl import Algorithm, NcclVersion, Protocol
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.toml_table import Table, parse_toml

Triple = tuple[float, float, float]
_SUFFIX: Final = ".toml"
_SHIPPED: Final = resources.files(__package__) / "machines"


class Path(IntEnum):
    """Distance of two devices (`PATH_*`, `src/graph/topo.h` since 2.27)."""

    LOC = 0
    NVL = 1
    NVB = 2
    C2C = 3
    PIX = 4
    PXB = 5
    P2C = 6
    PXN = 7
    PHB = 8
    SYS = 9


class Pattern(StrEnum):
    """The searched pattern. PAT runs on the trees, NVLSTree on the NVLS graph."""

    RING = "ring"
    TREE = "tree"
    NVLS = "nvls"


class Cpu(StrEnum):
    """Processors that the model tells apart."""

    INTEL = "x86-intel"
    AMD = "x86-amd"
    MIXED = "x86-mixed"
    ARM = "arm"

    @property
    def x86(self) -> bool:
        """Whether the architecture is x86."""
        return self is not Cpu.ARM


def _path(name: str) -> Path:
    if name not in Path.__members__:
        raise UnknownName("path", name, Path.__members__)
    return Path[name]


_Path = Annotated[Path, BeforeValidator(_path)]
_Algorithm = Annotated[Algorithm, BeforeValidator(Algorithm.parse)]


class Search(Table):
    """One search's result (`ncclTopoGraph`), and the shapes it holds for."""

    pattern: Pattern
    #: NCCL printed it, its rules, recorded costs, or a guess.
    basis: Literal["read", "derived", "fitted", "assumed"]
    nodes: tuple[int, int]
    ranks_per_node: tuple[int, int]
    channels: int
    #: Of one channel, inside a node and between nodes.
    gbytes_per_s: tuple[float, float]
    #: The longest between GPUs, and between a GPU and its network card.
    paths: tuple[_Path, _Path]
    inter_latency_us: float = 0.0
    #: Whether all channels visit the GPUs in the same order.
    same_channels: bool = True
    #: Tree: NCCL_TOPO_PATTERN_TREE, neither split nor balanced.
    plain_tree: bool = False

    def holds_for(self, group: Group) -> bool:
        """Whether communicators of that shape get this result."""
        return (
            self.nodes[0] <= group.num_nodes <= self.nodes[1]
            and self.ranks_per_node[0] <= group.ranks_per_node <= self.ranks_per_node[1]
        )


@dataclass(frozen=True, slots=True)
class Graph:
    """The searches of one shape of communicator."""

    ring: Search
    tree: Search
    #: None where NVLS finds no NVSwitch.
    nvls: Search | None

    @property
    def channels(self) -> int:
        """Channels that ring and tree searches both found (`src/init.cc`)."""
        return min(self.ring.channels, self.tree.channels)


class Machine(Table):
    """A kind of node, with the results of NCCL's searches on it."""

    #: Of the file.
    name: str = ""
    description: str
    compute_capability: float
    cpu: Cpu
    search: tuple[Search, ...]
    origin: str
    without: frozenset[_Algorithm] = frozenset()
    #: The `topology` of decisions recorded on such a machine.
    recorded_as: str = ""

    def graph(self, group: Group) -> Graph:
        """The search results for a shape. Raises UnknownName for one not described."""
        found = {search.pattern: search for search in self.search if search.holds_for(group)}
        ring, tree = found.get(Pattern.RING), found.get(Pattern.TREE)
        if ring is None or tree is None:
            rings = [search for search in self.search if search.pattern is Pattern.RING]
            known = [f"{_span(ring.nodes)} x {_span(ring.ranks_per_node)}" for ring in rings]
            shape = f"{group.num_nodes} x {group.ranks_per_node}"
            raise UnknownName(f"shape of nodes x ranks on {self.name}", shape, known)
        return Graph(ring, tree, found.get(Pattern.NVLS))


def _span(ends: tuple[int, int]) -> str:
    low, high = ends
    return str(low) if low == high else f"{low}-{high}"


def machine_names() -> list[str]:
    """Names of the built-in machines."""
    return toml_names(_SHIPPED)


def find_machine(name: str) -> Machine:
    """A built-in machine, or that of a TOML file. Raises UnknownName, and as `parse_toml`."""
    file = FilePath(name)
    if file.suffix == _SUFFIX:
        if not file.is_file():
            raise MissingPath("machine file", file, f"choose from {', '.join(machine_names())}")
        text = file.read_bytes()
    elif name in machine_names():
        text = (_SHIPPED / f"{name}{_SUFFIX}").read_bytes()
    else:
        raise UnknownName("machine", name, machine_names())
    return _parsed(name, file.stem if file.suffix == _SUFFIX else name, text)


@cache
def _parsed(where: str, name: str, text: bytes) -> Machine:
    found = parse_toml(Machine, text, where=f"machine {where}")
    if found.name:
        raise UserError(f"machine {where}: 'name' is that of the file; take the line away")
    return found.model_copy(update={"name": name})


class Generation(IntEnum):
    """Row of the bandwidth tables: by the smallest compute capability of all GPUs."""

    Volta = 0
    Ampere = 1
    Hopper = 2
    Blackwell = 3

    @classmethod
    def of(cls, compute_capability: float) -> "Generation":
        """The row for a capability such as 9.0."""
        starts = {cls.Blackwell: 10.0, cls.Hopper: 9.0, cls.Ampere: 8.0}
        return next((row for row, since in starts.items() if compute_capability >= since), cls(0))


class Hop(Enum):
    """The link that a step crosses: NVLink, another one inside a node, or the network."""

    NVLINK = "nvlink"
    PCI = "pci"
    NET = "net"


def _by_protocol(ll: float, ll128: float, simple: float) -> Mapping[Protocol, float]:
    return {Protocol.LL: ll, Protocol.LL128: ll128, Protocol.Simple: simple}


_NONE: Final = _by_protocol(0.0, 0.0, 0.0)
#: `baseLatencies`.
BASE_US: Final[Mapping[Algorithm, Mapping[Protocol, float]]] = {
    Algorithm.Tree: _by_protocol(6.8, 14.0, 8.4),
    Algorithm.Ring: _by_protocol(6.6, 14.0, 8.4),
    Algorithm.NVLS: _NONE,
    Algorithm.NVLSTree: _NONE,
    Algorithm.PAT: _by_protocol(8.0, 8.0, 8.0),
}
#: `hwLatencies`: one hop. NVLSTree's network hop depends on the release.
HOP_US: Final[Mapping[Hop, Mapping[Algorithm, Mapping[Protocol, float]]]] = {
    Hop.NVLINK: {
        Algorithm.Tree: _by_protocol(0.6, 1.25, 4.0),
        Algorithm.Ring: _by_protocol(0.6, 1.9, 3.4),
        Algorithm.NVLS: _by_protocol(0.0, 0.0, 25.0),
        Algorithm.NVLSTree: _by_protocol(0.0, 0.0, 25.0),
        Algorithm.PAT: _by_protocol(0.0, 0.0, 4.0),
    },
    Hop.PCI: {
        Algorithm.Tree: _by_protocol(1.0, 1.9, 4.0),
        Algorithm.Ring: _by_protocol(1.0, 2.5, 5.7),
        Algorithm.NVLS: _NONE,
        Algorithm.NVLSTree: _NONE,
        Algorithm.PAT: _by_protocol(0.0, 0.0, 4.0),
    },
    Hop.NET: {
        Algorithm.Tree: _by_protocol(5.0, 8.5, 14.0),
        Algorithm.Ring: _by_protocol(2.7, 4.0, 14.0),
        Algorithm.NVLS: _by_protocol(0.0, 0.0, 18.0),
        Algorithm.PAT: _by_protocol(0.0, 0.0, 14.0),
    },
}
#: `llMaxBws`, for 1, 2 and more nodes. On several the row is the CPU's: 1 for AMD or mixed, else 0.
LL_MAX: Final[Sequence[Triple]] = (
    (39.0, 39.0, 20.4),
    (87.7, 22.5, 19.0),
    (141.0, 45.0, 35.0),
    (282.0, 90.0, 70.0),
)
_RING_LL128: Final[Sequence[Triple]] = ((20.0,) * 3, (20.0,) * 3, (36.7,) * 3)
_TREE_LL128: Final[Sequence[Triple]] = ((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0))
_TREE: Final[Sequence[Triple]] = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0))
_NVLS_TREE: Final[Sequence[Triple]] = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5))
#: `nvlsEfficiency`, by generation (2.28 on).
NVLS_EFFICIENCY: Final = (0.0, 0.0, 0.85, 0.74)
#: Entries of the tree correction for NVLSTree (2.29.2 on, Blackwell beside an x86 CPU).
NVLS_TREE_CORRECTED: Final = 24
#: `PCI_BW` (`src/graph/topo.h`): rings up to it run half the threads in Simple.
PCI_GBYTES_PER_S: Final = 12.0
#: `src/include/device.h`: of LL and Simple, and of LL128, Tree, PAT and the NVLS kinds.
THREADS: Final = 512
MAX_THREADS: Final = 640
#: `src/include/comm.h`: bytes for each thread before there are more of them.
THREAD_BYTES: Final = _by_protocol(8, 8, 64)
#: `NVLS_NCHANNELS_*` (`src/transport/nvls.cc`): Hopper, Blackwell on one node and on several.
NVLS_CHANNELS: Final = (16, 24, 32)


@dataclass(frozen=True, slots=True)
class Release:
    """What differs between releases."""

    version: NcclVersion
    #: `perChMax..Bws` of a channel, by generation, on 1, 2 and more nodes; the last by efficiency.
    ring_ll128: Sequence[Triple]
    tree_ll128: Sequence[Triple]
    tree: Sequence[Triple]
    nvls_tree: Sequence[Triple]
    nvls_tree_net_us: float
    #: Longest path from GPU to network card with LL128, Hopper on.
    ll128_hopper_path: Path
    #: Before, NVLS was 5/6 of the bandwidth.
    nvls_by_efficiency: bool
    nvls_tree_corrected: bool
    #: Ranks of a node (`src/transport/nvls.cc`).
    nvls_min_ranks: int
    #: As many channels as NVLS has are opened at least (`src/graph/connect.cc`).
    channels_reach_nvls: bool
    #: A channel is used from so much on (`MinTrafficPerChannel`, enqueue.cc).
    min_traffic_bytes: int


_OLDEST: Final = Release(
    version=NcclVersion(2, 27, 3),
    ring_ll128=(*_RING_LL128, (73.4, 73.4, 73.4)),
    tree_ll128=(*_TREE_LL128, (73.4, 73.4, 58.0)),
    tree=(*_TREE, (77.4, 82.8, 72.0)),
    nvls_tree=(*_NVLS_TREE, (0.0, 0.0, 0.0)),
    nvls_tree_net_us=14.0,
    ll128_hopper_path=Path.P2C,
    nvls_by_efficiency=False,
    nvls_tree_corrected=False,
    nvls_min_ranks=3,
    channels_reach_nvls=True,
    min_traffic_bytes=16 << 10,
)
_CHANGES: Final[Mapping[tuple[int, int], Mapping[str, Any]]] = {
    (27, 5): {"ll128_hopper_path": Path.PXN},
    (28, 3): {
        "tree_ll128": (*_TREE_LL128, (55.6, 31.67, 20.0)),
        "tree": (*_TREE, (70.0, 42.8, 24.0)),
        "nvls_tree": (*_NVLS_TREE, (0.0, 96.0, 43.1)),
        "nvls_by_efficiency": True,
        "channels_reach_nvls": False,
    },
    (28, 7): {"ring_ll128": (*_RING_LL128, (73.4, 34.6, 73.4)), "nvls_min_ranks": 2},
    (28, 9): {"nvls_tree": (*_NVLS_TREE, (0.0, 96.0, 43.8)), "nvls_tree_net_us": 20.9},
    (29, 2): {
        "ring_ll128": (*_RING_LL128, (34.5, 34.6, 34.5)),
        "nvls_tree_corrected": True,
        "min_traffic_bytes": 32 << 10,
    },
    (29, 7): {"ring_ll128": (*_RING_LL128, (40.0, 40.0, 40.0))},
    (30, 3): {"nvls_tree": (*_NVLS_TREE, (0.0, 96.0, 80.0))},
}


def _releases() -> Iterator[Release]:
    release = _OLDEST
    yield release
    for (minor, patch), changes in _CHANGES.items():
        release = replace(release, version=NcclVersion(2, minor, patch), **changes)
        yield release


#: Oldest first; each holds until the next one of its minor release.
RELEASES: Final = tuple(_releases())


def release_of(version: NcclVersion) -> Release:
    """The constants of a release. Raises UnknownName for one that was not read."""
    known = [
        release
        for release in RELEASES
        if (release.version.major, release.version.minor) == (version.major, version.minor)
        and release.version <= version
    ]
    if not known:
        choices = [f"{release.version} and its successors" for release in RELEASES]
        raise UnknownName("release of NCCL's cost model", version, choices)
    return known[-1]
