"""The fitted parameters: factors on some of NCCL's tuning constants.

One communicator shape's costs depend on one row of each table of ceilings, and on one or two links;
all else stays NCCL's own.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import NUM_ALGORITHMS, NUM_PROTOCOLS, Algorithm, Protocol
from dynamiccl.simulator.default import Factors
from dynamiccl.simulator.default.communicator import Communicator
from dynamiccl.simulator.default.constants import BASE_US, HOP_US, LL_MAX, Generation, Hop

_CELLS: Final = tuple((a, p) for a in (Algorithm.Tree, Algorithm.Ring) for p in Protocol)
_HOPS: Final = (
    *_CELLS,
    (Algorithm.NVLS, Protocol.Simple),
    (Algorithm.NVLSTree, Protocol.Simple),
)
_CEILINGS: Final = ("ll_max", "ring_ll128", "tree_ll128", "tree", "nvls_tree")
NUM_FACTORS: Final = len(_CELLS) + len(_HOPS) + len(_CEILINGS)
#: Natural logarithm: a factor lies between a fifth and five; a tuner refuses a hundred.
MOST: Final = 1.6
#: In the order of `ncclTunerConstants_v5_t`'s `hwLatencies`.
_LINKS: Final = (Hop.NVLINK, Hop.PCI, Hop.NET)
_GENERATIONS: Final = len(LL_MAX)


def as_factors(logs: Sequence[float] | npt.NDArray[np.float64]) -> Factors:
    """Factors from their natural logarithms (NUM_FACTORS,)."""
    values = [float(each) for each in np.exp(np.asarray(logs, dtype=np.float64))]
    base, rest = values[: len(_CELLS)], values[len(_CELLS) :]
    hop, ceilings = rest[: len(_HOPS)], rest[len(_HOPS) :]
    return Factors(
        base=dict(zip(_CELLS, base, strict=True)),
        hop=dict(zip(_HOPS, hop, strict=True)),
        **dict(zip(_CEILINGS, ceilings, strict=True)),
    )


def as_constants(factors: Factors, comm: Communicator) -> dict[str, Any]:
    """The constants by NCCL's names, nested lists with null for NCCL's own.

    As `dynamiccl-deploy constants --from` takes them; `comm` is the shape that they are for, with
    NCCL's own constants.
    """
    base = np.zeros((NUM_ALGORITHMS, NUM_PROTOCOLS))
    for (algorithm, protocol), factor in factors.base.items():
        base[algorithm, protocol] = BASE_US[algorithm][protocol] * factor
    hops = np.zeros((len(_LINKS), NUM_ALGORITHMS, NUM_PROTOCOLS))
    for index, link in enumerate(_LINKS):
        for (algorithm, protocol), factor in factors.hop.items():
            own = HOP_US[link].get(algorithm, {}).get(protocol, 0.0)
            if link is Hop.NET and algorithm is Algorithm.NVLSTree:
                own = comm.release.nvls_tree_net_us
            hops[index, algorithm, protocol] = own * factor
    row = comm.generation
    found = {
        "baseLatencies": base,
        "hwLatencies": hops,
        "llMaxBws": _only(comm.ll_max_row, comm.column, comm.ll_max * factors.ll_max),
    }
    for name, (ceilings, factor) in {
        "perChMaxRingLL128Bws": (comm.release.ring_ll128(row), factors.ring_ll128),
        "perChMaxTreeLL128Bws": (comm.release.tree_ll128(row), factors.tree_ll128),
        "perChMaxTreeBws": (comm.release.tree(row), factors.tree),
        "perChMaxNVLSTreeBws": (comm.release.nvls_tree(row), factors.nvls_tree),
    }.items():
        found[name] = _only(row, comm.column, ceilings[comm.column] * factor)
    return {name: _listed(values) for name, values in found.items()}


def _only(row: int | Generation, column: int, value: float) -> npt.NDArray[np.float64]:
    table = np.zeros((_GENERATIONS, 3))
    table[int(row), column] = value
    return table


def _listed(values: npt.NDArray[np.float64]) -> Any:
    shown = values.astype(object)
    shown[values == 0.0] = None
    return shown.tolist()
