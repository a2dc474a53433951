"""One draw of a world (learning_worlds.py): data, truth, and a rival for shapes left out."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import tuned
from dynamiccl.datasets.costs import log_costs, read_costs
from dynamiccl.datasets.episodes import with_noise
from dynamiccl.datasets.features import cold_observations
from dynamiccl.datasets.scoring import TaskGrid, task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.baselines.tables import Predictor, unknown
from dynamiccl.evaluate.policies import Actions
from dynamiccl.evaluate.worlds.kinds import NO_NOISE, WORLDS
from dynamiccl.nccl import NUM_PROTOCOLS
from dynamiccl.train.cautious.fit import Fitted
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.policy import forward


@dataclass(frozen=True, slots=True)
class Draw:
    """One world, its data and the truth on the test sizes."""

    data: TrainingData
    test: TaskGrid
    truth: TaskGrid
    costs: pl.DataFrame

    @classmethod
    def make(cls, kind: str, seed: int, folder: Path) -> "Draw":
        """Sweep it, with noise and without."""
        world = WORLDS[kind]
        noisy = world.sweep(folder / "data", seed, "noisy", 3, "")
        exact = world.sweep(folder / "truth", seed, "truth", 1, NO_NOISE)
        data = load_data(noisy, seed, with_costs=True)
        test = task_grid(data.frame, data.catalogue, [Split.TEST])
        truth = task_grid(tuned(read(exact)), data.catalogue, [Split.TEST])
        return cls(data, test, truth, read_costs(noisy))

    def parts(self) -> tuple[TaskGrid, TaskGrid]:
        """Training and validation tasks."""
        frame, catalogue = self.data.frame, self.data.catalogue
        return (
            task_grid(frame, catalogue, [Split.TRAIN]),
            task_grid(frame, catalogue, [Split.VALIDATION]),
        )

    def only(self, is_kept: pl.Expr) -> "Draw":
        """With less to learn from."""
        return replace(self, data=replace(self.data, frame=self.data.frame.filter(is_kept)))

    def ask(self, fitted: Fitted, grid: TaskGrid, *, costs: bool, sure: bool) -> Actions:
        """What a cautious policy chooses."""
        policy = fitted.policy
        asked = with_noise(grid.tasks, self.data.training.noise)
        told = cold_observations(asked, self.data.profiles, self.costs if costs else None)
        kept = policy.caution
        if not sure:
            policy.caution = torch.zeros_like(kept)
        chosen = forward(policy, told, grid.mask)[0]
        policy.caution = kept
        return chosen


class CostTimesResidual(Predictor):
    """NCCL's cost of a config times what it was off at the nearest measured shape and size."""

    name = "cost x residual"

    def __init__(
        self, training: TaskGrid, catalogue: Catalogue, costs: pl.DataFrame, *, by_rank: bool
    ) -> None:
        """`by_rank`: sizes are compared a rank."""
        self._catalogue, self._costs, self._by_rank = catalogue, costs, by_rank
        self._place = self._places(training)
        self._residual = np.log(training.times_us) - self._expected(training)
        self._collective = training.tasks["collective"].to_numpy()

    def _places(self, grid: TaskGrid) -> npt.NDArray[np.float64]:
        told = np.log2(grid.tasks.select("num_nodes", "ranks_per_node", "size_bytes").to_numpy())
        if self._by_rank:
            told[:, 2] -= told[:, 0] + told[:, 1]
        # The shape first, then the size.
        return told * np.array([100.0, 100.0, 1.0])

    def _expected(self, grid: TaskGrid) -> npt.NDArray[np.float64]:
        costs = log_costs(grid.tasks, self._costs)
        costs = np.where(costs == 0.0, np.nan, costs)
        best = np.nanmin(costs, axis=1)
        columns = [
            best
            if config.algorithm is None or config.protocol is None
            else costs[:, config.algorithm * NUM_PROTOCOLS + config.protocol]
            for config in self._catalogue.configs
        ]
        return np.column_stack(columns)

    def predict(self, grid: TaskGrid) -> npt.NDArray[np.float64]:
        """(T, A) ln of time over NCCL's default."""
        predicted, places, expected = unknown(grid), self._places(grid), self._expected(grid)
        for row, collective in enumerate(grid.tasks["collective"]):
            mine = np.flatnonzero(self._collective == collective)
            near = mine[np.argmin(np.abs(self._place[mine] - places[row]).sum(axis=1))]
            time = self._residual[near] + expected[row]
            predicted[row] = np.where(np.isnan(time), np.inf, time - time[ABSTAIN_ACTION])
        return predicted
