"""Baselines by regression: predict the time of every config, and take the smallest.

What is predicted is ln(time / NCCL's default) of a config, so that 0 is the default and the
families have one scale.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.evaluate.baselines.tables import Predictor, unknown
from dynamiccl.nccl import Config

Float64Array = npt.NDArray[np.float64]

#: Columns of a task that are numbers; unknown ones are NaN.
NUMBERS: Final = (
    "num_nodes",
    "ranks_per_node",
    "compute_capability",
    "nvlink_generation",
    "nvlinks_per_gpu",
    "nic_gbits_per_s",
    "nics_per_node",
)
#: Columns that name one of several; a name that training did not have is NaN.
NAMES: Final = (
    "system",
    "nccl_version",
    "collective",
    "datatype",
    "launch_profile",
    "nvswitch",
    "nic_kind",
    "cpu_vendor",
)


class GradientBoosting(Predictor):
    """Boosted trees over task and config; takes the smallest prediction.

    Histogram-based boosting of scikit-learn (after LightGBM), with names as categories. Of three
    settings the one that no measured sweep had worse (cross-fitted): at least 20 cells in a leaf
    took 7.3 % of regret for -0.6 % on RTX 5090 sockets, and slower, larger trees gained nothing.
    """

    name = "gradient-boosting"

    def __init__(self, training: TaskGrid, catalogue: Catalogue) -> None:
        """Fit on every measured config of the training tasks."""
        from sklearn.ensemble import HistGradientBoostingRegressor

        rows, actions = np.nonzero(_forced(training))
        self._encoder = _Encoder(training.tasks, catalogue, rows, actions)
        self._model: Any = HistGradientBoostingRegressor(
            learning_rate=0.1,
            max_leaf_nodes=31,
            max_iter=200,
            min_samples_leaf=2,
            categorical_features=self._encoder.are_names,
            early_stopping=False,
            random_state=0,
        )
        self._model.fit(self._encoder.encode(training.tasks, rows, actions), _target(training))

    def predict(self, grid: TaskGrid) -> Float64Array:
        """(T, A) ln(time / NCCL's default); inf where not measured."""
        rows, actions = np.nonzero(_forced(grid))
        predicted = unknown(grid)
        if len(rows):
            encoded = self._encoder.encode(grid.tasks, rows, actions)
            predicted[rows, actions] = self._model.predict(encoded)
        return predicted


class _Encoder:
    """Rows of numbers for (task, config); names as integer codes of the training data.

    What is not known of any row of the fit, the tasks `rows` with the configs `actions`, is left
    out: the catalogue may hold knobs that training never set.
    """

    def __init__(
        self,
        tasks: pl.DataFrame,
        catalogue: Catalogue,
        rows: npt.NDArray[np.int64],
        actions: npt.NDArray[np.int64],
    ) -> None:
        fitted = tasks[np.unique(rows)]
        held = [name for name in fitted.columns if fitted[name].null_count() < fitted.height]
        self._numbers = [name for name in NUMBERS if name in held]
        self._codes = {
            name: {value: code for code, value in enumerate(tasks[name].unique().sort().to_list())}
            for name in NAMES
            if name in held
        }
        knobs = np.array([_knobs(config) for config in catalogue.configs])
        used = ~np.isnan(knobs[actions]).all(axis=0)
        self._configs = knobs[:, used]
        self.are_names: Sequence[bool] = [
            *[False] * (1 + len(self._numbers)),
            *[True] * len(self._codes),
            *np.array([True, True, False, False])[used].tolist(),
        ]

    def encode(
        self, tasks: pl.DataFrame, rows: npt.NDArray[np.int64], actions: npt.NDArray[np.int64]
    ) -> Float64Array:
        """(N, columns) of the tasks `rows` with the configs `actions`."""
        columns = [np.log2(tasks["size_bytes"].to_numpy().astype(np.float64))]
        for number in self._numbers:
            columns.append(tasks[number].cast(pl.Float64).to_numpy().astype(np.float64))
        for name, codes in self._codes.items():
            found = [codes.get(value) for value in tasks[name].to_list()]
            columns.append(np.array([np.nan if code is None else code for code in found]))
        return np.hstack([np.column_stack(columns)[rows], self._configs[actions]])


def _knobs(config: Config) -> tuple[float, float, float, float]:
    """Algorithm and protocol as codes, log2 of channels and chunk bytes; NaN = left to NCCL."""
    return (
        np.nan if config.algorithm is None else float(config.algorithm),
        np.nan if config.protocol is None else float(config.protocol),
        np.nan if not config.num_channels else float(np.log2(config.num_channels)),
        np.nan if not config.chunk_bytes else float(np.log2(config.chunk_bytes)),
    )


def _forced(grid: TaskGrid) -> npt.NDArray[np.bool_]:
    """(T, A) the measured configs, without NCCL's own choice."""
    forced = grid.mask.copy()
    forced[:, ABSTAIN_ACTION] = False
    return forced


def _target(grid: TaskGrid) -> Float64Array:
    """(N,) ln(time / default) of the forced cells, in the order of np.nonzero."""
    ratios: Float64Array = np.log(grid.times_us / grid.default_us[:, None])[_forced(grid)]
    return ratios
