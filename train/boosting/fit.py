"""Fits boosted trees to the residuals of NCCL's cost model, for each config."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.train.boosting.rows import OF_TASK, OWN, TreeRows
from dynamiccl.train.boosting.trees import Boosted, Trees
from dynamiccl.train.cautious.fit import Fitted, fit_cautious
from dynamiccl.train.cautious.tasks import Rows, Tasks
from dynamiccl.train.data import TrainingData

Float64Array = npt.NDArray[np.float64]
#: Parts that octaves of sizes are held out in, to learn how far off predictions are.
_PARTS: Final = 3
#: Added to what a prediction was off (ln of time): nothing repeats better, and ln of 0 is none.
_LEAST_OFF: Final = 3e-3
_LEARNING_RATE: Final = 0.1  # scikit-learn's own


@dataclass(frozen=True, slots=True)
class Setting:
    """Hyperparameters of the trees."""

    num_trees: int
    max_leaves: int
    least_rows: int  # in a leaf


#: Of the times. With 200 trees of 31 leaves to choose from, too, a fit to a B300 draw took four
#: times as long, and what validation chose kept less of the gain.
_OF_TIMES: Final = Setting(100, 15, 5)
#: Of the trees that learn how far off the others are.
_OF_SPREAD: Final = Setting(50, 8, 10)


@dataclass(frozen=True, slots=True)
class _Boosting:
    """The learner: trees for each collective of a machine."""

    #: Variance of one repeat.
    repeat_variance: float
    seed: int

    def settings(self, collectives: Sequence[Rows]) -> Sequence[Setting]:  # noqa: ARG002
        return [_OF_TIMES]

    def model(self, setting: Setting, rows: Rows) -> Boosted:
        numbers, y, weight = rows.numbers.numpy(), rows.y.numpy(), rows.repeats.numpy()
        mean = self._grown(setting, numbers, y, weight)
        octave = np.floor(numbers[:, -OF_TASK])
        turn = np.searchsorted(np.unique(octave), octave) % _PARTS
        off, of_parts = np.full_like(y, np.nan), []
        for part in range(_PARTS):
            held = turn == part
            if held.any() and not held.all():
                less = self._grown(setting, numbers[~held], y[~held], weight[~held])
                off[held] = y[held] - less.predict(numbers[held])
                of_parts.append(Trees(less))
        of_gain = off - _of_own(off, numbers)
        told = ~np.isnan(of_gain) & (numbers[:, OWN] < 0.5)
        if not told.any():
            return Boosted(Trees(mean), of_parts, None)
        wanted = np.log(np.abs(of_gain[told]) + _LEAST_OFF)
        log_off = self._grown(_OF_SPREAD, numbers[told], wanted, weight[told])
        return Boosted(Trees(mean), of_parts, Trees(log_off))

    def noise(self, setting: Setting) -> float:  # noqa: ARG002
        return self.repeat_variance

    def _grown(
        self, setting: Setting, numbers: Float64Array, y: Float64Array, weight: Float64Array
    ) -> Any:
        from sklearn.ensemble import HistGradientBoostingRegressor  # it takes a second to import

        model = HistGradientBoostingRegressor(
            learning_rate=_LEARNING_RATE,
            max_iter=setting.num_trees,
            max_leaf_nodes=setting.max_leaves,
            min_samples_leaf=setting.least_rows,
            early_stopping=False,
            random_state=self.seed,
        )
        return model.fit(numbers, y, sample_weight=weight)


def fit_boosting(data: TrainingData, *, alpha: float, seed: int) -> Fitted:
    """Fit to the training and validation bins, and calibrate; see `fit_cautious`."""
    tasks = Tasks.of(data, TreeRows)
    return fit_cautious(tasks, _Boosting(_repeat_variance(tasks.grid), seed), alpha=alpha)


def _of_own(off: Float64Array, numbers: Float64Array) -> Float64Array:
    """(N,) residual of NCCL's own choice for each row's task; NaN: unknown."""
    tasks, task = np.unique(numbers[:, -OF_TASK:], axis=0, return_inverse=True)
    found, is_own = np.full(len(tasks), np.nan), numbers[:, OWN] > 0.5
    task = task.reshape(-1)  # NumPy 2.0 has a dimension more
    found[task[is_own]] = off[is_own]
    return found[task]


def _repeat_variance(grid: TaskGrid) -> float:
    """Variance of ln(time) of one repeat, pooled over cells with several repeats."""
    logs = [np.log(each) for each in grid.samples.values() if len(each) > 1]
    freedom = sum(len(each) - 1 for each in logs)
    squares = sum(float(np.square(each - each.mean()).sum()) for each in logs)
    return squares / freedom if freedom else 0.0
