"""Searches for tuning constants under which NCCL's own argmin is best on measured times.

Times are not fitted: NCCL's model cannot bend to them, and only its order of the cells counts. What
is made small is half the regret of the cell that NCCL would choose, and half that of a soft choice,
which has a slope where the first has none. Least squares on times was poor in a prototype.

T tasks of one communicator shape, C cells of NCCL's cost table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import differential_evolution

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.scoring import TaskGrid, task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.errors import NotEnoughData
from dynamiccl.nccl import NUM_ALGORITHMS, NUM_PROTOCOLS, Collective, Config
from dynamiccl.simulator.default import CostModel, Factors, Overrides
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from dynamiccl.train.data import TrainingData
from dynamiccl.train.recalibrate.factors import MOST, NUM_FACTORS, as_factors

Float64Array = npt.NDArray[np.float64]
_NUM_CELLS: Final = NUM_ALGORITHMS * NUM_PROTOCOLS
#: How sharp the soft choice is: e-fold in a twentieth of a cost.
_SHARPNESS: Final = 20.0
_GENERATIONS: Final = 16
_PER_FACTOR: Final = 8
#: ln of time: constants nearer to NCCL's own are preferred by this for each unit of their factors.
_CLOSE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Tasks:
    """Measured tasks of one shape, over the cells that leave channels to NCCL."""

    calls: Sequence[Call]
    #: (T, C) ln of time over the best measured cell's; inf where there is none.
    loss: Float64Array
    #: (T, C) what NCCL multiplies latency and bandwidth by at each size.
    latency_scale: Float64Array
    bandwidth_scale: Float64Array

    @classmethod
    def of(cls, grid: TaskGrid, catalogue: Catalogue, group: Group, model: CostModel) -> "Tasks":
        """The tasks of a group's shape; a cell without a measurement cannot be judged."""
        mine = (grid.tasks["num_nodes"] == group.num_nodes) & (
            grid.tasks["ranks_per_node"] == group.ranks_per_node
        )
        rows = np.flatnonzero(mine.to_numpy())
        asked = grid.tasks.select("collective", "size_bytes").rows()
        calls = [Call(group, Collective.parse(asked[r][0]), asked[r][1]) for r in rows]
        actions = {config: index for index, config in enumerate(catalogue.configs)}
        shape = (len(calls), _NUM_CELLS)
        time, latency, bandwidth = np.full(shape, np.inf), np.ones(shape), np.ones(shape)
        lines = model.lines(group)
        for row, call in zip(range(len(calls)), calls, strict=True):
            for pair in model.cells(group, call.collective):
                cell = pair[0] * NUM_PROTOCOLS + pair[1]
                own, here = lines[call.collective, *pair], model.line(call, *pair)
                latency[row, cell] = here.latency_us / own.latency_us
                bandwidth[row, cell] = here.algbw_gbytes_per_s / own.algbw_gbytes_per_s
                action = actions.get(Config(*pair))
                if action is not None:
                    measured = grid.times_us[rows[row], action]
                    time[row, cell] = np.inf if np.isnan(measured) else measured
        known = np.isfinite(time).any(axis=1)
        best = time[known].min(axis=1, keepdims=True)
        calls = [call for call, is_known in zip(calls, known, strict=True) if is_known]
        return cls(calls, np.log(time[known] / best), latency[known], bandwidth[known])


@dataclass(frozen=True, slots=True)
class Found:
    """Constants for one shape, and their losses: means of ln(time / best measured)."""

    factors: Factors
    #: Whether they are better than NCCL's own on the validation sizes, and so worth having.
    helps: bool
    #: On the test sizes: NCCL's own, with these constants, and a table of the nearest trained size.
    own: float
    constants: float
    table: float
    tasks: int

    @property
    def gain_of_table(self) -> float:
        """Share of the table's gain that the constants reach; NaN if a table gains nothing."""
        gain = self.own - self.table
        return (self.own - self.constants) / gain if gain > 0.0 else float("nan")


