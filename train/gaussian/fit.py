"""Fit a Gaussian process to a data set, and find how sure it must be before it acts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.episodes import with_noise
from dynamiccl.datasets.features import CONTEXT_COLUMN, Float32Array, cold_observations
from dynamiccl.datasets.scoring import TaskGrid, task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.sizes import BINS_PER_OCTAVE
from dynamiccl.train.data import TrainingData
from dynamiccl.train.gaussian.caution import Calibration
from dynamiccl.train.gaussian.felt import felt_table
from dynamiccl.train.gaussian.kernel import Kernel
from dynamiccl.train.gaussian.policy import Block, GaussianPolicy
from dynamiccl.train.gaussian.posterior import Posterior, Rows, fit_kernel
from dynamiccl.train.gaussian.rows import RowMaker

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Parts that the training octaves are held out in, to calibrate on them.
_OCTAVE_PARTS: Final = 3
#: Parts at most that group shapes are held out in, and how many shapes that needs.
_SHAPE_PARTS: Final = 8
_MIN_SHAPES: Final = 3
#: ln of time: nothing repeats better.
_LEAST_NOISE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Fitted:
    """A policy, and what is known of it."""

    policy: GaussianPolicy
    #: The same that has seen training bins alone: what the validation bins can judge.
    of_training: GaussianPolicy
    #: On sizes held out, and on whole group shapes, each by machine; the latter are empty for few
    #: shapes.
    of_sizes: Sequence[Calibration]
    of_shapes: Sequence[Calibration]


def fit_gaussian(
    data: TrainingData, *, alpha: float, seed: int, level_threshold: float = 0.0
) -> Fitted:
    """Fit to the training and validation bins, and calibrate on what was held out of them.

    The rows of a machine share a kernel; each collective has its own posterior. What is expected of
    a time is NCCL's cost, or the time of its own choice: whichever has the least regret on the
    validation bins. `level_threshold` as in `GaussianPolicy`.
    """
    tasks = _Tasks.of(data)
    machines = [_Machine(tasks, number, seed) for number in np.unique(tasks.machine)]
    of_sizes = [Calibration.joined(one.held_out_sizes()) for one in machines]
    of_shapes = [Calibration.joined(one.held_out_shapes()) for one in machines]
    # By machine, since what is true of one need not be of another.
    caution = torch.tensor(
        [
            [here.caution(alpha), elsewhere.caution(alpha)]
            for here, elsewhere in zip(of_sizes, of_shapes, strict=True)
        ],
        dtype=torch.float64,
    )
    every = np.ones(len(tasks), dtype=np.bool_)
    policy = tasks.policy([b for one in machines for b in one.blocks(every)], caution)
    policy.level_threshold = level_threshold
    return Fitted(
        policy,
        tasks.policy([b for one in machines for b in one.blocks(tasks.is_train)], caution),
        of_sizes,
        of_shapes,
    )


@dataclass(frozen=True, slots=True)
class _Tasks:
    """T tasks of the training and validation bins: what was measured, and their rows."""

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
    felt: torch.Tensor

    @classmethod
    def of(cls, data: TrainingData) -> Self:
        grid = task_grid(data.frame, data.catalogue, [Split.TRAIN, Split.VALIDATION])
        maker = RowMaker(
            data.catalogue.configs, len(data.profiles), costs=data.costs is not None
        ).eval()
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
            felt_table(data.felt, _systems(grid.tasks["system"].to_list(), machine.numpy())),
        )

    def __len__(self) -> int:
        return len(self.context)

    def rows(self, which: Int64Array, *, uses_cost: bool) -> Rows:
        """All that was measured of some tasks, one row a cell."""
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

    def policy(self, blocks: Sequence[Block], caution_S2: torch.Tensor) -> GaussianPolicy:
        """The policy of some posteriors."""
        return GaussianPolicy(
            self.maker, self.machines, self.shapes, blocks, caution_S2, self.felt
        ).eval()

    def choose(self, blocks: Sequence[Block], which: Int64Array) -> "_Choice":
        """The config of the least mean among those measured, for some tasks, sure or not."""
        with torch.no_grad():
            careless = self.policy(blocks, torch.zeros(len(self.machines), 2, dtype=torch.float64))
            z, spread = careless.predict(torch.from_numpy(self.context[which]))
        best = np.where(self.grid.mask[which], z.numpy(), np.inf).argmin(axis=1)
        place = np.arange(len(which)), best
        return _Choice(best.astype(np.int64), -z.numpy()[place], spread.numpy()[place])


def _systems(system: Sequence[str], machine: Int64Array) -> list[str]:
    """The system of each machine; `system` and `machine` are those of the tasks."""
    first = np.unique(machine, return_index=True)[1]
    return [system[index] for index in first]


@dataclass(frozen=True, slots=True)
class _Choice:
    """(N,) configs, their predicted gains over NCCL's own choice, and how sure these are."""

    action: Int64Array
    gain: npt.NDArray[np.float64]
    spread: npt.NDArray[np.float64]


