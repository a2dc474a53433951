"""The policies of a report: learned ones, and the simple ones that they have to beat.

All but AutoCCL's search and the oracle know workload and system alone. T tasks, A actions.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.datasets.features import cold_observations
from dynamiccl.datasets.manifest import SHAPE_COLUMNS, Manifest
from dynamiccl.datasets.questions import ChannelRule, decide, read_back_channels
from dynamiccl.datasets.steps import with_noise
from dynamiccl.nccl import Collective
from dynamiccl.serve.artifact import check_features
from dynamiccl.serve.search.autoccl import AutoCcl, Choice, SearchSpace
from dynamiccl.train import tracking
from dynamiccl.train.policy import TorchPolicy

Actions = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
#: Unknown ones are NaN.
_NUMBERS: Final = (
    *("num_nodes", "ranks_per_node", "compute_capability", "nvlink_generation"),
    *("nvlinks_per_gpu", "nic_gbits_per_s", "nics_per_node"),
)
#: Names that training did not have are NaN.
_NAMES: Final = (
    *("system", "nccl_version", "collective", "datatype", "launch_profile"),
    *("nvswitch", "nic_kind", "cpu_vendor"),
)
#: Probes of which the median is compared, as in a job's brain (serve/brain.py, MIN_CALLS).
REPEATS: Final = 3
#: Tasks that differ in size alone.
FAMILY: Final = (
    *("system", "nccl_version", "num_nodes", "ranks_per_node"),
    *("collective", "datatype", "launch_profile"),
)
Rows = npt.NDArray[np.int64]
Key = Sequence[str | pl.Expr]


class Policy(Protocol):
    """Chooses an action of the data set's catalogue for every task of a grid."""

    name: str
    #: (T,) of a search: the calls that its last `choose` tried.
    probes: Actions | None = None

    def choose(self, grid: TaskGrid) -> Actions:
        """(T,) measured actions; equal grids give equal choices."""


@dataclass
class Least(Policy):
    """The measured config for which a rule gives the least; of equals NCCL's own choice."""

    name: str
    #: (T, A) of a grid; of a learned rule ln(time / NCCL's default): inf = unknown.
    rule: Callable[[TaskGrid], Float64Array]

    def choose(self, grid: TaskGrid) -> Actions:
        """See Policy."""
        return np.asarray(np.where(grid.mask, self.rule(grid), np.inf).argmin(axis=1))


NCCL_DEFAULT: Final = Least("nccl-default", lambda grid: np.zeros(grid.times_us.shape))
#: Uniform among measured configs, NCCL's own choice included.
RANDOM: Final = Least("random", lambda grid: -np.random.default_rng(0).random(grid.times_us.shape))
ORACLE: Final = Least("oracle", lambda grid: grid.times_us)


class LearnedPolicy(Policy):
    """A trained policy on cold observations; a gated one chooses what passed, as its tables do."""

    def __init__(self, policy: TorchPolicy, catalogue: Catalogue, name: str) -> None:
        self.name = name
        self._policy = policy
        held = {config: action for action, config in enumerate(catalogue.configs)}
        own = policy.manifest.actions().configs
        self._to_data = np.array([held.get(config, -1) for config in own])

    def choose(self, grid: TaskGrid) -> Actions:
        """See Policy."""
        return self.choose_among(grid.tasks, grid.mask)

    def choose_among(self, tasks: pl.DataFrame, mask: npt.NDArray[np.bool_]) -> Actions:
        """(T,) actions of the data, among those that `mask` (T, A) allows."""
        manifest = self._policy.manifest
        tasks = with_noise(tasks, manifest.noise_table())
        observations = cold_observations(tasks, manifest.launch_profiles, manifest.cost_table())
        gate, rule = let_through(manifest, tasks)
        mask = mask[:, self._to_data] & (self._to_data >= 0) & gate
        return self._to_data[decide(self._policy, observations, mask, rule)]


def let_through(
    manifest: Manifest, tasks: pl.DataFrame
) -> tuple[npt.NDArray[np.bool_], ChannelRule]:
    """(T, A) actions that a policy's gate allows, all without a gate; and its rule."""
    supports = {tuple(getattr(s, name) for name in SHAPE_COLUMNS): s for s in manifest.supports}
    mask = np.ones((tasks.height, len(manifest.catalogue)), dtype=np.bool_)
    mask[:, ABSTAIN_ACTION + 1 :] = all(s.gated is None for s in manifest.supports)
    channels, places, noise = np.full(mask.shape, np.nan), [], list[float | None]()
    asked = tasks.select(*SHAPE_COLUMNS, "collective", "bin").iter_rows()
    for row, (*place, collective, size_bin) in enumerate(asked):
        places.append((collective, place[1], place[1] * place[2], size_bin))
        support = supports.get(tuple(place))
        noise.append(None if support is None else support.noise_bands.get(collective))
        if support is None:
            continue
        for action, bins in (support.gated or {}).get(collective, {}).items():
            mask[row, int(action)] = size_bin in bins
        if manifest.slack is not None:
            wire = Collective.parse(collective)
            channels[row] = read_back_channels(manifest, support, wire, [size_bin])[0]
    return mask, ChannelRule.of(manifest, places, channels, noise)


