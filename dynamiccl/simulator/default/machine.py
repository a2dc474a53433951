"""Results of NCCL's topology search on a machine: its cost model's view of the hardware.

A `Machine` is one kind of node with the results of NCCL's searches for the shapes of communicator
that are known (`Search`), and `Machine.graph` gives those for one shape. NCCL prints the same at
`NCCL_DEBUG_SUBSYS=GRAPH`: `Pattern 4, crossNic 0, nChannels 12, bw 30.000000/30.000000, type
NVL/PIX, sameChannels 1` is the ring of eight H100 (`src/graph/search.cc`, ncclTopoPrintGraph).

Descriptions are TOML files: built-in ones (`machines/`), and the user's.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache
from importlib import resources
from pathlib import Path as FilePath
from typing import Any, Final, TypeVar

from dynamiccl.errors import CorruptFile, UnknownName
from dynamiccl.nccl import Algorithm
from dynamiccl.simulator.group import Group

T = TypeVar("T")
_FOLDER: Final = "machines"


class Path(IntEnum):
    """Distance of two devices, near to far (`PATH_*`, `src/graph/topo.h` since 2.27)."""

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
    """Processors that the model tells apart, as architecture and vendor."""

    INTEL = "x86-intel"
    AMD = "x86-amd"
    #: Nodes of both vendors.
    MIXED = "x86-mixed"
    ARM = "arm"

    @property
    def x86(self) -> bool:
        """Whether the architecture is x86."""
        return self is not Cpu.ARM


class Basis(StrEnum):
    """The source of a search's numbers."""

    #: Printed by NCCL on such a machine.
    READ = "read"
    #: Follows from NCCL's rules of search and what the machine is.
    DERIVED = "derived"
    #: The numbers under which recorded costs come out.
    FITTED = "fitted"
    #: A guess that nothing contradicts.
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Search:
    """One search's result (`ncclTopoGraph`), and for which shapes of communicator it holds."""

    pattern: Pattern
    basis: Basis
    #: Least and most, both included.
    nodes: tuple[int, int]
    ranks_per_node: tuple[int, int]
    channels: int
    #: Of one channel, inside a node and between nodes.
    intra_gbytes_per_s: float
    inter_gbytes_per_s: float
    #: The longest path between GPUs, and between a GPU and its network card.
    intra_path: Path
    inter_path: Path
    #: Extra latency of the network card.
    inter_latency_us: float = 0.0
    #: Whether all channels visit the GPUs in the same order.
    same_channels: bool = True
    #: Tree: a plain one (NCCL_TOPO_PATTERN_TREE) and neither split nor balanced.
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
        """Search channels of rings and trees: as many as both found (`src/init.cc`)."""
        return min(self.ring.channels, self.tree.channels)


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of node, with the results of NCCL's searches on it."""

    name: str
    description: str
    compute_capability: float
    cpu: Cpu
    searches: Sequence[Search]
    #: Where the description comes from.
    origin: str
    #: Algorithms that a build or a setting took away.
    without: frozenset[Algorithm] = frozenset()
    #: The `topology` of recorded decisions that were taken on such a machine.
    recorded_as: str = ""

    def graph(self, group: Group) -> Graph:
        """The search results for a shape. Raises UnknownName for a shape not described."""
        found = {search.pattern: search for search in self.searches if search.holds_for(group)}
        ring, tree = found.get(Pattern.RING), found.get(Pattern.TREE)
        if ring is None or tree is None:
            shape = f"{group.num_nodes} x {group.ranks_per_node}"
            raise UnknownName(f"shape of nodes x ranks on {self.name}", shape, self._shapes())
        return Graph(ring, tree, found.get(Pattern.NVLS))

    def _shapes(self) -> list[str]:
        rings = [search for search in self.searches if search.pattern is Pattern.RING]
        return [f"{_span(s.nodes)} x {_span(s.ranks_per_node)}" for s in rings]


def _span(ends: tuple[int, int]) -> str:
    low, high = ends
    return str(low) if low == high else f"{low}-{high}"


def machine_names() -> list[str]:
    """Names of the built-in machines."""
    folder = resources.files(__package__).joinpath(_FOLDER)
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir())


@cache
def find_machine(name: str) -> Machine:
    """The built-in machine of that name. Raises UnknownName with the choices."""
    if name not in machine_names():
        raise UnknownName("machine", name, machine_names())
    file = resources.files(__package__).joinpath(_FOLDER, f"{name}.toml")
    return parse_machine(name, file.read_text(encoding="utf-8"))


def read_machine(path: FilePath) -> Machine:
    """A machine from a file. Raises CorruptFile where the description is wrong."""
    return parse_machine(path.stem, path.read_text(encoding="utf-8"))


def parse_machine(name: str, text: str) -> Machine:
    """A machine from TOML. Raises CorruptFile, and UnknownName for a value that is no choice."""
    try:
        fields = tomllib.loads(text)
        searches = [_search(name, table) for table in fields.pop("search", [])]
        without = [Algorithm.parse(text, where=name) for text in fields.pop("without", [])]
        fields["cpu"] = _choice({item.value: item for item in Cpu}, fields["cpu"], name)
        machine = Machine(name=name, searches=searches, without=frozenset(without), **fields)
    except tomllib.TOMLDecodeError as error:
        raise CorruptFile(f"machine {name} is not TOML: {error}") from error
    except KeyError as error:
        raise CorruptFile(f"machine {name} lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise CorruptFile(f"machine {name}: {error}") from error
    return machine


def _search(name: str, table: Mapping[str, Any]) -> Search:
    fields = dict(table)
    intra, inter = fields.pop("gbytes_per_s")
    intra_path, inter_path = (_choice(Path.__members__, text, name) for text in fields.pop("paths"))
    return Search(
        pattern=_choice({item.value: item for item in Pattern}, fields.pop("pattern"), name),
        basis=_choice({item.value: item for item in Basis}, fields.pop("basis"), name),
        nodes=_ends(fields.pop("nodes")),
        ranks_per_node=_ends(fields.pop("ranks_per_node")),
        intra_gbytes_per_s=intra,
        inter_gbytes_per_s=inter,
        intra_path=intra_path,
        inter_path=inter_path,
        **fields,
    )


def _ends(ends: Sequence[int]) -> tuple[int, int]:
    low, high = ends
    return low, high


def _choice(choices: Mapping[str, T], text: str, name: str) -> T:
    if text not in choices:
        raise UnknownName("value", text, choices, where=f"machine {name}")
    return choices[text]
