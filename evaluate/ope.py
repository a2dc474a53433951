"""Off-policy evaluation: what a policy is worth by a sweep that drew its configs at random.

Scores of a report let a policy choose among the configs that were drawn for a task. Draws whose
probability is known tell what a policy is worth that may take any config (docs/evaluate.md).

    DM      direct method: the mean of a reward model under the policy
    SNIPS   importance sampling: sum of w r over sum of w, w = policy / behaviour (Swaminathan and
            Joachims 2015); without the second sum draws without a time count as taking none
    DR      doubly robust (Dudik, Langford and Li 2011): DM corrected by the weighted residuals

n rows of a log, T tasks, A actions. Rewards are minus time over NCCL's default.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy import stats

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid, comparable, one_placement, quiet
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.datasets.steps import action_masks
from dynamiccl.evaluate.baselines import LearnedPolicy

Float64Array = npt.NDArray[np.float64]
#: Effective rows that a number needs: (sum w)^2 / sum w^2.
MIN_EFFECTIVE: Final = 50.0
#: Share of a policy's probability on what the behaviour never did.
MAX_UNCOVERED: Final = 0.001
NO_OVERLAP: Final = "no overlap"
NO_INTERVAL: Final = "no interval"
CONFIDENCE: Final = 0.9
#: Weight, in rows, of a neighbour's mean where a cell has few.
_PRIOR_ROWS: Final = 0.5


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
        return Log(*(column[which] for column in self[:4]), self.adaptive)


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
