"""One draw of a simulated world (learning_worlds.py): data and truth."""

from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
import torch

from dynamiccl.datasets.cells import tuned
from dynamiccl.datasets.costs import read_costs
from dynamiccl.datasets.episodes import with_noise
from dynamiccl.datasets.features import cold_observations
from dynamiccl.datasets.scoring import TaskGrid, task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.policies import Actions
from dynamiccl.evaluate.worlds.kinds import NO_NOISE, WORLDS
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
        """Run its sweeps, with noise and without."""
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
        """A draw with a subset of the training data."""
        return replace(self, data=replace(self.data, frame=self.data.frame.filter(is_kept)))

    def ask(self, fitted: Fitted, grid: TaskGrid, *, costs: bool, sure: bool) -> Actions:
        """The choices of a cautious policy."""
        policy = fitted.policy
        asked = with_noise(grid.tasks, self.data.training.noise)
        told = cold_observations(asked, self.data.profiles, self.costs if costs else None)
        kept = policy.caution
        if not sure:
            policy.caution = torch.zeros_like(kept)
        chosen = forward(policy, told, grid.mask)[0]
        policy.caution = kept
        return chosen
