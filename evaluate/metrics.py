"""What policies are worth: metrics of choices on what was measured, and off-policy estimates.

Regrets are against the best measured config, which is biased low: the least of many noisy times.
Cross-fitted ones split the runs of every cell in two: the smallest median of one half is the
oracle, its time in the other half the reference. The interval is a bootstrap over runs and splits.

Draws of known probability tell what a policy is worth that may take any config (docs/evaluate.md):

    DM      direct method: the mean of a reward model under the policy
    SNIPS   importance sampling: sum of w r over sum of w, w = policy / behaviour (Swaminathan and
            Joachims 2015); without the second sum draws without a time count as taking none
    DR      doubly robust (Dudik, Langford and Li 2011): DM corrected by the weighted residuals

n rows of a log, T tasks, A actions. Rewards are minus time over NCCL's default.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy import stats

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid, comparable, one_placement, quiet
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.datasets.steps import action_masks, with_noise
from dynamiccl.evaluate.baselines import Actions, Float64Array, LearnedPolicy
from dynamiccl.nccl import ABSTAIN

INDEPENDENT: Final = "independent runs"
OPTIMISTIC: Final = "optimistic oracle, no interval"
#: Shown for scale, no rivals.
SCALE: Final = ("nccl-default", "random", "oracle")
#: Fewest runs of a cell that can be split in two.
MIN_RUNS: Final = 3
RESAMPLES: Final = 200
_ENDS: Final = (0.025, 0.975)
#: Effective rows that a number needs: (sum w)^2 / sum w^2.
MIN_EFFECTIVE: Final = 50.0
#: Share of a policy's probability on what the behaviour never did.
MAX_UNCOVERED: Final = 0.001
NO_OVERLAP: Final = "no overlap"
NO_INTERVAL: Final = "no interval"
CONFIDENCE: Final = 0.9
#: Weight, in rows, of a neighbour's mean where a cell has few.
_PRIOR_ROWS: Final = 0.5


def result_rows(
    grid: TaskGrid,
    catalogue: Catalogue,
    choices: Mapping[str, Actions],
    noise: pl.DataFrame,
    probes: Mapping[str, Actions] | None = None,
) -> pl.DataFrame:
    """One row per (task, policy); `task` is the row in the grid, `probes` a search's calls."""
    names = np.array([config.key for config in catalogue.configs])
    best = np.nanargmin(grid.times_us, axis=1)
    tasks = with_noise(grid.tasks.with_row_index("task"), noise)
    tasks = tasks.with_columns(
        oracle_config=pl.Series(names[best]),
        oracle_us=pl.Series(grid.oracle_us),
        default_us=pl.Series(grid.default_us),
        evidence=pl.Series(np.where(has_runs(grid), INDEPENDENT, OPTIMISTIC)),
    )
    none = np.zeros(tasks.height, dtype=np.int64)
    frames = [
        tasks.with_columns(
            policy=pl.lit(name),
            chosen_config=pl.Series(names[actions]),
            chosen_us=pl.Series(grid.chosen_us(actions)),
            regret=pl.Series(grid.regret(actions)),
            channels=pl.Series(_channels(grid, actions), nan_to_null=True),
            default_channels=pl.Series(_channels(grid, none), nan_to_null=True),
            probes=pl.Series((probes or {}).get(name, none)),
        )
        for name, actions in choices.items()
    ]
    ratio = pl.col("chosen_us") / pl.col("default_us")
    return pl.concat(frames).with_columns(ratio_to_default=ratio, gain=1.0 - ratio)


def summarise(
    rows: pl.DataFrame, grid: TaskGrid, choices: Mapping[str, Actions]
) -> dict[str, dict[str, Any]]:
    """Policy -> its summary over the tasks of some `result_rows` of a grid, in fractions.

    `mean`, `p95` and `max` are of regret; `ratio_to_default` and `channels` geometric means over
    NCCL's own choice; `slower_than_default` is beyond the noise band (null: not known of all).
    """
    regret, ratio, band = pl.col("regret"), pl.col("ratio_to_default"), pl.col("noise_band")
    is_known = band.null_count() == 0
    channels = pl.col("channels") / pl.col("default_channels")
    found = rows.group_by("policy", maintain_order=True).agg(
        tasks=pl.len(),
        mean=regret.mean(),
        p95=regret.quantile(0.95, "linear"),
        max=regret.max(),
        ratio_to_default=ratio.log().mean().exp(),
        gain=1.0 - ratio.log().mean().exp(),
        abstained=(pl.col("chosen_config") == ABSTAIN.key).mean(),
        slower_than_default=pl.when(is_known).then((ratio > 1.0 + band).mean()),
        noise_band=pl.when(is_known).then(band.mean()),
        probes=pl.col("probes").mean(),
        channels=channels.log().mean().exp(),
    )
    fitted = fitted_rows(grid, rows["task"].unique().sort().to_numpy().astype(np.int64))
    crossed = cross_fit(grid, fitted, choices)
    return {
        each["policy"]: {**each, "tasks_with_interval": len(fitted), **crossed[each["policy"]]}
        for each in found.to_dicts()
    }


