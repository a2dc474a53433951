"""Calibration by cross-fitting: each ensemble member leaves out some octaves, and predicts those.

The octaves that are not for test are held out from the members by turns, each from a third of them,
as a test octave is from all. What the members that have not seen a task say of it, beside what was
measured, is a calibration task (cautious/caution.py); and their mean regret tells which weights to
keep. So no measurement is set aside, and a sweep that has too few validation tasks for the bound
may have enough of all.

    T tasks that are not for test, E members, F features of the context, A actions, S places
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.costs import NUM_CELLS
from dynamiccl.datasets.features import CONTEXT_COLUMN, Float32Array, Observations
from dynamiccl.nccl import ABSTAIN
from dynamiccl.sizes import BINS_PER_OCTAVE, MAX_SIZE_BITS
from dynamiccl.train.cautious.caution import MIN_GAIN, Calibration
from dynamiccl.train.cautious.rows import RowMaker
from dynamiccl.train.data import TrainingData
from dynamiccl.train.heads import LogTimeQFunction, Member
from dynamiccl.train.policy_module import PolicyMember
from dynamiccl.train.sure_module import LEAST_SPREAD, Places, gains

#: Parts at most that the octaves are held out in.
_PARTS: Final = 3


@dataclass(frozen=True, slots=True)
class Bound:
    """Choices on tasks unseen by the deciding members, by machine, and the resulting thresholds."""

    #: With NCCL's costs, and without.
    calibrations: list[tuple[Calibration, Calibration]]
    #: Where a policy may act at all, and how many spreads a gain must have there.
    places: Places
    #: Mean regret on the tasks of a policy that is as sure as that.
    regret: float


class CrossFitting:
    """Which member leaves out which tasks."""

    def __init__(self, data: TrainingData, num_members: int) -> None:
        """`data` must come from `load_data(..., is_cross_fitted=True)`."""
        self._data = data
        self._parts = min(_PARTS, num_members)
        octave = data.validation.tasks["bin"].to_numpy() // BINS_PER_OCTAVE
        held = np.unique(octave)
        #: (octaves,) the part of each; of those between two the next one's.
        self._part_of = np.searchsorted(held, np.arange(MAX_SIZE_BITS)) % self._parts
        self._part = self._part_of[octave]

    def leave_out(self, members: Iterable[Member]) -> None:
        """Mask the octaves that each member leaves out of its training."""
        for number, member in enumerate(members):
            if isinstance(member, LogTimeQFunction):
                told = self._part_of != number % self._parts
                member.octave_weight = torch.from_numpy(told.astype(np.float32))

    def regret(self, members: Iterable[Member]) -> float:
        """Mean regret on the tasks, each decided by the members that have not seen it."""
        choice = self._choose(members, self._data.observations)
        return self._data.mean_over_groups(choice.acting(MIN_GAIN))

    def bound(self, members: Iterable[Member], alpha: float) -> Bound:
        """Thresholds on the score for P(acts and is slower) <= `alpha` on each machine."""
        data, listed = self._data, list(members)
        context = data.observations.context
        told = self._choose(listed, data.observations)
        untold = self._choose(listed, Observations.cold(without_costs(context, data.cost_start)))
        columns = place_columns(len(data.profiles))
        machine_columns = columns[:-2]
        machine = _numbers(context[:, machine_columns])
        calibrations = []
        for number in np.unique(machine):
            here = machine == number
            calibrations.append((self._calibration(told, here), self._calibration(untold, here)))
        caution = np.array([[each.caution(alpha) for each in pair] for pair in calibrations])
        _, first = np.unique(context[:, columns], axis=0, return_index=True)
        places = Places(
            columns=torch.tensor(columns),
            table=torch.from_numpy(context[first][:, columns]),
            caution=torch.from_numpy(caution[machine[first]].astype(np.float32)),
            cost_start=data.cost_start,
        )
        has_costs = has_any_cost(context, data.cost_start)
        wanted = caution[machine, np.where(has_costs, 0, 1)] * told.spread
        chosen = told.acting(np.maximum(wanted, MIN_GAIN))
        return Bound(calibrations, places, data.mean_over_groups(chosen))

    def _choose(self, members: Iterable[Member], observations: Observations) -> "_Choice":
        """By those of the members that have not seen a task; the spread is that of all members.

        What members differ by comes from their weights more than from what they have seen, and of
        two it would be another statistic than of all, which is what the policy goes by.
        """
        window, context = map(torch.from_numpy, (observations.window, observations.context))
        with torch.no_grad():
            asked = [PolicyMember(member).eval()(window, context) for member in members]
            _, spread = gains(torch.stack(asked), LEAST_SPREAD)
            gain = torch.empty_like(spread)
            for part in range(self._parts):
                rows = np.flatnonzero(self._part == part)
                unseen = torch.stack([each[rows] for each in asked[part :: self._parts]])
                gain[rows], _ = gains(unseen, LEAST_SPREAD)
        allowed = np.where(self._data.validation.mask, gain.numpy(), -np.inf)
        action = allowed.argmax(axis=1)
        place = np.arange(len(action)), action
        return _Choice(
            action.astype(np.int64),
            gain.numpy()[place].astype(np.float64),
            spread.numpy()[place].astype(np.float64),
        )

    def _calibration(self, choice: "_Choice", which: npt.NDArray[np.bool_]) -> Calibration:
        grid = self._data.validation
        measured = np.log(grid.default_us / grid.chosen_us(choice.action))
        return Calibration(
            choice.gain[which], measured[which], choice.spread[which], np.zeros(int(which.sum()))
        )


@dataclass(frozen=True, slots=True)
class _Choice:
    """(T,) configs, predicted gains over NCCL's own choice, and their spreads."""

    action: npt.NDArray[np.int64]
    gain: npt.NDArray[np.float64]
    spread: npt.NDArray[np.float64]

    def acting(self, wanted: float | npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """(T,) the actions where the gain exceeds the `wanted` one, else ABSTAIN."""
        return np.where(self.gain > wanted, self.action, ABSTAIN_ACTION)


def place_columns(num_profiles: int) -> list[int]:
    """Columns of a context that identify the machine; the last two give the group shape."""
    machine = RowMaker([ABSTAIN], num_profiles, costs=False).machine_columns.tolist()
    return [*machine, CONTEXT_COLUMN["log2_nodes"], CONTEXT_COLUMN["log2_ranks_per_node"]]


def without_costs(context: Float32Array, cost_start: int) -> Float32Array:
    """Contexts with NCCL's costs set to unknown."""
    found = context.copy()
    if cost_start >= 0:
        found[:, cost_start : cost_start + NUM_CELLS] = 0.0
    return found


def has_any_cost(context: Float32Array, cost_start: int) -> npt.NDArray[np.bool_]:
    """(N,) whether contexts have NCCL's costs."""
    if cost_start < 0:
        return np.zeros(len(context), dtype=np.bool_)
    known: npt.NDArray[np.bool_] = (context[:, cost_start : cost_start + NUM_CELLS] != 0).any(
        axis=1
    )
    return known


def _numbers(rows: Float32Array) -> npt.NDArray[np.int64]:
    """(N,) index of each row among the distinct rows."""
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
