"""Logs for off-policy evaluation: actions, their logging probabilities, rewards.

A sweep that draws what it measures (`strategy.kind` random or adaptive) writes down with which
probability it took each config: such rows are a log, from which it can be told what a policy is
worth that may take any config, and not those alone that were drawn for a task.

n rows of a log, T tasks, A actions. Rewards are minus time over NCCL's default.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid, comparable, one_placement, quiet
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.evaluate.policies import Actions

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Log:
    """n logged calls."""

    task: npt.NDArray[np.int64]  # (n,), row of the task
    action: npt.NDArray[np.int64]  # (n,)
    reward: Float64Array  # (n,)
    #: (n,) with which probability the behaviour took the action it took.
    propensity: Float64Array
    #: Whether what came before changed the probabilities: such rows are not independent.
    adaptive: bool = False

    def __len__(self) -> int:
        return len(self.action)

    def rows(self, which: npt.NDArray[np.bool_]) -> Self:
        """The calls selected by `which`."""
        return type(self)(
            self.task[which],
            self.action[which],
            self.reward[which],
            self.propensity[which],
            self.adaptive,
        )


def drawn_rows(frame: pl.DataFrame, catalogue: Catalogue, grid: TaskGrid) -> pl.DataFrame:
    """The measurements that a strategy drew for tasks of a grid, with `task` and `action`.

    One row for each draw that has a time; NCCL's default is measured beside them and not drawn.
    """
    drawn = one_placement(quiet(comparable(frame))).filter(
        ~pl.col("is_default") & pl.col("behaviour_probability").is_not_null()
    )
    drawn = drawn.with_columns(catalogue.actions(drawn)).drop_nulls("action")
    tasks = grid.tasks.select(TASK_COLUMNS).with_row_index("task")
    return drawn.join(tasks, on=TASK_COLUMNS, nulls_equal=True, maintain_order="left")


def read_log(drawn: pl.DataFrame, grid: TaskGrid) -> Log:
    """The log of `drawn_rows`; adaptive unless each task's draws have equal probabilities."""
    task, action = (drawn[name].to_numpy().astype(np.int64) for name in ("task", "action"))
    kinds = drawn.group_by("sweep", "task").agg(pl.col("behaviour_probability").n_unique())
    return Log(
        task,
        action,
        -drawn["time_us"].to_numpy() / grid.default_us[task],
        drawn["behaviour_probability"].to_numpy().astype(np.float64),
        adaptive=bool((kinds["behaviour_probability"] > 1).any()),
    )


def deterministic(actions: Actions, num_actions: int) -> Float64Array:
    """(T, A) the policy that always takes `actions`."""
    chosen: Float64Array = np.eye(num_actions)[actions]
    return chosen