def recalibrate(
    data: TrainingData, test_grid: TaskGrid, model: CostModel, group: Group, *, seed: int
) -> Found:
    """Fit one shape's constants on the training sizes, choose on validation, judge on test.

    Raises NotEnoughData where the shape has no task in one of the three.
    """
    frame, catalogue = data.frame, data.catalogue
    grids = {
        Split.TRAIN: task_grid(frame, catalogue, [Split.TRAIN]),
        Split.VALIDATION: data.validation,
        Split.TEST: test_grid,
    }
    parts = {split: Tasks.of(grid, catalogue, group, model) for split, grid in grids.items()}
    for split, part in parts.items():
        if not part.calls:
            raise NotEnoughData(
                f"no {split.value} task of {group.num_nodes}x{group.ranks_per_node} with a config "
                "that leaves channels to NCCL: measure algorithms and protocols without counts"
            )
    train, validation, test = (parts[split] for split in Split)
    nccl, own = Recalibration(model, group), Factors()
    factors = nccl.fit(train, seed=seed)
    helps = nccl.mean_loss(validation, factors) < nccl.mean_loss(validation, own)
    return Found(
        factors=factors,
        helps=helps,
        own=nccl.mean_loss(test, own),
        constants=nccl.mean_loss(test, factors if helps else own),
        table=float(nearest_size(train, test).mean()),
        tasks=len(test.calls),
    )


def nearest_size(train: Tasks, asked: Tasks) -> Float64Array:
    """(T,) loss of the best cell at the nearest training size of the collective."""
    found = np.zeros(len(asked.calls))
    sizes = np.log2([call.size_bytes for call in train.calls])
    for row, call in enumerate(asked.calls):
        alike = np.array([each.collective is call.collective for each in train.calls])
        off = np.where(alike, np.abs(sizes - np.log2(call.size_bytes)), np.inf)
        found[row] = asked.loss[row, train.loss[int(off.argmin())].argmin()]
    return found


class Recalibration:
    """NCCL's choices on one shape under modified constants."""

    def __init__(self, model: CostModel, group: Group) -> None:
        """Start from NCCL's own constants."""
        self._model, self._group = model, group

    def costs_us(self, tasks: Tasks, factors: Factors) -> Float64Array:
        """(T, C) NCCL's predicted times, us; inf where it lacks a cell."""
        found = np.full(tasks.loss.shape, np.inf)
        lines = self._with(factors).lines(self._group)
        for row, call in enumerate(tasks.calls):
            for (collective, algorithm, protocol), line in lines.items():
                if collective is call.collective:
                    cell = algorithm * NUM_PROTOCOLS + protocol
                    gbytes_per_s = line.algbw_gbytes_per_s * tasks.bandwidth_scale[row, cell]
                    latency_us = line.latency_us * tasks.latency_scale[row, cell]
                    found[row, cell] = latency_us + call.size_bytes / (1e3 * gbytes_per_s)
        return found

    def mean_loss(self, tasks: Tasks, factors: Factors) -> float:
        """Mean ln(time of NCCL's choice / best measured); inf if one was not measured."""
        cells = self.costs_us(tasks, factors).argmin(axis=1)
        return float(tasks.loss[np.arange(len(cells)), cells].mean())

    def fit(self, tasks: Tasks, *, seed: int) -> Factors:
        """The factors with the smallest loss on some tasks; a few thousand evaluations."""
        # A cell that nobody measured costs as much as the worst that was.
        worst = np.where(np.isfinite(tasks.loss), tasks.loss, 0.0).max(initial=0.0)
        loss = np.where(np.isfinite(tasks.loss), tasks.loss, worst)
        rows = np.arange(len(loss))

        def objective(logs: Float64Array) -> float:
            costs = self.costs_us(tasks, as_factors(logs))
            least = costs.min(axis=1, keepdims=True)
            weights = np.exp(-_SHARPNESS * np.log(costs / least))
            soft = (weights * loss).sum(axis=1) / weights.sum(axis=1)
            hard = loss[rows, costs.argmin(axis=1)]
            return float(0.5 * (soft + hard).mean() + _CLOSE * np.abs(logs).mean())

        found = differential_evolution(
            objective,
            [(-MOST, MOST)] * NUM_FACTORS,
            x0=np.zeros(NUM_FACTORS),
            maxiter=_GENERATIONS,
            popsize=_PER_FACTOR,
            polish=False,
            seed=seed,
        )
        return as_factors(found.x)

    def _with(self, factors: Factors) -> CostModel:
        model = self._model
        return CostModel(model.version, model.machine, replace(Overrides(), factors=factors))