def _channels(grid: TaskGrid, actions: Actions) -> Float64Array:
    channels = np.full_like(grid.times_us, np.nan) if grid.channels is None else grid.channels
    return channels[np.arange(len(actions)), actions]


def has_runs(grid: TaskGrid) -> npt.NDArray[np.bool_]:
    """(T,) whether every measured cell has MIN_RUNS independent runs."""
    return np.asarray(((grid.repeats >= MIN_RUNS) | ~grid.mask).all(axis=1))


def fitted_rows(grid: TaskGrid, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The `rows` with runs enough; of simulated twins, all of whose times are equal, the first."""
    kept = rows[has_runs(grid)[rows]]
    sizes = grid.tasks["size_bytes"].to_numpy()[kept, None]
    told = np.hstack([sizes, np.nan_to_num(grid.times_us[kept])])
    return kept[np.sort(np.unique(told, axis=0, return_index=True)[1])]


def cross_fit(
    grid: TaskGrid, rows: npt.NDArray[np.int64], choices: Mapping[str, Actions]
) -> dict[str, dict[str, Any]]:
    """Policy -> mean regret and gain over `fitted_rows`, 95 % intervals; null without a row."""
    if not len(rows):
        nothing = dict.fromkeys(("crossfit", "interval", "gain_crossfit", "gain_interval"))
        return {name: {**nothing} for name in choices}
    random = np.random.default_rng(0)
    oracle, default = np.empty((2, len(rows), RESAMPLES))
    times = {name: np.empty_like(oracle) for name in choices}
    for place, row in enumerate(map(int, rows)):
        actions = np.flatnonzero(grid.mask[row])
        halves = [_halves(grid.samples[row, int(action)], random) for action in actions]
        chosen_on = np.stack([first for first, _ in halves])  # (measured actions, resamples)
        scored_on = np.stack([second for _, second in halves])
        oracle[place] = np.take_along_axis(scored_on, chosen_on.argmin(axis=0)[None], axis=0)[0]
        index = {int(action): i for i, action in enumerate(actions)}
        default[place] = scored_on[index[ABSTAIN_ACTION]]
        for name, chosen in choices.items():
            times[name][place] = scored_on[index[int(chosen[row])]]
    found = {}
    for name, each in times.items():
        regret = (each / oracle - 1.0).mean(axis=0)
        gain = 1.0 - np.exp(np.log(each / default).mean(axis=0))
        found[name] = {
            "crossfit": float(regret.mean()),
            "interval": np.quantile(regret, _ENDS).tolist(),
            "gain_crossfit": float(gain.mean()),
            "gain_interval": np.quantile(gain, _ENDS).tolist(),
        }
    return found


def _halves(
    times_us: Float64Array, random: np.random.Generator
) -> tuple[Float64Array, Float64Array]:
    """Medians (RESAMPLES,) of the two halves of a cell's runs, resampled within each."""
    order = random.random((RESAMPLES, len(times_us))).argsort(axis=1)
    # Either half may be the larger.
    size = len(times_us) // 2 + (random.integers(2) if len(times_us) % 2 else 0)
    parts = order[:, :size], order[:, size:]
    drawn = [random.integers(0, part.shape[1], size=part.shape) for part in parts]
    taken = map(partial(np.take_along_axis, axis=1), parts, drawn)
    first, second = (np.median(times_us[each], axis=1) for each in taken)
    return first, second


class Log(NamedTuple):
    """n logged calls."""

    task: npt.NDArray[np.int64]  # (n,), row of the task
    action: npt.NDArray[np.int64]  # (n,)
    reward: Float64Array  # (n,)
    #: (n,) probability with which the behaviour took the action.
    propensity: Float64Array
    #: Whether earlier rows changed the probabilities: these are not independent.
    adaptive: bool = False

    def rows(self, which: npt.NDArray[np.bool_]) -> "Log":
        """The calls selected by `which`."""
        task, action, reward, propensity, adaptive = self
        return Log(task[which], action[which], reward[which], propensity[which], adaptive)


#: `mean` of time / NCCL's default, `low` and `high` (null: not known), and why in `note`.
Estimate = dict[str, Any]


def _estimate(reward: float | None, reach: float | None = None, note: str = "") -> Estimate:
    mean = None if reward is None else -reward
    ends = (None, None) if mean is None or reach is None else (mean - reach, mean + reach)
    return {"mean": mean, "low": ends[0], "high": ends[1], "note": note}


def estimates(
    log: Log, policy: Float64Array, behaviour: Float64Array, confidence: float
) -> dict[str, Estimate]:
    """Of a policy (T, A) by name; `behaviour` (T, A)."""
    model = _tabular_model(log, behaviour.shape)
    direct = float((policy * model).sum(axis=1)[log.task].mean())
    # The model's own error is not known.
    found = {"DM": _estimate(direct, note=NO_INTERVAL)}
    weights = policy[log.task, log.action] / log.propensity
    total = float(weights.sum())
    effective = total**2 / float((weights**2).sum()) if total > 0 else 0.0
    uncovered = float(np.where(behaviour > 0, 0.0, policy).sum(axis=1)[log.task].mean())
    if uncovered > MAX_UNCOVERED or effective < MIN_EFFECTIVE:
        return found | dict.fromkeys(("SNIPS", "DR"), _estimate(None, note=NO_OVERLAP))
    snips = float((weights * log.reward).sum() / total)
    expected, predicted = _cross_fitted(log, policy)
    each = expected + weights * (log.reward - predicted)
    # Each row's part: that of a ratio by the delta method.
    terms = {
        "SNIPS": (snips, weights * (log.reward - snips) / weights.mean()),
        "DR": (float(each.mean()), each - each.mean()),
    }
    for name, (value, parts) in terms.items():
        error = float(parts.std(ddof=1) / np.sqrt(len(log.task)))
        reach = float(stats.norm.ppf(0.5 + confidence / 2)) * error
        found[name] = _estimate(value, reach)
        if log.adaptive:
            found[name] = _estimate(value, note=NO_INTERVAL)
    return found


def _tabular_model(log: Log, shape: tuple[int, int]) -> Float64Array:
    """(T, A) mean reward of cells, shrunk towards their action's, else the overall mean."""
    sums, counts = np.zeros(shape), np.zeros(shape)
    np.add.at(sums, (log.task, log.action), log.reward)
    np.add.at(counts, (log.task, log.action), 1.0)
    overall = float(log.reward.mean())
    by_action = (sums.sum(axis=0) + _PRIOR_ROWS * overall) / (counts.sum(axis=0) + _PRIOR_ROWS)
    return np.asarray((sums + _PRIOR_ROWS * by_action) / (counts + _PRIOR_ROWS))


def _cross_fitted(log: Log, policy: Float64Array) -> tuple[Float64Array, Float64Array]:
    """(n,) predicted rewards of the policy, and of the logged action, for unseen rows."""
    expected, predicted = np.empty_like(log.reward), np.empty_like(log.reward)
    is_even = np.arange(len(log.task)) % 2 == 0
    for part in (is_even, ~is_even):
        model = _tabular_model(log.rows(~part), policy.shape)
        inside = log.rows(part)
        expected[part] = (policy * model).sum(axis=1)[inside.task]
        predicted[part] = model[inside.task, inside.action]
    return expected, predicted


def logged_values(
    frame: pl.DataFrame, catalogue: Catalogue, grid: TaskGrid, policies: Sequence[LearnedPolicy]
) -> dict[str, dict[str, dict[str, Any]]]:
    """System -> policy -> counts and estimates, on tasks where it acts."""
    drawn = drawn_rows(frame, catalogue, grid)
    return {
        str(system): {policy.name: _value(rows, catalogue, grid, policy) for policy in policies}
        for (system,), rows in drawn.group_by("system", maintain_order=True)
    }


def _value(
    drawn: pl.DataFrame, catalogue: Catalogue, grid: TaskGrid, policy: LearnedPolicy
) -> dict[str, Any]:
    asked = drawn["task"].unique().sort().to_numpy()
    tasks = grid.tasks[asked]
    possible = action_masks(drawn, tasks, catalogue)
    shape = (grid.tasks.height, len(catalogue))
    chosen, behaviour = np.full(shape[0], ABSTAIN_ACTION), np.zeros(shape)
    chosen[asked] = policy.choose_among(tasks, possible > 0)
    behaviour[asked] = possible
    task, action = (drawn[name].to_numpy().astype(np.int64) for name in ("task", "action"))
    kinds = drawn.group_by("sweep", "task").agg(pl.col("behaviour_probability").n_unique())
    log = Log(
        task,
        action,
        -drawn["time_us"].to_numpy() / grid.default_us[task],
        drawn["behaviour_probability"].to_numpy().astype(np.float64),
        # Unless each task's draws have equal probabilities.
        adaptive=bool((kinds["behaviour_probability"] > 1).any()),
    )
    log = log.rows(chosen[log.task] != ABSTAIN_ACTION)
    acts = int((chosen != ABSTAIN_ACTION).sum())
    counts = {"tasks": len(asked), "acts": acts, "draws": len(log.task)}
    if not counts["draws"]:
        return counts
    return counts | estimates(log, np.eye(len(catalogue))[chosen], behaviour, CONFIDENCE)


def drawn_rows(frame: pl.DataFrame, catalogue: Catalogue, grid: TaskGrid) -> pl.DataFrame:
    """The timed draws of a strategy, with `task` and `action`; NCCL's default is not drawn."""
    drawn = one_placement(quiet(comparable(frame))).filter(
        ~pl.col("is_default") & pl.col("behaviour_probability").is_not_null()
    )
    drawn = drawn.with_columns(catalogue.actions(drawn)).drop_nulls("action")
    tasks = grid.tasks.select(TASK_COLUMNS).with_row_index("task")
    return drawn.join(tasks, on=TASK_COLUMNS, nulls_equal=True, maintain_order="left")
