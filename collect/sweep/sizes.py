"""Message sizes: their notation in a sweep file, and the walks over them by nccl-tests.

nccl-tests walks from `-b` to `-e` by a factor (`-f`) or a step; any other list of sizes needs more
processes. So the ladder's sizes within an octave are sixteenths of a power of two, which double
exactly, and `chains` cuts any list into as few walks as it can.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dynamiccl.nccl import Collective
from dynamiccl.sizes import MAX_SIZE_BITS

_SIZE: Final = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: Sixteenths of a power of two that lie in each quarter-octave bin (`dynamiccl.sizes`).
_SIXTEENTHS: Final = {1: (16,), 2: (16, 23), 4: (16, 19, 23, 27)}
#: Factors by which a walk may pass sizes that nobody wants.
_CLOSING_FACTORS: Final = (2, 4)
#: nccl-tests rounds the share of each rank down to so many bytes (`src/all_gather.cu`, v2.19.6).
RANK_GRAIN_BYTES: Final = 16
#: Bytes of one element, by nccl-tests' spelling (`-d`).
DATATYPE_BYTES: Final = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "half": 2,
    "float": 4,
    "double": 8,
    "bfloat16": 2,
    "f8e4m3": 1,
    "f8e5m2": 1,
}
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter, Collective.AlltoAll})


def parse_size(value: object) -> int:
    """Read a byte count: an integer, or text with a binary K, M, G or T as nccl-tests takes it.

    >>> parse_size("64K"), parse_size(12)
    (65536, 12)
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(str(value).strip())
    if not match or int(match[1]) == 0:
        raise ValueError(f"'{value}' is no size; write 4096, '64K', '16M' or '1G'")
    return int(match[1]) * _UNITS[match[2].upper()]


def octave_ladder(low_bytes: int, high_bytes: int, steps_per_octave: int) -> tuple[int, ...]:
    """Sizes from `low_bytes` to `high_bytes`, ascending, one in each wanted size bin.

    Powers of two, and between them (2 or 4 steps) sixteenths of one; multiples
    of 16 bytes only, so that every rank can have its share.

    >>> octave_ladder(1024, 4096, 2)
    (1024, 1472, 2048, 2944, 4096)
    """
    found = [
        size
        for exponent in range(MAX_SIZE_BITS)
        for sixteenths in _SIXTEENTHS[steps_per_octave]
        if (size := (sixteenths << exponent) >> 4) << 4 == sixteenths << exponent
        and size % RANK_GRAIN_BYTES == 0
        and low_bytes <= size <= high_bytes
    ]
    return tuple(sorted(found))


def factor_ladder(low_bytes: int, high_bytes: int, factor: int) -> tuple[int, ...]:
    """Sizes as `-b low -e high -f factor` walks them.

    >>> factor_ladder(1000, 9000, 3)
    (1000, 3000, 9000)
    """
    sizes = [low_bytes]
    while sizes[-1] * factor <= high_bytes:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Chain:
    """Sizes that one nccl-tests process walks: each `factor` times the one before."""

    sizes: tuple[int, ...]
    factor: int

    @property
    def arguments(self) -> tuple[str, ...]:
        """The `-b -e -f` of the walk."""
        walk = ("-b", str(self.sizes[0]), "-e", str(self.sizes[-1]))
        return (*walk, "-f", str(self.factor)) if len(self.sizes) > 1 else walk


def chains(sizes: Iterable[int]) -> tuple[Chain, ...]:
    """Cut sizes into walks by a factor, each time the longest that is left.

    >>> [chain.sizes for chain in chains([4, 8, 16, 12, 24, 100])]
    [(4, 8, 16), (12, 24), (100,)]
    """
    left = sorted(set(sizes))
    cut: list[Chain] = []
    while left:
        best = max((_longest(left, start) for start in left), key=lambda chain: len(chain.sizes))
        cut.append(best)
        left = [size for size in left if size not in best.sizes]
    return tuple(sorted(cut, key=lambda chain: chain.sizes))


def walks(sizes: Iterable[int]) -> tuple[Chain, ...]:
    """Cut sizes into walks, gaps filled where that saves processes: a start costs more than a gap.

    A strategy that has settled some sizes leaves gaps. They are walked over, at most as many as
    there are sizes wanted.

    >>> [walk.sizes for walk in walks([4, 16, 32])]
    [(4, 8, 16, 32)]
    """
    wanted = sorted(set(sizes))
    cuts = [chains(wanted), *(_closed(wanted, factor) for factor in _CLOSING_FACTORS)]
    return min(cuts, key=lambda cut: (len(cut), sum(len(chain.sizes) for chain in cut)))


def _closed(sizes: Sequence[int], factor: int) -> tuple[Chain, ...]:
    """Walks by `factor` through all sizes that it connects."""
    families: dict[int, list[int]] = {}
    for size in sizes:
        root = size
        while root % factor == 0:
            root //= factor
        families.setdefault(root, []).append(size)
    cut: list[Chain] = []
    for members in families.values():
        whole = factor_ladder(members[0], members[-1], factor)
        fits = len(whole) <= 2 * len(members)
        cut += [Chain(whole, factor)] if fits else chains(members)
    return tuple(sorted(cut, key=lambda chain: chain.sizes))


def _longest(sizes: Sequence[int], start: int) -> Chain:
    known = set(sizes)
    # The factor that leads to any other size is a ratio of two of them.
    factors = {size // start for size in sizes if size > start and size % start == 0}
    best = Chain((start,), 2)
    for factor in sorted(factors):
        walk = [start]
        while walk[-1] * factor in known:
            walk.append(walk[-1] * factor)
        if len(walk) > len(best.sizes):
            best = Chain(tuple(walk), factor)
    return best


def benchmark_bytes(collective: Collective, size_bytes: int, ranks: int, datatype: str) -> int:
    """The size that nccl-tests really runs, and NCCL's nBytes: rounded to whole shares of a rank.

    `src/all_gather.cu`, `src/all_reduce.cu` at nccl-tests v2.19.6: the share of one rank is
    rounded down to 16 bytes where each rank has one, else the size to whole elements.

    >>> benchmark_bytes(Collective.AllGather, 1024, 3, "float")
    1008
    """
    if collective in _PER_RANK:
        return size_bytes // ranks // RANK_GRAIN_BYTES * RANK_GRAIN_BYTES * ranks
    element = DATATYPE_BYTES[datatype]
    return size_bytes // element * element
