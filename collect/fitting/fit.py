"""Robust least squares, and errors on sizes that were held out of the fit.

Loss: soft L1 of the difference of log time, which bends over at a tenth, so that a launch in a bad
state of the machine pulls little. Every third size of every config is held out in turn and
predicted by a fit of the other two thirds; the numbers that are written come from all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dynamiccl.collect.fitting.identify import check_data, check_sensitivity
from dynamiccl.collect.fitting.measured import MeasuredCell
from dynamiccl.collect.fitting.problem import Item, Problem, Vector, make_items
from dynamiccl.errors import MachineError
from dynamiccl.simulator.parameters import SystemFile
from dynamiccl.simulator.systems import parametric_system

FOLDS: Final = 3
_BENDS_AT: Final = 0.1
_MAX_EVALUATIONS: Final = 200


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A cell, and the prediction of a fit that did not see its size."""

    item: Item
    predicted_us: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1; 0.1 = predicted 10 % too slow."""
        return self.predicted_us / self.item.cell.time_us - 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted description, and its held-out errors."""

    file: SystemFile
    held_out: tuple[HeldOut, ...]
    #: Cells that say nothing of the physics, by reason.
    left_out: dict[str, int]
    #: Free numbers that ended at a bound.
    at_bound: tuple[str, ...]


def fit_system(
    file: SystemFile,
    cells: Sequence[MeasuredCell],
    progress: Callable[[str], None] = lambda _: None,
) -> Fit:
    """Fit the parameters marked `fitted` in `file` to `cells`.

    Raises NotEnoughData where the cells do not determine a parameter, and MachineError without
    SciPy.
    """
    items, left_out = make_items(parametric_system(file), cells)
    problem = Problem(file, items)
    check_data(problem)
    progress(f"{len(problem.names)} numbers from {len(items)} cells")
    found = _solve(problem)
    jacobian = found.jac / problem.weights[:, None]
    check_sensitivity(problem, found.x, jacobian)
    low, high = problem.bounds()
    near = (found.x - low < 1e-3) | (high - found.x < 1e-3)
    at_bound = tuple(str(n) for n, is_near in zip(problem.names, near, strict=True) if is_near)
    held_out: list[HeldOut] = []
    folds = _folds(items)
    for fold in range(FOLDS):
        progress(f"held-out sizes {fold + 1} of {FOLDS}")
        held_out += _hold_out(file, items, [number == fold for number in folds])
    held_out.sort(key=lambda one: one.item.cell.call.size_bytes)
    return Fit(problem.filled(found.x), tuple(held_out), left_out, at_bound)


def _folds(items: Sequence[Item]) -> list[int]:
    """The fold (0 to 2) in which each cell is held out: every third size, staggered by config.

    Staggered, since a sweep over channels may stand at a single size: were that size held out of
    every config at once, nothing would tell what a channel does.
    """
    configs = {label: order for order, label in enumerate(sorted({_config(i) for i in items}))}
    sizes: dict[str, list[int]] = {label: [] for label in configs}
    for item in items:
        sizes[_config(item)].append(item.cell.call.size_bytes)
    ranks = {label: sorted(set(held)) for label, held in sizes.items()}
    return [
        (ranks[_config(item)].index(item.cell.call.size_bytes) + configs[_config(item)]) % FOLDS
        for item in items
    ]


def _config(item: Item) -> str:
    return item.cell.label


def _hold_out(file: SystemFile, items: Sequence[Item], away: Sequence[bool]) -> list[HeldOut]:
    rest = [item for item, is_away in zip(items, away, strict=True) if not is_away]
    asked = [item for item, is_away in zip(items, away, strict=True) if is_away]
    if not rest or not asked:
        return []
    problem = Problem(file, rest)
    fitted = problem.filled(_solve(problem).x) if problem.names else file
    # A number that only the held-out sizes would tell stays as the description has it.
    judge = Problem(fitted, asked)
    predicted = np.exp(judge.log_times(judge.start()))
    return [HeldOut(item, float(us)) for item, us in zip(asked, predicted, strict=True)]


def _solve(problem: Problem) -> Any:
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise MachineError(
            "fitting needs SciPy, which is not installed; pip install 'dynamiccl[train]'"
        ) from error

    def residuals(x: Vector) -> Vector:
        return problem.residuals(x)

    return least_squares(
        residuals,
        problem.start(),
        bounds=problem.bounds(),
        loss="soft_l1",
        f_scale=_BENDS_AT,
        max_nfev=_MAX_EVALUATIONS,
    )