def rows_by(tasks: pl.DataFrame, key: Key) -> dict[tuple[object, ...], Rows]:
    """Key -> rows of its tasks, in order."""
    keyed = tasks.select(key)
    grouped = keyed.with_row_index("row").group_by(keyed.columns, maintain_order=True)
    return {each: part["row"].to_numpy().astype(np.int64) for each, part in grouped}


def make_policies(
    training: TaskGrid,
    validation: TaskGrid,
    catalogue: Catalogue,
    learned: Sequence[tuple[str, TorchPolicy]],
) -> list[Policy]:
    """The learned policies, then the baselines; the search and the oracle come last."""
    told = training.joined(validation)
    return [
        *(LearnedPolicy(policy, catalogue, name) for name, policy in learned),
        NCCL_DEFAULT,
        RANDOM,
        BestFixed(told),
        PooledFixed(told),
        FiveBins(told),
        NearestSize(told),
        Interpolated(told),
        GradientBoosting(told, catalogue),
        CoordinateDescent(catalogue),
        ORACLE,
    ]


class BestFixed(Policy):
    """Each family's config of least mean log time, as the default where it was not measured."""

    name = "best-fixed"
    key: Key = FAMILY

    def __init__(self, training: TaskGrid) -> None:
        self._best = {
            each: int(np.argmin(self._score(training.times_us[rows])))
            for each, rows in rows_by(training.tasks, self.key).items()
        }

    def choose(self, grid: TaskGrid) -> Actions:
        """The key's config where it was measured, else NCCL's default."""
        chosen = NCCL_DEFAULT.choose(grid)
        for key, rows in rows_by(grid.tasks, self.key).items():
            action = self._best.get(key, ABSTAIN_ACTION)
            chosen[rows] = np.where(grid.mask[rows, action], action, ABSTAIN_ACTION)
        return chosen

    @staticmethod
    def _score(times_us: Float64Array) -> Float64Array:
        log_ratio = np.log(times_us / times_us[:, [ABSTAIN_ACTION]])
        return np.asarray(np.nan_to_num(log_ratio, nan=0.0).mean(axis=0))


class PooledFixed(BestFixed):
    """One config for all group shapes: what an environment variable can do."""

    name = "pooled-fixed"
    key = ("system", "collective")


class FiveBins(BestFixed):
    """The fastest row in each of five size ranges, as NVIDIA's script does.

    `ext-tuner/example/scripts/optimize_config.py` (v2.28.9-1, ConfigOptimizer with its own ranges):
    the least latency of a bin wins whatever its size.
    """

    name = "five-bins"
    EDGES_BYTES: Final = (1024, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024)
    key = (
        *FAMILY,
        pl.lit(pl.Series(EDGES_BYTES)).search_sorted(pl.col("size_bytes"), "left").alias("range"),
    )

    @staticmethod
    def _score(times_us: Float64Array) -> Float64Array:
        return np.asarray(np.nan_to_num(times_us, nan=np.inf).min(axis=0))


class Interpolated(Least):
    """The fastest config, with times interpolated (log-log) between a family's training sizes."""

    name = "interpolated"

    def __init__(self, training: TaskGrid) -> None:
        super().__init__(self.name, self.predict)
        self._log_time = np.log(training.times_us)
        self._log_size = np.log2(training.tasks["size_bytes"].to_numpy())
        self._families = rows_by(training.tasks, FAMILY)

    def predict(self, grid: TaskGrid) -> Float64Array:
        """See Least."""
        predicted = _unknown(grid)
        log_size = np.log2(grid.tasks["size_bytes"].to_numpy())
        for key, rows in rows_by(grid.tasks, FAMILY).items():
            if key in self._families:
                times = self._log_times(self._families[key], log_size[rows])
                ratios = times - times[:, [ABSTAIN_ACTION]]
                predicted[rows] = np.where(np.isnan(ratios), np.inf, ratios)
        return predicted

    def _log_times(self, known: Rows, log_size: Float64Array) -> Float64Array:
        """(n, A) log times at n sizes from the training tasks `known`; NaN = unknown."""
        found = np.full((len(log_size), self._log_time.shape[1]), np.nan)
        known = known[np.argsort(self._log_size[known])]
        for action in range(found.shape[1]):
            order = known[~np.isnan(self._log_time[known, action])]
            if len(order):
                told = self._log_size[order], self._log_time[order, action]
                found[:, action] = np.interp(log_size, *told)
        return found


class NearestSize(Interpolated):
    """The best config of the family's nearest training size (by ratio)."""

    name = "nearest-size"

    def _log_times(self, known: Rows, log_size: Float64Array) -> Float64Array:
        apart = np.abs(self._log_size[known] - log_size[:, None])
        return np.asarray(self._log_time[known[apart.argmin(axis=1)]])


