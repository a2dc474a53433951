"""NCCL's own cost model, corrected by its residuals at measured points.

T tasks, A actions
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from dynamiccl.evaluate.baselines.families import rows_by_family, with_known

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.datasets.features import log_costs
from dynamiccl.evaluate.baselines.tables import Predictor, unknown
from dynamiccl.nccl import NUM_PROTOCOLS

#: Tasks that one residual may be taken from for another.
_FAMILY: Final = ("system", "nccl_version", "launch_profile", "collective")
_PLACE: Final = ("num_nodes", "ranks_per_node", "size_bytes")
#: Octaves of nodes and ranks count for so many of size: the shape first, then the size.
_WEIGHT: Final = np.array([100.0, 100.0, 1.0])


class CostTimesResidual(Predictor):
    """NCCL's cost of a config times its residual at the nearest measured shape and size.

    It says something of shapes that nobody measured, where NCCL's costs of them are known.
    """

    name = "cost-times-residual"

    def __init__(
        self,
        training: TaskGrid,
        catalogue: Catalogue,
        costs: pl.DataFrame,
        *,
        by_rank: bool = False,
    ) -> None:
        """`costs` as `datasets.costs.read_costs` gives them; `by_rank`: sizes compared a rank."""
        self._configs, self._costs, self._by_rank = catalogue.configs, costs, by_rank
        self._place = self._places(training)
        self._residual = np.log(training.times_us) - self._expected(training)
        self._families = rows_by_family(training.tasks, _FAMILY)

    def _places(self, grid: TaskGrid) -> npt.NDArray[np.float64]:
        told: npt.NDArray[np.float64] = np.log2(grid.tasks.select(_PLACE).to_numpy())
        if self._by_rank:
            told[:, 2] -= told[:, 0] + told[:, 1]
        told *= _WEIGHT
        return told

    def _expected(self, grid: TaskGrid) -> npt.NDArray[np.float64]:
        """(T, A) ln of NCCL's cost; NaN where unknown."""
        costs = log_costs(grid.tasks, self._costs).astype(np.float64)
        costs[costs == 0.0] = np.inf
        cells = np.arange(costs.shape[1])
        columns = []
        for config in self._configs:
            is_open = np.ones(len(cells), dtype=np.bool_)
            if config.algorithm is not None:
                is_open &= cells // NUM_PROTOCOLS == config.algorithm
            if config.protocol is not None:
                is_open &= cells % NUM_PROTOCOLS == config.protocol
            columns.append(costs[:, is_open].min(axis=1))
        found = np.column_stack(columns)
        return np.where(np.isfinite(found), found, np.nan)

    def predict(self, grid: TaskGrid) -> npt.NDArray[np.float64]:
        """(T, A) ln(time / NCCL's default); inf = unknown, 0 of the default itself."""
        predicted, places, expected = unknown(grid), self._places(grid), self._expected(grid)
        for rows, mine in with_known(grid.tasks, self._families, _FAMILY):
            apart = np.abs(self._place[mine][None] - places[rows][:, None]).sum(axis=2)
            time = self._residual[mine[apart.argmin(axis=1)]] + expected[rows]
            ratio = time - time[:, [ABSTAIN_ACTION]]
            predicted[rows] = np.where(np.isnan(ratio), np.inf, ratio)
            predicted[rows, ABSTAIN_ACTION] = 0.0
        return predicted
