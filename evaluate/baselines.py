"""The policies of a report: learned ones, and the simple ones that they have to beat.

Tables of configs by size are made straight from the measured times of training and validation
tasks, a family of tasks by itself; a regression predicts the time of every config. AutoCCL's search
knows neither data nor model, and tries configs of the test task. T tasks, A actions.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.evaluate.policies import (
    Actions,
    LearnedPolicy,
    NcclDefault,
    Oracle,
    Policy,
    Random,
)
from dynamiccl.nccl import Config
from dynamiccl.serve.search.autoccl import AutoCcl, Choice, Key, SearchSpace, State
from dynamiccl.train.policy import TorchPolicy

Float64Array = npt.NDArray[np.float64]
#: Columns of a task that are numbers; unknown ones are NaN.
_NUMBERS: Final = (
    *("num_nodes", "ranks_per_node", "compute_capability", "nvlink_generation"),
    *("nvlinks_per_gpu", "nic_gbits_per_s", "nics_per_node"),
)
#: Columns that name one of several; a name that training did not have is NaN.
_NAMES: Final = (
    *("system", "nccl_version", "collective", "datatype", "launch_profile"),
    *("nvswitch", "nic_kind", "cpu_vendor"),
)
#: Probes of which the median is compared, as in a job's brain (serve/brain.py, MIN_CALLS).
REPEATS: Final = 3
#: What makes tasks of different sizes one family: a table of configs is kept for each.
FAMILY: Final = (
    *("system", "nccl_version", "num_nodes", "ranks_per_node"),
    *("collective", "datatype", "launch_profile"),
)
#: A coarser one, of all group shapes: one config for a collective of a system.
POOL: Final = ("system", "collective")
Rows = npt.NDArray[np.int64]


def rows_by_family(
    tasks: pl.DataFrame, family: Sequence[str] = FAMILY
) -> dict[tuple[object, ...], Rows]:
    """Family -> row numbers of its tasks, in order."""
    grouped = tasks.select(family).with_row_index("row").group_by(family, maintain_order=True)
    return {key: part["row"].to_numpy().astype(np.int64) for key, part in grouped}


def _with_known(
    tasks: pl.DataFrame, known: dict[tuple[object, ...], Rows]
) -> Iterator[tuple[Rows, Rows]]:
    """For each family that is among the `known` ones: its rows of the tasks, and what is known."""
    found = rows_by_family(tasks)
    return ((found[key], known[key]) for key in found if key in known)


def make_policies(
    training: TaskGrid,
    validation: TaskGrid,
    catalogue: Catalogue,
    learned: Sequence[tuple[str, TorchPolicy]],
) -> list[Policy]:
    """The learned policies, then the baselines.

    A learned policy is told training and validation tasks, be it to fit or to choose by, and so are
    baselines. Last come those that nothing simple can be: the search, which tries configs on the
    test tasks, and the oracle.
    """
    told = training.joined(validation)
    return [
        *(LearnedPolicy(policy, catalogue, name) for name, policy in learned),
        NcclDefault(),
        Random(),
        BestFixed(told),
        PooledFixed(told),
        FiveBins(told),
        NearestSize(told),
        Interpolated(told),
        GradientBoosting(told, catalogue),
        CoordinateDescent(catalogue),
        Oracle(),
    ]


class Predictor(ABC):
    """A policy that predicts the time of every action, and takes the smallest."""

    name: str

    @abstractmethod
    def predict(self, grid: TaskGrid) -> Float64Array:
        """(T, A) ln(time / NCCL's default); inf = unknown, 0 of the default itself."""

    def choose(self, grid: TaskGrid) -> Actions:
        """The measured action with the smallest prediction; NCCL's default on ties."""
        predicted = np.where(grid.mask, self.predict(grid), np.inf)
        chosen: Actions = np.argmin(predicted, axis=1).astype(np.int64)
        return chosen


class BestFixed:
    """The one config of each family that was best over its training sizes.

    Best = least mean log time over NCCL's default; a config counts as the default where it was not
    measured, and the default itself is a candidate.
    """

    name = "best-fixed"
    family: Sequence[str] = FAMILY

    def __init__(self, training: TaskGrid) -> None:
        """Pick each family's config from its training tasks."""
        self._best: dict[tuple[object, ...], int] = {}
        log_ratio = np.log(training.times_us / training.default_us[:, None])
        log_ratio = np.where(np.isnan(log_ratio), 0.0, log_ratio)
        for key, rows in rows_by_family(training.tasks, self.family).items():
            self._best[key] = int(np.argmin(log_ratio[rows].mean(axis=0)))

    def choose(self, grid: TaskGrid) -> Actions:
        """The family's config where it was measured, else NCCL's default."""
        chosen = NcclDefault().choose(grid)
        for key, rows in rows_by_family(grid.tasks, self.family).items():
            action = self._best.get(key, ABSTAIN_ACTION)
            chosen[rows] = np.where(grid.mask[rows, action], action, ABSTAIN_ACTION)
        return chosen


class PooledFixed(BestFixed):
    """The same, one config for all group shapes: what an environment variable can do."""

    name = "pooled-fixed"
    family = POOL


class NearestSize(Predictor):
    """The best config of the nearest training size of the same family (by ratio of sizes)."""

    name = "nearest-size"

    def __init__(self, training: TaskGrid) -> None:
        """Keep the training tasks as the table."""
        self._log_ratio = np.log(training.times_us / training.default_us[:, None])
        self._log_size = np.log2(training.tasks["size_bytes"].to_numpy())
        self._families = rows_by_family(training.tasks)

    def predict(self, grid: TaskGrid) -> Float64Array:
        """See Predictor."""
        predicted = _unknown(grid)
        log_size = np.log2(grid.tasks["size_bytes"].to_numpy())
        for rows, known in _with_known(grid.tasks, self._families):
            apart = np.abs(self._log_size[known] - log_size[rows][:, None])
            near = self._log_ratio[known[apart.argmin(axis=1)]]
            predicted[rows] = np.where(np.isnan(near), np.inf, near)
        return predicted


class Interpolated(Predictor):
    """The fastest config, with times interpolated (log-log) between training sizes."""

    name = "interpolated"

    def __init__(self, training: TaskGrid) -> None:
        """Keep the training tasks."""
        self._log_time = np.log(training.times_us)
        self._log_size = np.log2(training.tasks["size_bytes"].to_numpy())
        self._families = rows_by_family(training.tasks)

    def predict(self, grid: TaskGrid) -> Float64Array:
        """See Predictor."""
        predicted = _unknown(grid)
        log_size = np.log2(grid.tasks["size_bytes"].to_numpy())
        for rows, known in _with_known(grid.tasks, self._families):
            for action in range(grid.times_us.shape[1]):
                order = known[np.argsort(self._log_size[known])]
                order = order[~np.isnan(self._log_time[order, action])]
                if len(order):
                    predicted[rows, action] = np.interp(
                        log_size[rows], self._log_size[order], self._log_time[order, action]
                    )
            predicted[rows] -= predicted[rows, ABSTAIN_ACTION][:, None]
        return predicted


class FiveBins:
    """The fastest row in each of five size ranges, as NVIDIA's script does.

    Bins and rule of `ext-tuner/example/scripts/optimize_config.py` (v2.28.9-1, ConfigOptimizer with
    its own size ranges): of all rows of a bin the one with the least latency wins, whatever size it
    was measured at; so the smallest size of a bin decides for all of it.
    """

    name = "five-bins"
    #: Largest size of each bin but the last, bytes.
    EDGES_BYTES: Final = (1024, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024)

    def __init__(self, training: TaskGrid) -> None:
        """Keep each family's row with the least time, bin by bin."""
        self._best: dict[tuple[object, ...], dict[int, int]] = {}
        bins = self._bins(training)
        times = np.where(training.mask, training.times_us, np.inf)
        for key, rows in rows_by_family(training.tasks).items():
            self._best[key] = {
                int(each): int(np.argmin(times[rows[bins[rows] == each]].min(axis=0)))
                for each in np.unique(bins[rows])
            }

    def choose(self, grid: TaskGrid) -> Actions:
        """The bin's config where it was measured, else NCCL's default."""
        chosen = NcclDefault().choose(grid)
        bins = self._bins(grid)
        for key, rows in rows_by_family(grid.tasks).items():
            best = self._best.get(key, {})
            for row in rows:
                action = best.get(int(bins[row]), ABSTAIN_ACTION)
                chosen[row] = action if grid.mask[row, action] else ABSTAIN_ACTION
        return chosen

    def _bins(self, grid: TaskGrid) -> npt.NDArray[np.int64]:
        sizes = grid.tasks["size_bytes"].to_numpy()
        return np.searchsorted(self.EDGES_BYTES, sizes, side="left").astype(np.int64)


def _unknown(grid: TaskGrid) -> Float64Array:
    """(T, A) predictions without information: 0 of NCCL's default, inf of all others."""
    predicted = np.full(grid.times_us.shape, np.inf)
    predicted[:, ABSTAIN_ACTION] = 0.0
    return predicted


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
        predicted = _unknown(grid)
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
        self._numbers = [name for name in _NUMBERS if name in held]
        self._codes = {
            name: {value: code for code, value in enumerate(tasks[name].unique().sort().to_list())}
            for name in _NAMES
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


class CoordinateDescent:
    """AutoCCL's search (serve/search/autoccl.py) on what was measured, each task by itself.

    Threads and transport are set at launch, not by call. NCCL's own choice is probed first, and
    stays unless something is faster. A probe is one measured time of a cell, drawn from its
    independent repeats. It probes the very runs that it is scored on, so that even its cross-fitted
    figures flatter it, as the oracle's do.
    """

    name = "coordinate-descent"
    #: (T,) of the grid that was last searched.
    probes: npt.NDArray[np.int64]

    def __init__(self, catalogue: Catalogue) -> None:
        """Take the catalogue's configs."""
        self._choices = [Choice(config) for config in catalogue.configs]

    def choose(self, grid: TaskGrid) -> Actions:
        """The action that each task's search ends with; equal grids give equal searches."""
        spaces: dict[Key, SearchSpace] = {
            task: SearchSpace(self._choices, np.flatnonzero(mask).tolist())
            for task, mask in enumerate(grid.mask)
        }
        tuner = AutoCcl(spaces.__getitem__, repeats=REPEATS)
        chosen: Actions = np.empty(grid.tasks.height, dtype=np.int64)
        self.probes = np.zeros_like(chosen)
        for task in range(len(chosen)):
            random = np.random.default_rng((task, 0))
            while tuner.state(task) is not State.CONVERGED:
                action = tuner.ask(task)
                tuner.tell(task, float(random.choice(grid.samples[task, action])), action)
                self.probes[task] += 1
            chosen[task] = tuner.best(task)
        return chosen
