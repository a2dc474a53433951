"""NCCL's names, numbers and validity rules, by NCCL version.

`serve/plugin/vocabulary.h` is generated from here (`python -m tests.vocabulary`). Paths such as
`src/enqueue.cc` are in NVIDIA/nccl at v2.30.7-1 unless a tag is given.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Final, Self

from dynamiccl.errors import UnknownName


class _Named(IntEnum):
    @property
    def wire(self) -> str:
        """NCCL's spelling, e.g. `NVLSTree`, `LL128`, `AllReduce`."""
        return self.name

    @classmethod
    def parse(cls, text: str, *, where: str = "") -> Self:
        """Read any common spelling; raises UnknownName, and never falls back to a default.

        >>> Algorithm.parse("NVLS_TREE").wire
        'NVLSTree'
        """
        key = _squash(text)
        for member in cls:
            if _squash(member.name) == key:
                return member
        raise UnknownName(cls.__name__.lower(), text, [m.wire for m in cls], where=where)


def _squash(text: str) -> str:
    return re.sub(r"[\s_-]", "", text).lower()


class Collective(_Named):
    """`ncclFunc_t` of the calls that nccl-tests runs (`src/include/nccl_common.h`)."""

    Broadcast = 0
    Reduce = 1
    AllGather = 2
    ReduceScatter = 3
    AllReduce = 4
    SendRecv = 5
    AlltoAll = 8
    Scatter = 9
    Gather = 10

    @property
    def tunable(self) -> bool:
        """Whether NCCL asks a tuner about it (only five ever reach getCollInfo)."""
        return self.value < NUM_TUNED_COLLECTIVES

    def bus_factor(self, num_ranks: int) -> float:
        """Busbw over algbw, as nccl-tests defines it (PERFORMANCE.md).

        >>> Collective.AllReduce.bus_factor(8)
        1.75
        """
        share = (num_ranks - 1) / num_ranks
        if self is Collective.AllReduce:
            return 2 * share
        if self in {Collective.Broadcast, Collective.Reduce, Collective.SendRecv}:
            return 1.0
        return share


class Algorithm(_Named):
    """Rows of NCCL's cost table; the order never changed from 2.19 to 2.30.7."""

    Tree = 0
    Ring = 1
    CollNetDirect = 2
    CollNetChain = 3
    NVLS = 4
    NVLSTree = 5
    PAT = 6


class Protocol(_Named):
    """Columns of NCCL's cost table."""

    LL = 0
    LL128 = 1
    Simple = 2


class Transport(StrEnum):
    """Fixed when a communicator connects, so part of a launch profile."""

    P2P = "P2P"
    SHM = "SHM"
    NET = "NET"


NUM_TUNED_COLLECTIVES: Final = 5
NUM_ALGORITHMS: Final = len(Algorithm)
NUM_PROTOCOLS: Final = len(Protocol)
#: The cell is not available, and is never written (`src/include/nccl_tuner.h`).
COST_IGNORE: Final = -1.0
#: MAXCHANNELS since 2.25 (`src/include/device.h`).
MAX_CHANNELS: Final = 64
#: A Ring row this much dearer than the cheapest other cell was relegated by NCCL on purpose (x1024
#: for fp8 on more than 8 ranks, `src/enqueue.cc:2017`): it counts as unavailable.
RELEGATED_COST_RATIO: Final = 100.0