def _unknown(grid: TaskGrid) -> Float64Array:
    predicted = np.full(grid.times_us.shape, np.inf)
    predicted[:, ABSTAIN_ACTION] = 0.0
    return predicted


class GradientBoosting(Least):
    """Histogram boosting (scikit-learn); of three settings the one no measured sweep had worse."""

    name = "gradient-boosting"

    def __init__(self, training: TaskGrid, catalogue: Catalogue) -> None:
        from sklearn.ensemble import HistGradientBoostingRegressor

        super().__init__(self.name, self.predict)
        knobs = pl.DataFrame(catalogue.to_json(), infer_schema_length=None)
        names = pl.col("requested_algorithm", "requested_protocol").cast(pl.String)
        numbers = pl.col("requested_num_channels", "requested_chunk_bytes").cast(pl.Float64)
        self._knobs = knobs.select(names.cast(pl.Categorical), numbers.log(2))
        rows, actions, features = self._features(training)
        # The catalogue may hold knobs that training never set.
        self._known = [each.name for each in features if each.null_count() < len(each)]
        self._model: Any = HistGradientBoostingRegressor(
            learning_rate=0.1,
            max_leaf_nodes=31,
            max_iter=200,
            min_samples_leaf=2,
            categorical_features="from_dtype",
            early_stopping=False,
            random_state=0,
        )
        log_ratio = np.log(training.times_us / training.default_us[:, None])[rows, actions]
        self._model.fit(features[self._known], log_ratio)

    def predict(self, grid: TaskGrid) -> Float64Array:
        """See Least."""
        rows, actions, features = self._features(grid)
        predicted = _unknown(grid)
        if len(rows):
            predicted[rows, actions] = self._model.predict(features[self._known])
        return predicted

    def _features(self, grid: TaskGrid) -> tuple[Rows, Rows, pl.DataFrame]:
        """(N,) tasks and measured forced actions, and N rows of what is known of both."""
        forced = grid.mask.copy()
        forced[:, ABSTAIN_ACTION] = False
        rows, actions = np.nonzero(forced)
        tasks = grid.tasks.select(
            pl.col("size_bytes").log(2),
            pl.col(*_NUMBERS).cast(pl.Float64),
            pl.col(*_NAMES).cast(pl.String).cast(pl.Categorical),
        )
        return rows, actions, pl.concat([tasks[rows], self._knobs[actions]], how="horizontal")


class CoordinateDescent(Policy):
    """AutoCCL's search (serve/search/autoccl.py) on what was measured, each task by itself.

    Probes are drawn from the very repeats that score it: even cross-fitted figures flatter it.
    """

    name = "coordinate-descent"

    def __init__(self, catalogue: Catalogue) -> None:
        self._choices = [Choice(config) for config in catalogue.configs]

    def choose(self, grid: TaskGrid) -> Actions:
        """What each task's search ends with; equal grids give equal searches."""
        spaces: dict[Hashable, SearchSpace] = {
            task: SearchSpace(self._choices, np.flatnonzero(mask).tolist())
            for task, mask in enumerate(grid.mask)
        }
        tuner = AutoCcl(spaces.__getitem__, repeats=REPEATS)
        chosen: Actions = np.empty(grid.tasks.height, dtype=np.int64)
        self.probes = np.zeros_like(chosen)
        for task in range(len(chosen)):
            random = np.random.default_rng((task, 0))
            while not tuner.is_over(task):
                action = tuner.ask(task)
                tuner.tell(task, float(random.choice(grid.samples[task, action])), action)
                self.probes[task] += 1
            chosen[task] = tuner.best(task)
        return chosen


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy's name in a report, its folder, and its run where known."""

    name: str
    folder: Path
    run_id: str | None
    manifest: Manifest


def named_policies(given: Sequence[str], tracking_uri: str) -> list[NamedPolicy]:
    """Resolve `[NAME=]RUN_OR_ARTIFACT`; equal names get a number. Raises as `Manifest.read`."""
    found = [_resolve(text, tracking_uri) for text in given]
    names = [each.name for each in found]
    return [
        replace(each, name=f"{name}-{names[: index + 1].count(name)}")
        if names.count(name) > 1
        else each
        for index, (name, each) in enumerate(zip(names, found, strict=True))
    ]


def _resolve(text: str, tracking_uri: str) -> NamedPolicy:
    name, equals, named = text.partition("=")
    if not equals or Path(text).exists():
        name, named = "", text
    folder = tracking.policy_directory(named, tracking_uri)
    run_id = tracking.find_run(named, tracking_uri)
    if not name and run_id is not None:
        name = tracking.reopen_run(tracking_uri, run_id).data.tags["mlflow.runName"]
    manifest = Manifest.read(folder)
    check_features(manifest, folder)
    return NamedPolicy(name or manifest.recipe, folder, run_id, manifest)
