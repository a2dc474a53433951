"""Constants of NCCL's cost model, by release (tables of `tuning.cc`).

Read in NVIDIA/nccl at the tags v2.27.3-1, v2.27.5-1, v2.27.7-1, v2.28.3-1, v2.28.7-1, v2.28.9-1,
v2.29.2-1, v2.29.7-1, v2.30.3-1 and v2.30.7-1: `src/graph/tuning.cc` unless another file is named.
Latencies are us, bandwidths GB/s (10^9). What did not change since 2.27.3 stands once, what did is
a field of `Release`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Final

from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Algorithm, NcclVersion, Protocol
from dynamiccl.simulator.default.machine import Path

Triple = tuple[float, float, float]


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
    """The link that a step crosses: NVLink, another link inside a node, or the network."""

    NVLINK = "nvlink"
    PCI = "pci"
    NET = "net"


def _by_protocol(ll: float, ll128: float, simple: float) -> Mapping[Protocol, float]:
    return {Protocol.LL: ll, Protocol.LL128: ll128, Protocol.Simple: simple}


_NONE: Final = _by_protocol(0.0, 0.0, 0.0)
#: `baseLatencies`: what a call costs before its first hop.
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
#: `llMaxBws`, for 1, 2 and more nodes. On several nodes the row is not the GPU's: 0 for an Intel or
#: any other CPU, 1 for AMD or a mixture.
LL_MAX: Final[Sequence[Triple]] = (
    (39.0, 39.0, 20.4),
    (87.7, 22.5, 19.0),
    (141.0, 45.0, 35.0),
    (282.0, 90.0, 70.0),
)
#: Rows of these tables that no release changed: up to Hopper.
_RING_LL128: Final[Sequence[Triple]] = ((20.0,) * 3, (20.0,) * 3, (36.7,) * 3)
_TREE_LL128: Final[Sequence[Triple]] = ((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0))
_TREE: Final[Sequence[Triple]] = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0))
_NVLS_TREE: Final[Sequence[Triple]] = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5))
#: `nvlsEfficiency`, by generation (from 2.28 on).
NVLS_EFFICIENCY: Final = (0.0, 0.0, 0.85, 0.74)
#: Entries of the tree correction (dynamiccl/nccl.py) that NVLSTree uses (2.29.2 on, Blackwell
#: beside an x86 CPU).
NVLS_TREE_CORRECTED: Final = 24
#: `PCI_BW` (`src/graph/topo.h`): rings up to this bandwidth run half the threads in Simple.
PCI_GBYTES_PER_S: Final = 12.0
#: `src/include/device.h`: threads of LL and Simple, and of LL128, Tree, PAT and the NVLS kinds.
THREADS: Final = 512
MAX_THREADS: Final = 640
#: `src/include/comm.h`: bytes that each thread should get before there are more of them.
THREAD_BYTES: Final = _by_protocol(8, 8, 64)
#: `NVLS_NCHANNELS_*` (`src/transport/nvls.cc`): Hopper, Blackwell on one node and on several.
NVLS_CHANNELS: Final = (16, 24, 32)


@dataclass(frozen=True, slots=True)
class Release:
    """What differs between releases."""

    version: NcclVersion
    #: `perChMaxRingLL128Bws`, `...TreeLL128Bws`, `...TreeBws` and `...NVLSTreeBws`, by generation:
    #: largest bandwidth of a channel, for 1, 2 and more nodes. The last is used where NVLS goes by
    #: efficiency.
    ring_ll128: Sequence[Triple]
    tree_ll128: Sequence[Triple]
    tree: Sequence[Triple]
    nvls_tree: Sequence[Triple]
    #: NVLSTree's hop over the network.
    nvls_tree_net_us: float
    #: Longest path between GPU and network card over which LL128 is on from Hopper on.
    ll128_hopper_path: Path
    #: NVLS by an efficiency for each generation; before it was 5/6 of the bandwidth.
    nvls_by_efficiency: bool
    #: NVLSTree gets the tree correction (Blackwell beside an x86 CPU).
    nvls_tree_corrected: bool
    #: Least ranks of a node that NVLS is set up for (`src/transport/nvls.cc`).
    nvls_min_ranks: int
    #: A communicator opens at least as many channels as NVLS has (`src/graph/connect.cc`).
    channels_reach_nvls: bool
    #: A channel is used from so many bytes of traffic on (`MinTrafficPerChannel`, enqueue.cc).
    min_traffic_bytes: int


_V2_27_3: Final = Release(
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
_V2_27_5: Final = replace(_V2_27_3, version=NcclVersion(2, 27, 5), ll128_hopper_path=Path.PXN)
_V2_28_3: Final = replace(
    _V2_27_5,
    version=NcclVersion(2, 28, 3),
    tree_ll128=(*_TREE_LL128, (55.6, 31.67, 20.0)),
    tree=(*_TREE, (70.0, 42.8, 24.0)),
    nvls_tree=(*_NVLS_TREE, (0.0, 96.0, 43.1)),
    nvls_by_efficiency=True,
    channels_reach_nvls=False,
)
_V2_28_7: Final = replace(
    _V2_28_3,
    version=NcclVersion(2, 28, 7),
    ring_ll128=(*_RING_LL128, (73.4, 34.6, 73.4)),
    nvls_min_ranks=2,
)
_V2_28_9: Final = replace(
    _V2_28_7,
    version=NcclVersion(2, 28, 9),
    nvls_tree=(*_NVLS_TREE, (0.0, 96.0, 43.8)),
    nvls_tree_net_us=20.9,
)
_V2_29_2: Final = replace(
    _V2_28_9,
    version=NcclVersion(2, 29, 2),
    ring_ll128=(*_RING_LL128, (34.5, 34.6, 34.5)),
    nvls_tree_corrected=True,
    min_traffic_bytes=32 << 10,
)
_V2_29_7: Final = replace(
    _V2_29_2, version=NcclVersion(2, 29, 7), ring_ll128=(*_RING_LL128, (40.0, 40.0, 40.0))
)
_V2_30_3: Final = replace(
    _V2_29_7, version=NcclVersion(2, 30, 3), nvls_tree=(*_NVLS_TREE, (0.0, 96.0, 80.0))
)
#: Oldest first; each holds until the next one of the same minor release.
RELEASES: Final = (
    _V2_27_3, _V2_27_5, _V2_28_3, _V2_28_7, _V2_28_9, _V2_29_2, _V2_29_7, _V2_30_3,
)  # fmt: skip


def release_of(version: NcclVersion) -> Release:
    """The constants of a release. Raises UnknownName for one that has not been read."""
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