@dataclass(frozen=True, slots=True, order=True)
class NcclVersion:
    """A release, comparable."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str | int) -> Self:
        """Read `2.29.7`, `2.29.7+cuda12.9`, 22907 or (before 2.9) 2708; raises UnknownName.

        >>> [str(NcclVersion.parse(text)) for text in (22907, "2.8.4", 2804)]
        ['2.29.7', '2.8.4', '2.8.4']
        """
        match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(text))
        if match:
            return cls(*map(int, match.groups(default="0")))
        if re.fullmatch(r"\d{4,6}", str(text)):
            code = int(text)
            base = 1000 if code < 10_000 else 10_000  # NCCL_VERSION in nccl.h
            return cls(code // base, code % base // 100, code % 100)
        raise UnknownName("NCCL version", text, ["2.21.5", "2.29.7", "22907"])

    @classmethod
    def minor_of(cls, text: str | None) -> Self | None:
        """The minor release, its patch 0; None where not known."""
        return None if text is None else replace(cls.parse(text), patch=0)

    @property
    def code(self) -> int:
        """`NCCL_VERSION_CODE` (`src/nccl.h.in`), as nccl-tests prints it."""
        base = 1000 if (self.major, self.minor) < (2, 9) else 10_000
        return self.major * base + self.minor * 100 + self.patch

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


#: First release with each tuner ABI (`src/misc/tuner.cc`, later `src/plugin/tuner.cc`).
TUNER_ABI_SINCE: Final[Mapping[int, NcclVersion]] = {
    4: NcclVersion(2, 24),
    5: NcclVersion(2, 28),
    6: NcclVersion(2, 30),
}

#: Under these minor releases our tuners act: their tuner calls were read in the source (NVIDIA/nccl
#: v2.27.3-1 to v2.30.7-1). Of 2.31 only an alpha was (86fa684d, whose code is that of 2.31.0);
#: 2.31.2 and 2.32 ask about symmetric kernels in ways that were not.
OLDEST_ACTING: Final = NcclVersion(2, 27)
NEWEST_ACTING: Final = NcclVersion(2, 30)

#: The newest minor release whose source was looked at (v2.32.6-1).
NEWEST_KNOWN: Final = NcclVersion(2, 32)

_ALL_PROTOCOLS: Final = frozenset(Protocol)
_SIMPLE_ONLY: Final = frozenset({Protocol.Simple})
_COLLNET_GATHER: Final = {
    Algorithm.Ring: _ALL_PROTOCOLS,
    Algorithm.CollNetDirect: _SIMPLE_ONLY,
    Algorithm.NVLS: _SIMPLE_ONLY,
    Algorithm.PAT: _SIMPLE_ONLY,
}
#: `src/graph/tuning.cc`, ncclTopoTuneModel.
VALID_PROTOCOLS: Final[Mapping[Collective, Mapping[Algorithm, frozenset[Protocol]]]] = {
    Collective.Broadcast: {Algorithm.Ring: _ALL_PROTOCOLS},
    Collective.Reduce: {Algorithm.Ring: _ALL_PROTOCOLS},
    Collective.AllGather: _COLLNET_GATHER,
    Collective.ReduceScatter: _COLLNET_GATHER,
    Collective.AllReduce: {
        Algorithm.Tree: _ALL_PROTOCOLS,
        Algorithm.Ring: _ALL_PROTOCOLS,
        Algorithm.CollNetDirect: _SIMPLE_ONLY,
        Algorithm.CollNetChain: _SIMPLE_ONLY,
        Algorithm.NVLS: _SIMPLE_ONLY,
        Algorithm.NVLSTree: _SIMPLE_ONLY,
    },
}
#: Where later than the oldest release that takes our plugin.
ALGORITHM_SINCE: Final[Mapping[Algorithm, NcclVersion]] = {Algorithm.PAT: NcclVersion(2, 23)}


@dataclass(frozen=True, slots=True, order=True)
class Config:
    """What is requested of NCCL for one call; None means AUTO: NCCL decides that knob."""

    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    num_channels: int | None = None
    #: Per call from NCCL 2.30 on (tuner v6).
    chunk_bytes: int | None = None

    @property
    def key(self) -> str:
        """A stable, readable name.

        >>> Config(Algorithm.Ring, Protocol.LL128, 8).key, Config(Algorithm.Ring).key, ABSTAIN.key
        ('Ring/LL128/8ch', 'Ring/auto', 'ABSTAIN')
        """
        if self == ABSTAIN:
            return "ABSTAIN"
        cell = self.algorithm, self.protocol
        parts = ["auto" if each is None else each.wire for each in cell]
        if self.num_channels is not None:
            parts.append(f"{self.num_channels}ch")
        if self.chunk_bytes is not None:
            parts.append(f"{self.chunk_bytes}B")
        return "/".join(parts)


ABSTAIN: Final = Config()


def invalid_reason(
    config: Config,
    collective: Collective,
    *,
    version: NcclVersion | None = None,
    num_nodes: int | None = None,
) -> str | None:
    """Why NCCL cannot run `config`, or None when it can.

    Rules that need an unknown `version` or `num_nodes` are not applied. Hardware conditions
    (NVSwitch for NVLS, NVLink for LL128) show in the cost table, not here.

    >>> invalid_reason(Config(Algorithm.PAT, Protocol.LL128), Collective.AllReduce)
    'AllReduce has no PAT'
    """
    if config == ABSTAIN:
        return None
    if not collective.tunable:
        return f"NCCL never asks a tuner about {collective.wire}"
    return next(_invalid_reasons(config, collective, version, num_nodes), None)


def _invalid_reasons(
    config: Config, collective: Collective, version: NcclVersion | None, num_nodes: int | None
) -> Iterator[str]:
    old = version is not None and version < NcclVersion(2, 25)
    limit = 32 if old else MAX_CHANNELS  # MAXCHANNELS before (src/include/device.h)
    if config.num_channels is not None and not 1 <= config.num_channels <= limit:
        yield f"{config.num_channels} channels are outside 1..{limit}"
    since = TUNER_ABI_SINCE[6]
    if config.chunk_bytes is not None and version is not None and version < since:
        yield f"a chunk size needs NCCL {since} and this is {version}"
    algorithm, protocol = config.algorithm, config.protocol
    if algorithm is None:
        return
    protocols = VALID_PROTOCOLS[collective].get(algorithm)
    if protocols is None:
        yield f"{collective.wire} has no {algorithm.wire}"
    elif protocol is not None and protocol not in protocols:
        yield f"{algorithm.wire} has no {protocol.wire} for {collective.wire}"
    begun = ALGORITHM_SINCE.get(algorithm)
    if version is not None and begun is not None and version < begun:
        yield f"{algorithm.wire} needs NCCL {begun} and this is {version}"
    if num_nodes == 1 and algorithm is Algorithm.NVLSTree:
        yield "NVLSTree needs more than one node"


# The cost model: time = latency x plateau + bytes / (bandwidth x correction)
# (`src/graph/tuning.cc`). Both corrections are AllReduce's (`ncclTopoGetAlgoTime`, 2.19 to 2.30.7).
# NVLSTree's (Blackwell, 2.29.2 on) depends on what is not logged: see the simulator.

#: `treeCorrectionFactor` by floor(log2(bytes / 64)).
TREE_CORRECTION: Final[Mapping[Protocol, Sequence[float]]] = {
    Protocol.LL: (
        1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5,
        0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0,
    ),
    Protocol.LL128: (
        1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6,
        0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0,
    ),
    Protocol.Simple: (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5,
        0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9,
    ),
}  # fmt: skip
#: Entries that Tree uses.
TREE_CORRECTED: Final = 23
#: From so many bytes per channel and rank on, Ring/Simple's latency between nodes is that times as
#: long: before Ampere, and since.
PLATEAU_BYTES: Final = 64
PLATEAU: Final = (1.9, 1.4)


def size_correction(protocol: Protocol, size_bytes: int, entries: int = TREE_CORRECTED) -> float:
    """Share of its bandwidth that a tree reaches; 1 beyond `entries` octaves.

    >>> size_correction(Protocol.LL, 1 << 18), size_correction(Protocol.LL, 32)
    (0.4, 1.0)
    """
    index = (size_bytes >> 6).bit_length() - 1
    return TREE_CORRECTION[protocol][index] if 0 <= index < entries else 1.0


def plateau(size_bytes: int, num_channels: int, num_ranks: int, *, since_ampere: bool) -> float:
    """Factor on Ring/Simple's latency in an AllReduce between nodes.

    >>> plateau(1 << 20, 16, 64, since_ampere=True), plateau(1 << 10, 16, 64, since_ampere=True)
    (1.4, 1.0)
    """
    if size_bytes // (num_channels * num_ranks) < PLATEAU_BYTES:
        return 1.0
    return PLATEAU[since_ampere]
