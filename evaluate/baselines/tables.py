"""Tables of configs by size, made straight from the measured times."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from dynamiccl.evaluate.baselines.families import FAMILY, POOL, rows_by_family, with_known

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.evaluate.policies import Actions, NcclDefault


class Predictor(ABC):
    """A policy that predicts the time of every action, and takes the smallest."""

    name: str

    @abstractmethod
    def predict(self, grid: TaskGrid) -> npt.NDArray[np.float64]:
        """(T, A) ln(time / NCCL's default); inf = unknown, 0 of the default itself."""

    def choose(self, grid: TaskGrid) -> Actions:
        """The measured action with the smallest prediction; NCCL's default on ties."""
        predicted = np.where(grid.mask, self.predict(grid), np.inf)
        chosen: Actions = np.argmin(predicted, axis=1).astype(np.int64)
        return chosen


class BestFixed:
    """The one config of each family that was best over its training sizes.

    Best = least mean log time over NCCL's default; a config counts as the default where it was not
    measured, and the default itself is a candidate.
    """

    name = "best-fixed"
    family: Sequence[str] = FAMILY

    def __init__(self, training: TaskGrid) -> None:
        """Pick each family's config from its training tasks."""
        self._best: dict[tuple[object, ...], int] = {}
        log_ratio = np.log(training.times_us / training.default_us[:, None])
        log_ratio = np.where(np.isnan(log_ratio), 0.0, log_ratio)
        for key, rows in rows_by_family(training.tasks, self.family).items():
            self._best[key] = int(np.argmin(log_ratio[rows].mean(axis=0)))

    def choose(self, grid: TaskGrid) -> Actions:
        """The family's config where it was measured, else NCCL's default."""
        chosen = NcclDefault().choose(grid)
        for key, rows in rows_by_family(grid.tasks, self.family).items():
            action = self._best.get(key, ABSTAIN_ACTION)
            chosen[rows] = np.where(grid.mask[rows, action], action, ABSTAIN_ACTION)
        return chosen


class PooledFixed(BestFixed):
    """The same, one config for all group shapes: what an environment variable can do."""

    name = "pooled-fixed"
    family = POOL


class NearestSize(Predictor):
    """The best config of the nearest training size of the same family (by ratio of sizes)."""

    name = "nearest-size"

    def __init__(self, training: TaskGrid) -> None:
        """Keep the training tasks as the table."""
        self._log_ratio = np.log(training.times_us / training.default_us[:, None])
        self._log_size = np.log2(training.tasks["size_bytes"].to_numpy())
        self._families = rows_by_family(training.tasks)

    def predict(self, grid: TaskGrid) -> npt.NDArray[np.float64]:
        """(T, A) ln(time / NCCL's default); inf = unknown, 0 of the default."""
        predicted = unknown(grid)
        log_size = np.log2(grid.tasks["size_bytes"].to_numpy())
        for rows, known in with_known(grid.tasks, self._families):
            apart = np.abs(self._log_size[known] - log_size[rows][:, None])
            near = self._log_ratio[known[apart.argmin(axis=1)]]
            predicted[rows] = np.where(np.isnan(near), np.inf, near)
        return predicted


class Interpolated(Predictor):
    """The fastest config, with times interpolated (log-log) between training sizes."""

    name = "interpolated"

    def __init__(self, training: TaskGrid) -> None:
        """Keep the training tasks."""
        self._log_time = np.log(training.times_us)
        self._log_size = np.log2(training.tasks["size_bytes"].to_numpy())
        self._families = rows_by_family(training.tasks)

    def predict(self, grid: TaskGrid) -> npt.NDArray[np.float64]:
        """(T, A) ln(time / NCCL's default); inf = unknown, 0 of the default."""
        predicted = unknown(grid)
        log_size = np.log2(grid.tasks["size_bytes"].to_numpy())
        for rows, known in with_known(grid.tasks, self._families):
            for action in range(grid.times_us.shape[1]):
                order = known[np.argsort(self._log_size[known])]
                order = order[~np.isnan(self._log_time[order, action])]
                if len(order):
                    predicted[rows, action] = np.interp(
                        log_size[rows], self._log_size[order], self._log_time[order, action]
                    )
            predicted[rows] -= predicted[rows, ABSTAIN_ACTION][:, None]
        return predicted


class FiveBins:
    """The fastest row in each of five size ranges, as NVIDIA's script does.

    Bins and rule of `ext-tuner/example/scripts/optimize_config.py` (v2.28.9-1, ConfigOptimizer with
    its own size ranges): of all rows of a bin the one with the least latency wins, whatever size it
    was measured at; so the smallest size of a bin decides for all of it.
    """

    name = "five-bins"
    #: Largest size of each bin but the last, bytes.
    EDGES_BYTES: Final = (1024, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024)

    def __init__(self, training: TaskGrid) -> None:
        """Keep each family's row with the least time, bin by bin."""
        self._best: dict[tuple[object, ...], dict[int, int]] = {}
        bins = self._bins(training)
        times = np.where(training.mask, training.times_us, np.inf)
        for key, rows in rows_by_family(training.tasks).items():
            self._best[key] = {
                int(each): int(np.argmin(times[rows[bins[rows] == each]].min(axis=0)))
                for each in np.unique(bins[rows])
            }

    def choose(self, grid: TaskGrid) -> Actions:
        """The bin's config where it was measured, else NCCL's default."""
        chosen = NcclDefault().choose(grid)
        bins = self._bins(grid)
        for key, rows in rows_by_family(grid.tasks).items():
            best = self._best.get(key, {})
            for row in rows:
                action = best.get(int(bins[row]), ABSTAIN_ACTION)
                chosen[row] = action if grid.mask[row, action] else ABSTAIN_ACTION
        return chosen

    def _bins(self, grid: TaskGrid) -> npt.NDArray[np.int64]:
        sizes = grid.tasks["size_bytes"].to_numpy()
        return np.searchsorted(self.EDGES_BYTES, sizes, side="left").astype(np.int64)


def unknown(grid: TaskGrid) -> npt.NDArray[np.float64]:
    """(T, A) predictions without information: 0 of NCCL's default, inf of all others."""
    predicted = np.full(grid.times_us.shape, np.inf)
    predicted[:, ABSTAIN_ACTION] = 0.0
    return predicted
