"""Chooses the base of learned times: NCCL's predicted costs, or none.

Costs help where what NCCL is off by is simpler than the times are: that differs from machine to
machine. For each (system, collective, config) a straight line in size and group shape is fitted
to ln(time / NCCL's cost) of the training tasks, and one to ln(time), both less that of NCCL's own
choice; the base is that whose lines are less off on the validation tasks. It takes a second, where
training with each takes twice the time.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.cells import TaskGrid, task_grid
from dynamiccl.datasets.features import cold_observations
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import with_noise
from dynamiccl.train.action_features import COST_KNOWN, LOG_COST, ActionFeatures
from dynamiccl.train.data import TrainingData

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Residuals:
    """Root mean square residuals of linear fits on validation tasks, in ln(time), by base."""

    over_cost: float
    over_time: float

    @property
    def is_cost_better(self) -> bool:
        """Whether the fit over NCCL's costs has the smaller residual."""
        return self.over_cost < self.over_time


def base_residuals(data: TrainingData) -> Residuals | None:
    """Residuals over each base; None where NCCL's costs, or two tasks, are missing."""
    parts = [
        _Part.of(data, task_grid(data.frame, data.catalogue, [split]))
        for split in (Split.TRAIN, Split.VALIDATION)
    ]
    off: list[list[Float64Array]] = [[], []]
    train, held = parts
    for group in np.unique(train.group):
        mine, asked = train.group == group, held.group == group
        for action in range(ABSTAIN_ACTION + 1, train.time.shape[1]):
            told = mine & train.known[:, action]
            new = asked & held.known[:, action]
            if told.sum() < 2 or not new.any():
                continue
            for errors, base in zip(off, ("over_cost", "time"), strict=True):
                y, wanted = (getattr(part, base)[:, action] for part in parts)
                line = np.linalg.lstsq(train.place[told], y[told], rcond=None)[0]
                errors.append(held.place[new] @ line - wanted[new])
    if not off[0]:
        return None
    return Residuals(*(float(np.sqrt(np.mean(np.concatenate(each) ** 2))) for each in off))


@dataclass(frozen=True, slots=True)
class _Part:
    """T tasks and A actions."""

    group: npt.NDArray[np.str_]  # (T,) system and collective
    place: Float64Array  # (T, 4): 1, size, nodes, ranks a node
    #: (T, A) ln of time, and of time over NCCL's cost, less those of NCCL's own choice.
    time: Float64Array
    over_cost: Float64Array
    known: npt.NDArray[np.bool_]  # (T, A) measured, and the cost is known

    @classmethod
    def of(cls, data: TrainingData, grid: TaskGrid) -> "_Part":
        tasks = with_noise(grid.tasks, data.training.noise)
        context = cold_observations(tasks, data.profiles, data.costs).context
        features = ActionFeatures(data.catalogue.configs, data.cost_start)
        told = features(torch.from_numpy(context)).numpy().astype(np.float64)
        has_cost = told[:, :, COST_KNOWN] > 0.5
        time = np.log(grid.times_us)
        over_cost = time - told[:, :, LOG_COST]
        names = tasks.select(tasks["system"] + "/" + tasks["collective"]).to_series()
        places = tasks.select("size_bytes", "num_nodes", "ranks_per_node").to_numpy()
        return cls(
            names.to_numpy().astype(np.str_),
            np.column_stack([np.ones(len(places)), np.log2(places)]),
            time - time[:, :1],
            over_cost - over_cost[:, :1],
            grid.mask & has_cost & has_cost[:, :1],
        )
