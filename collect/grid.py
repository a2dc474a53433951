"""The grid of a sweep: sizes, communicators of a launch, and trials (pure).

nccl-tests walks sizes from `-b` to `-e` by a factor (`-f`); any other list needs more processes. So
a ladder's sizes are sixteenths of powers of two, which double exactly, and `walks` cuts any list
into as few walks as it can.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations_with_replacement, groupby
from operator import and_, floordiv, itemgetter, mod, or_
from typing import Final

from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET
from dynamiccl.nccl import Collective, Config
from dynamiccl.sizes import MAX_SIZE_BITS

#: Products in the process of the calls (beside.py), whose level is the matrices' edge.
MATMUL: Final = "matmul"
PERSISTENT: Final = "persistent-matmul"
PRODUCTS: Final = (MATMUL, PERSISTENT)
#: Kinds of interference (nodes.py); the simulator's own has a slowdown as its level.
REAL: Final = ("cpu", *PRODUCTS, "traffic")
SIMULATED: Final = ("congestion",)
_SIZE: Final = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
#: In each quarter-octave bin (`dynamiccl.sizes`).
_SIXTEENTHS: Final = {1: (16,), 2: (16, 23), 4: (16, 19, 23, 27)}
#: To which nccl-tests rounds a rank's share down (`src/all_gather.cu`, v2.19.6).
RANK_GRAIN_BYTES: Final = 16
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter, Collective.AlltoAll})
#: nccl-tests v2.19.6, `src/`.
BINARIES: Final = {
    Collective.AllReduce: "all_reduce_perf",
    Collective.AllGather: "all_gather_perf",
    Collective.ReduceScatter: "reduce_scatter_perf",
    Collective.Broadcast: "broadcast_perf",
    Collective.Reduce: "reduce_perf",
    Collective.AlltoAll: "alltoall_perf",
    Collective.SendRecv: "sendrecv_perf",
}
#: nccl-tests' spelling (`-d`), in the order of `ncclDataType_t`.
DATATYPE_BYTES: Final = {
    "int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "half": 2, "float": 4, "double": 8, "bfloat16": 2, "f8e4m3": 1, "f8e5m2": 1,
}  # fmt: skip
_SPLITS: Final = {"AND": and_, "OR": or_, "MOD": mod, "DIV": floordiv}
#: Sizes of one nccl-tests process, by a factor.
Walk = tuple[int, ...]
#: Hosts to count (`nid007106`, `gpu-3`, `n12.cluster`).
_COUNTED_HOST: Final = re.compile(r"(.*?)(\d{0,9})(\D*)\Z", re.DOTALL)
_LISTED_HOST: Final = re.compile(r"([^,\[\]]+)(?:\[([\d,-]*)\])?([^,\[\]]*)(?:,|$)")
_SPLIT: Final = re.compile(r"(AND|OR|MOD|DIV) (0x[0-9a-f]{1,7}|0|[1-9]\d{0,8})")


def parse_size(value: object) -> int:
    """An integer, or text with a binary K, M, G or T as nccl-tests takes it. Raises ValueError."""
    match = _SIZE.fullmatch(str(value).strip())
    if not match or int(match[1]) == 0:
        raise ValueError(f"'{value}' is no size; write 4096, '64K', '16M' or '1G'")
    return int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")


def octave_ladder(low_bytes: int, high_bytes: int, steps_per_octave: int) -> tuple[int, ...]:
    """Sizes, ascending: powers of two and, between, sixteenths of them; multiples of 16 bytes.

    >>> octave_ladder(1024, 4096, 2)
    (1024, 1472, 2048, 2944, 4096)
    """
    sixteenths = (
        first << exponent
        for exponent in range(MAX_SIZE_BITS)
        for first in _SIXTEENTHS[steps_per_octave]
    )
    sizes = (s // 16 for s in sixteenths if s % (16 * RANK_GRAIN_BYTES) == 0)
    return tuple(size for size in sizes if low_bytes <= size <= high_bytes)


def factor_ladder(low_bytes: int, high_bytes: int, factor: int) -> tuple[int, ...]:
    """Sizes as `-b low -e high -f factor` walks them."""
    sizes = [low_bytes]
    while sizes[-1] * factor <= high_bytes:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def chains(sizes: Iterable[int]) -> list[Walk]:
    """Cut sizes into walks, each time the longest that is left."""
    left = set(sizes)
    cut: list[Walk] = []
    while left:
        longest: Walk = ()
        for start, other in combinations_with_replacement(sorted(left), 2):
            factor = other // start if other > start else 2
            walk = [start]
            while walk[-1] * factor in left and other % start == 0:
                walk.append(walk[-1] * factor)
            longest = max(longest, tuple(walk), key=len)
        cut.append(longest)
        left -= {*longest}
    return sorted(cut)


def walks(sizes: Iterable[int]) -> list[Walk]:
    """Cut sizes into walks; gaps, at most as many as sizes, are filled where that saves processes.

    >>> walks([4, 16, 32])
    [(4, 8, 16, 32)]
    """
    wanted = sorted(set(sizes))
    cuts = [chains(wanted)]
    for factor in (2, 4):
        families: dict[int, list[int]] = defaultdict(list)
        for size in wanted:
            root = size
            while root % factor == 0:
                root //= factor
            families[root].append(size)
        cut: list[Walk] = []
        for members in families.values():
            whole = factor_ladder(members[0], members[-1], factor)
            cut += [whole] if len(whole) <= 2 * len(members) else chains(members)
        cuts.append(sorted(cut))
    return min(cuts, key=lambda cut: (len(cut), sum(map(len, cut))))


def split_text(text: str) -> str:
    """The one spelling of a split of nccl-tests: masks in hexadecimal. Raises ValueError.

    `NCCL_TESTS_SPLIT="<operation> <value>"` (2.14, `src/common.cu`, run): processes of one colour
    make a communicator. All run the same calls at the same time; printed is the mean over ranks.

    >>> split_text("MOD 8"), split_text("AND 7")
    ('MOD 8', 'AND 0x7')
    """
    match = _SPLIT.fullmatch(text)
    operation, value = (match[1], int(match[2], 0)) if match else ("MOD", 0)
    if operation in {"MOD", "DIV"} and not value:
        raise ValueError(
            f"'{text}' is no split; write AND, OR, MOD or DIV and a number, like 'MOD 8'"
        )
    return f"{operation} {value:#x}" if operation in {"AND", "OR"} else f"{operation} {value}"


@cache  # a sweep has few, and each row asks
def communicators(
    split: str, num_nodes: int, ranks_per_node: int, *, spare: bool = False
) -> tuple[tuple[int, ...], ...]:
    """The processes, numbered node by node, of each communicator that a split makes.

    Raises ValueError for unequal ones, or fewer than two; `spare` allows single processes.

    >>> communicators("MOD 8", 4, 8)[1]
    (1, 9, 17, 25)
    """
    operation, operand = split_text(split).split()
    groups: dict[int, list[int]] = defaultdict(list)
    for process in range(num_nodes * ranks_per_node):
        groups[_SPLITS[operation](process, int(operand, 0))].append(process)
    several = [group for group in groups.values() if len(group) > 1 or not spare]
    # Ranks on each node: (8, 8) is two nodes of eight.
    spread = {tuple(Counter(p // ranks_per_node for p in group).values()) for group in several}
    job = f"{num_nodes}x{ranks_per_node} processes"
    if len(spread) != 1 or len({*next(iter(spread))}) != 1:
        raise ValueError(
            f"split '{split}' makes no equal communicators of {job}; share nodes out evenly, as "
            f"'MOD {ranks_per_node}' or 'DIV {ranks_per_node}' does"
        )
    if len(several) < 2 and not spare:
        raise ValueError(f"split '{split}' leaves the {job} one communicator")
    if spread == {(1,)}:
        raise ValueError(f"split '{split}' leaves each of the {job} alone")
    return tuple(map(tuple, several))


def host_list(hosts: Iterable[str]) -> str:
    """The hosts as Slurm lists them, each once; consecutive numbers become a range.

    >>> host_list(["n01", "n02", "n03", "n07", "login", "n7"])
    'n[01-03],n07,login,n7'
    """
    told, numbered = list[str](), list[tuple[tuple[str, str, int, int], str]]()
    for place, host in enumerate(dict.fromkeys(hosts)):
        head, digits, tail = _COUNTED_HOST.findall(host)[0]
        numbered.append(((head, tail, len(digits), int(digits or 0) - place), digits))
    for (head, tail, *_), alike in groupby(numbered, itemgetter(0)):
        numbers = [digits for _, digits in alike]
        number = numbers[0] if len(numbers) == 1 else f"[{numbers[0]}-{numbers[-1]}]"
        told.append(f"{head}{number}{tail}")
    return ",".join(told)


def expand_hosts(text: str) -> list[str]:
    """The hosts of such a list.

    >>> expand_hosts('n[01-03,7],login')
    ['n01', 'n02', 'n03', 'n7', 'login']
    """
    names: list[str] = []
    for head, inside, tail in _LISTED_HOST.findall(text):
        if not inside:
            names.append(head + tail)
        for part in filter(None, inside.split(",")):
            low, _, high = part.partition("-")
            numbers = range(int(low), int(high or low) + 1)
            names += [f"{head}{number:0{len(low)}d}{tail}" for number in numbers]
    return names


@dataclass(frozen=True, slots=True, order=True)
class LaunchProfile:
    """Settings that NCCL reads once per process: sorted (name, value) pairs."""

    name: str = DEFAULT_PROFILE
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Interference:
    """What runs beside the collective."""

    kind: str = QUIET
    level: float = 0.0


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What is fixed for a process: trials of one setting can share one."""

    collective: Collective
    num_nodes: int
    ranks_per_node: int
    #: Of the job, over all communicators.
    hosts: int
    ranks_per_host: int
    datatype: str = "float"
    profile: LaunchProfile = LaunchProfile()
    interference: Interference = Interference()
    #: The job's split into several communicators; empty: one.
    split: str = ""
    spare: bool = False

    @property
    def comms(self) -> tuple[tuple[int, ...], ...] | None:
        """Processes of each communicator; None for a single one."""
        if not self.split:
            return None
        return communicators(self.split, self.hosts, self.ranks_per_host, spare=self.spare)

    @property
    def is_beside(self) -> bool:
        """Whether beside.py makes the calls, not nccl-tests."""
        return self.interference.kind in PRODUCTS

    @property
    def num_ranks(self) -> int:
        """Ranks of the communicator."""
        return self.num_nodes * self.ranks_per_node

    def benchmark_bytes(self, size_bytes: int) -> int:
        """NCCL's nBytes, rounded as by `src/all_gather.cu` and `src/all_reduce.cu` (v2.19.6)."""
        per_rank = self.collective in _PER_RANK
        grain = RANK_GRAIN_BYTES * self.num_ranks if per_rank else DATATYPE_BYTES[self.datatype]
        return size_bytes // grain * grain

    @property
    def key(self) -> str:
        """A stable name."""
        words = [self.collective.wire, f"{self.num_nodes}x{self.ranks_per_node}"]
        if self.datatype != "float":
            words.append(self.datatype)
        if self.split:
            words.append(f"{self.split.replace(' ', '')}-of-{self.hosts}x{self.ranks_per_host}")
        elif self.hosts != self.num_nodes:
            words.append(f"{self.hosts}hosts")
        if self.profile.name != DEFAULT_PROFILE:
            words.append(self.profile.name)
        kind, level = self.interference.kind, self.interference.level
        return ":".join(words) + ("" if kind == QUIET else f"+{kind}{level:g}")


@dataclass(frozen=True)
class Trial:
    """A point of the grid (a workload and a config), and which repeat."""

    setting: Setting
    size_bytes: int
    config: Config
    infeasible: str | None = None
    #: Within its round, from 0.
    repeat: int = 0
    #: P(config | task, history) of the random draw; None = not drawn.
    probability: float | None = None

    @property
    def task(self) -> tuple[Setting, int]:
        """The workload: (setting, size in bytes)."""
        return (self.setting, self.size_bytes)

    @cached_property
    def key(self) -> str:  # asked for many times in planning
        """A stable id within a sweep, the same for all repeats."""
        return f"{self.setting.key}:{self.size_bytes}:{self.config.key}"
