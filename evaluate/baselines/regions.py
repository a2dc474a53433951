"""Regions of sizes with one config each, as tables inside RCCL and aws-ofi-nccl hold them."""

from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.baselines.families import rows_by_family
from dynamiccl.evaluate.policies import Actions, NcclDefault


class RegionTable:
    """At most k consecutive regions of sizes a family, each with one config, fitted as a whole.

    Borders and configs are those of the least mean log time over NCCL's default on the training
    sizes, by dynamic programming; a border lies halfway between two of them in log size. A config
    counts as the default where it was not measured, and the default itself is a candidate.
    """

    name = "region-table"
    #: Most regions to pick from.
    SETTINGS: Final = (2, 3, 5, 8)

    def __init__(self, training: TaskGrid, setting: int = 5) -> None:
        """Fit each family's regions to its training tasks."""
        log_ratio = np.log(training.times_us / training.default_us[:, None])
        log_ratio = np.where(np.isnan(log_ratio), 0.0, log_ratio)
        log_size = np.log2(training.tasks["size_bytes"].to_numpy())
        #: Family -> borders (log2 bytes), one fewer than configs, and configs.
        self._tables: dict[tuple[object, ...], tuple[npt.NDArray[np.float64], Actions]] = {}
        for key, rows in rows_by_family(training.tasks).items():
            sizes, where = np.unique(log_size[rows], return_inverse=True)
            costs = np.zeros((len(sizes), log_ratio.shape[1]))
            np.add.at(costs, where, log_ratio[rows])
            starts, actions = fit_regions(costs, setting)
            middle = (sizes[1:] + sizes[:-1]) / 2.0
            self._tables[key] = middle[starts[1:] - 1], actions

    def choose(self, grid: TaskGrid) -> Actions:
        """The region's config where it was measured, else NCCL's default."""
        chosen = NcclDefault().choose(grid)
        log_size = np.log2(grid.tasks["size_bytes"].to_numpy())
        for key, rows in rows_by_family(grid.tasks).items():
            if key in self._tables:
                borders, actions = self._tables[key]
                wanted = actions[np.searchsorted(borders, log_size[rows], side="right")]
                chosen[rows] = np.where(grid.mask[rows, wanted], wanted, ABSTAIN_ACTION)
        return chosen


def fit_regions(
    costs: npt.NDArray[np.float64], most: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut rows into at most `most` consecutive regions, one column each, of the least total cost.

    `costs` (S, A) of S sizes in order and A actions. Returns the first row and the column of each
    region; the fewest regions of equal totals, the first column of equals.

    >>> [part.tolist() for part in fit_regions(np.array([[0, 1], [0, 1], [5, 0]]), 2)]
    [[0, 2], [0, 1]]
    """
    num = len(costs)
    sums = np.concatenate([np.zeros((1, costs.shape[1])), np.cumsum(costs, axis=0)])
    # (S + 1, S + 1) the least cost of rows i to j - 1 under one action.
    one = np.full((num + 1, num + 1), np.inf)
    for i in range(num):
        one[i, i + 1 :] = (sums[i + 1 :] - sums[i]).min(axis=1)
    totals, cuts = [one[0]], [np.zeros(num + 1, dtype=np.int64)]
    for _ in range(1, min(most, num)):
        through = totals[-1][:, None] + one  # the last region begins at row i
        cuts.append(through.argmin(axis=0))
        totals.append(through.min(axis=0))
    regions = int(np.argmin(np.round([each[num] for each in totals], 12)))
    starts, end = [], num
    for cut in reversed(cuts[: regions + 1]):
        starts.append(int(cut[end]))
        end = starts[-1]
    firsts = np.array(starts[::-1], dtype=np.int64)
    ends = np.append(firsts[1:], num)
    actions: npt.NDArray[np.int64] = (sums[ends] - sums[firsts]).argmin(axis=1).astype(np.int64)
    return firsts, actions
