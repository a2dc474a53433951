"""Measured tasks as training rows of a model of times.

T tasks, N rows, R numbers of a row, S machines
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.episodes import with_noise
from dynamiccl.datasets.features import CONTEXT_COLUMN, Float32Array, cold_observations
from dynamiccl.datasets.scoring import TaskGrid, task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.sizes import BINS_PER_OCTAVE
from dynamiccl.train.cautious.rows import RowMaker
from dynamiccl.train.cautious.share_table import share_table
from dynamiccl.train.data import TrainingData

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rows:
    """N measured rows."""

    numbers: torch.Tensor  # (N, R) float64
    cells: torch.Tensor  # (N,) int64
    y: torch.Tensor  # (N,) ln of time over what was expected
    repeats: torch.Tensor  # (N,) independent repeats behind y

    def take(self, which: torch.Tensor) -> "Rows":
        """The rows selected by `which`."""
        return Rows(self.numbers[which], self.cells[which], self.y[which], self.repeats[which])

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, slots=True)
class Tasks:
    """T tasks of the training and validation bins, with their measurements and rows."""

    grid: TaskGrid
    context: Float32Array
    maker: RowMaker
    is_train: BoolArray
    octave: Int64Array
    #: The machine of each task, and the features of each machine.
    machine: Int64Array
    machines: torch.Tensor
    collective: Int64Array
    #: (T,) number of the machine's group shape, and (S, 3) machine and shape of each.
    shape: Int64Array
    shapes: torch.Tensor
    numbers: torch.Tensor
    cells: torch.Tensor
    cost: torch.Tensor
    known: torch.Tensor
    #: How much of an interference level each cell feels.
    level_shares: torch.Tensor

    @classmethod
    def of(cls, data: TrainingData) -> Self:
        """The tasks of a data set."""
        grid = task_grid(data.frame, data.catalogue, [Split.TRAIN, Split.VALIDATION])
        maker = RowMaker(data.catalogue.configs, len(data.profiles), costs=data.costs is not None)
        maker.eval()
        asked = with_noise(grid.tasks, data.training.noise)
        context = cold_observations(asked, data.profiles, data.costs).context
        told = torch.from_numpy(context)
        with torch.no_grad():
            numbers, cells, cost, known = maker(told)
            machines, machine = torch.unique(maker.machines(told), dim=0, return_inverse=True)
            place = [
                told[:, CONTEXT_COLUMN[name]] for name in ("log2_nodes", "log2_ranks_per_node")
            ]
            shapes, shape = torch.unique(
                torch.stack([machine.to(told.dtype), *place], dim=1), dim=0, return_inverse=True
            )
            collective = maker.collectives(told).numpy()
        return cls(
            grid,
            context,
            maker,
            (grid.tasks["split"] == Split.TRAIN.value).to_numpy(),
            (grid.tasks["bin"].to_numpy() // BINS_PER_OCTAVE).astype(np.int64),
            machine.numpy(),
            machines,
            collective,
            shape.numpy(),
            shapes,
            numbers,
            cells,
            cost,
            known,
            share_table(data.level_shares, _systems(list(grid.tasks["system"]), machine.numpy())),
        )

    def __len__(self) -> int:
        return len(self.context)

    def rows(self, which: Int64Array, *, uses_cost: bool) -> Rows:
        """The rows of some tasks, one for each measured cell."""
        times = torch.from_numpy(self.grid.times_us[which])
        is_measured = ~torch.isnan(times)
        if uses_cost:
            is_measured &= self.known[which]
            expected = self.cost[which]
        else:
            expected = torch.log(times[:, ABSTAIN_ACTION : ABSTAIN_ACTION + 1])
        y = torch.log(times) - expected
        return Rows(
            self.numbers[which][is_measured],
            self.cells[which][is_measured],
            y[is_measured],
            torch.from_numpy(self.grid.repeats[which]).to(torch.float64)[is_measured],
        )


def _systems(system: Sequence[str], machine: Int64Array) -> list[str]:
    """The system of each machine; `system` and `machine` are of the tasks."""
    first = np.unique(machine, return_index=True)[1]
    return [system[index] for index in first]
