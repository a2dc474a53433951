"""Which collectives an nccl-tests table can be of, by its columns.

    older releases   Reduce has `redop` and `root`, AllReduce and ReduceScatter `redop` alone,
                     Broadcast `root` alone, AllGather and AlltoAll neither
    newer ones       all have both: `none` is no operation, and -1 no root

AlltoAll may name the column `redop` in its header and print nothing below it.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import Collective

#: (Whether it has an operation, a root) -> what that can be.
_BY_COLUMNS: Final = {
    (True, True): frozenset({Collective.Reduce}),
    (True, False): frozenset({Collective.AllReduce, Collective.ReduceScatter}),
    (False, True): frozenset({Collective.Broadcast, Collective.Scatter, Collective.Gather}),
    (False, False): frozenset({Collective.AllGather, Collective.AlltoAll, Collective.SendRecv}),
}
_NO_OPERATION: Final = "none"
#: Bandwidths below this have too few digits for a ratio.
_MIN_BANDWIDTH: Final = 1.0
#: From here on they are printed without decimals.
_MAX_BANDWIDTH: Final = 1e4
#: From so many ranks on the ratios are alike.
_ALIKE_RANKS: Final = 257


def collectives_by_columns(rows: npt.NDArray[Any], words: list[str]) -> frozenset[Collective]:
    """The collectives that rows of one run can be of; `words` are the names their `redop` indexes.

    The ratio of bus to algorithm bandwidth is checked too: it differs between collectives.
    """
    operations = {words[index] if index >= 0 else _NO_OPERATION for index in set(rows["redop"])}
    has_root = bool(np.any(rows["root"] >= 0))
    found = _BY_COLUMNS[operations != {_NO_OPERATION}, has_root]
    if has_root and bool(np.all(rows["redop"] < 0)):
        # Older columns, when nothing but Broadcast had a root and no operation.
        found = frozenset({Collective.Broadcast})
    return frozenset(each for each in found if _ratio_fits(rows, each))


def _ratio_fits(rows: npt.NDArray[Any], collective: Collective) -> bool:
    """Whether some number of ranks explains the bandwidth ratio, where digits suffice."""
    best = rows[int(np.argmax(np.where(rows["algbw"] < _MAX_BANDWIDTH, rows["algbw"], 0.0)))]
    algbw, busbw = float(best["algbw"]), float(best["busbw"])
    if not _MIN_BANDWIDTH <= algbw < _MAX_BANDWIDTH:
        return True
    factors = {collective.bus_factor(ranks) for ranks in range(1, _ALIKE_RANKS)}
    return any(abs(busbw - algbw * factor) <= 0.01 + 0.01 * algbw for factor in factors)
