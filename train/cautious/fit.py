"""Fits Gaussian processes to a data set, and calibrates their confidence threshold.

The rows of a machine share a kernel; each collective has a posterior of its own. What is expected
of a time is NCCL's cost, or the time of its own choice: whichever has the least regret on the
validation bins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.train.cautious.caution import Calibration
from dynamiccl.train.cautious.gaussian import Kernel, Posterior, fit_kernel
from dynamiccl.train.cautious.policy import Block, CautiousPolicy
from dynamiccl.train.cautious.tasks import BoolArray, Int64Array, Tasks
from dynamiccl.train.data import TrainingData

#: Parts that the training octaves are held out in, to calibrate on them.
_OCTAVE_PARTS: Final = 3
#: Parts at most that group shapes are held out in, and how many shapes that needs.
_SHAPE_PARTS: Final = 8
_MIN_SHAPES: Final = 3
#: ln of time: nothing repeats better.
_LEAST_NOISE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted policy, with its calibrations."""

    policy: CautiousPolicy
    #: The same that has seen training bins alone: what the validation bins can judge.
    of_training: CautiousPolicy
    #: On sizes held out, and on whole group shapes, each by machine; the latter are empty for few
    #: shapes.
    of_sizes: Sequence[Calibration]
    of_shapes: Sequence[Calibration]


def fit_gaussian(data: TrainingData, *, alpha: float, seed: int) -> Fitted:
    """Fit to the training and validation bins, and calibrate on what was held out of them."""
    tasks = Tasks.of(data)
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
    return Fitted(
        _policy(tasks, [b for one in machines for b in one.blocks(every)], caution),
        _policy(tasks, [b for one in machines for b in one.blocks(tasks.is_train)], caution),
        of_sizes,
        of_shapes,
    )


def _policy(tasks: Tasks, blocks: Sequence[Block], caution_S2: torch.Tensor) -> CautiousPolicy:
    """The policy of some fitted models."""
    parts = (tasks.maker, tasks.machines, tasks.shapes, blocks, caution_S2, tasks.level_shares)
    return CautiousPolicy(*parts).eval()


@dataclass(frozen=True, slots=True)
class _Choice:
    """(N,) chosen configs, predicted gains over NCCL's own choice, and their spreads."""

    action: Int64Array
    gain: npt.NDArray[np.float64]
    spread: npt.NDArray[np.float64]


def _choose(tasks: Tasks, blocks: Sequence[Block], which: Int64Array) -> _Choice:
    """For some tasks the measured config with the smallest predicted time, with its gain."""
    with torch.no_grad():
        no_caution = torch.zeros(len(tasks.machines), 2, dtype=torch.float64)
        careless = _policy(tasks, blocks, no_caution)
        z, spread = careless.predict(torch.from_numpy(tasks.context[which]))
    best = np.where(tasks.grid.mask[which], z.numpy(), np.inf).argmin(axis=1)
    place = np.arange(len(which)), best
    return _Choice(best.astype(np.int64), -z.numpy()[place], spread.numpy()[place])


class _Machine:
    """What is fitted to the tasks of one machine."""

    def __init__(self, tasks: Tasks, number: int, seed: int) -> None:
        self._tasks, self._number, self._seed = tasks, int(number), seed
        self._rows = np.flatnonzero(tasks.machine == number)
        collectives = np.unique(tasks.collective[self._rows[tasks.is_train[self._rows]]])
        self._collectives = [int(each) for each in collectives]
        ways = [True, False] if bool(tasks.known[self._rows].any()) else [False]
        tried = [(way, self._kernel(uses_cost=way)) for way in ways]
        self._chosen = min(tried, key=self._regret) if len(tried) > 1 else tried[0]

    def blocks(self, is_told: BoolArray) -> list[Block]:
        """The models fitted to the tasks marked in `is_told` (T,)."""
        return self._blocks(is_told, self._chosen)

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
        """Calibrations of group shapes that were held out, some at a time."""
        shape = self._tasks.shape
        mine = np.unique(shape[self._rows])
        if len(mine) < _MIN_SHAPES:
            return []
        turn = np.searchsorted(mine, shape) % min(len(mine), _SHAPE_PARTS)
        return [self._compare(turn == part, turn != part) for part in np.unique(turn[self._rows])]

    def _blocks(self, is_told: BoolArray, chosen: tuple[bool, Kernel]) -> list[Block]:
        tasks, found = self._tasks, []
        uses_cost, kernel = chosen
        for collective in self._collectives:
            mine = self._rows[tasks.collective[self._rows] == collective]
            told = tasks.rows(mine[is_told[mine]], uses_cost=uses_cost)
            if len(told):
                model = Posterior(kernel, told)
                found.append(Block(self._number, collective, uses_cost, model))
        return found

    def _kernel(self, *, uses_cost: bool) -> Kernel:
        tasks = self._tasks
        train = self._rows[tasks.is_train[self._rows]]
        parts = [train[tasks.collective[train] == each] for each in self._collectives]
        rows = [tasks.rows(part, uses_cost=uses_cost) for part in parts]
        return fit_kernel([each for each in rows if len(each)], seed=self._seed)

    def _regret(self, chosen: tuple[bool, Kernel]) -> float:
        """Mean validation regret of the config with the smallest predicted time."""
        tasks = self._tasks
        held = self._rows[~tasks.is_train[self._rows]]
        if not len(held):
            return 0.0
        action = _choose(tasks, self._blocks(tasks.is_train, chosen), held).action
        return float((tasks.grid.times_us[held, action] / tasks.grid.oracle_us[held] - 1.0).mean())

    def _compare(self, is_held: BoolArray, is_told: BoolArray) -> Calibration:
        tasks = self._tasks
        held = self._rows[is_held[self._rows]]
        if not len(held):
            return Calibration.joined([])
        chosen = _choose(tasks, self.blocks(is_told), held)
        # Of NCCL's own choice there is nothing to be unsure of.
        acts = chosen.action != ABSTAIN_ACTION
        place = held, chosen.action
        repeats = 1.0 / tasks.grid.repeats[place] + 1.0 / tasks.grid.repeats[held, ABSTAIN_ACTION]
        noise = float(self._chosen[1].noise())
        return Calibration(
            predicted=np.where(acts, chosen.gain, 0.0),
            measured=np.log(tasks.grid.default_us[held] / tasks.grid.times_us[place]),
            spread=np.maximum(chosen.spread, _LEAST_NOISE),
            noise=np.where(acts, np.sqrt(noise * repeats), 0.0),
        )