class _Machine:
    """What is fitted to the tasks of one machine."""

    def __init__(self, tasks: _Tasks, number: int, seed: int) -> None:
        self._tasks, self._number = tasks, int(number)
        self._rows = np.flatnonzero(tasks.machine == number)
        collectives = np.unique(tasks.collective[self._rows[tasks.is_train[self._rows]]])
        self._collectives = [int(each) for each in collectives]
        ways = [True, False] if bool(tasks.known[self._rows].any()) else [False]
        kernels = {way: self._fit_kernel(seed, uses_cost=way) for way in ways}
        self._uses_cost = min(ways, key=lambda way: self._regret(kernels[way], uses_cost=way))
        self._kernel = kernels[self._uses_cost]

    def blocks(self, is_told: BoolArray) -> list[Block]:
        """The posteriors after the tasks that are told, (T,)."""
        return self._blocks(is_told, self._kernel, uses_cost=self._uses_cost)

    def held_out_sizes(self) -> list[Calibration]:
        """The validation bins by the training bins, and training octaves by the others, by turns.

        A held-out training octave is further from its neighbours than a bin of a table is ever from
        what was measured, so that what is found errs on the side of caution.
        """
        tasks, is_train = self._tasks, self._tasks.is_train
        octaves = np.unique(tasks.octave[self._rows[is_train[self._rows]]])
        turn = np.searchsorted(octaves, tasks.octave) % _OCTAVE_PARTS
        parts = [~is_train, *(is_train & (turn == part) for part in range(_OCTAVE_PARTS))]
        return [self._compare(part, is_train & ~part) for part in parts]

    def held_out_shapes(self) -> list[Calibration]:
        """Group shapes by the others, some at a time."""
        shape = self._tasks.shape
        mine = np.unique(shape[self._rows])
        if len(mine) < _MIN_SHAPES:
            return []
        turn = np.searchsorted(mine, shape) % min(len(mine), _SHAPE_PARTS)
        return [self._compare(turn == part, turn != part) for part in np.unique(turn[self._rows])]

    def _blocks(self, is_told: BoolArray, kernel: Kernel, *, uses_cost: bool) -> list[Block]:
        tasks, found = self._tasks, []
        for collective in self._collectives:
            mine = self._rows[tasks.collective[self._rows] == collective]
            told = tasks.rows(mine[is_told[mine]], uses_cost=uses_cost)
            if len(told):
                posterior = Posterior(kernel, told)
                found.append(Block(self._number, collective, uses_cost, posterior))
        return found

    def _fit_kernel(self, seed: int, *, uses_cost: bool) -> Kernel:
        tasks = self._tasks
        train = self._rows[tasks.is_train[self._rows]]
        parts = [train[tasks.collective[train] == each] for each in self._collectives]
        rows = [tasks.rows(part, uses_cost=uses_cost) for part in parts]
        return fit_kernel([each for each in rows if len(each)], seed=seed)

    def _regret(self, kernel: Kernel, *, uses_cost: bool) -> float:
        """Mean regret on the validation bins of the config of the least mean."""
        tasks = self._tasks
        held = self._rows[~tasks.is_train[self._rows]]
        if not len(held):
            return 0.0
        blocks = self._blocks(tasks.is_train, kernel, uses_cost=uses_cost)
        chosen = tasks.choose(blocks, held).action
        return float((tasks.grid.times_us[held, chosen] / tasks.grid.oracle_us[held] - 1.0).mean())

    def _compare(self, is_held: BoolArray, is_told: BoolArray) -> Calibration:
        tasks = self._tasks
        held = self._rows[is_held[self._rows]]
        if not len(held):
            return Calibration.joined([])
        chosen = tasks.choose(self.blocks(is_told), held)
        # Of NCCL's own choice there is nothing to be unsure of.
        acts = chosen.action != ABSTAIN_ACTION
        place = held, chosen.action
        repeats = 1.0 / tasks.grid.repeats[place] + 1.0 / tasks.grid.repeats[held, ABSTAIN_ACTION]
        return Calibration(
            predicted=np.where(acts, chosen.gain, 0.0),
            measured=np.log(tasks.grid.default_us[held] / tasks.grid.times_us[place]),
            spread=np.maximum(chosen.spread, _LEAST_NOISE),
            noise=np.where(acts, np.sqrt(float(self._kernel.noise()) * repeats), 0.0),
        )
