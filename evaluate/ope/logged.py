"""Off-policy estimates of policies on a sweep whose configs were drawn at random.

Scores of a report let a policy choose among the configs that were drawn for a task. Here it may
take any that could have been, and its time is estimated from the draws: the other question, and
the one that counts where a sweep measured a share of all configs only.

Tasks where a policy leaves the choice to NCCL need no estimate, so each policy is estimated on the
tasks where it acts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.datasets.steps import action_masks
from dynamiccl.evaluate.blocks import TableBlock
from dynamiccl.evaluate.ope.estimators import Estimate, every_estimate
from dynamiccl.evaluate.ope.logs import deterministic, drawn_rows, read_log
from dynamiccl.evaluate.policies import LearnedPolicy

CONFIDENCE: Final = 0.9
ESTIMATORS: Final = ("DM", "SNIPS", "DR")


@dataclass(frozen=True, slots=True)
class LoggedValue:
    """A policy's estimated value on the tasks of one system where it acts."""

    policy: str
    #: Tasks with draws, and those of them where the policy does not leave the choice to NCCL.
    tasks: int
    acts: int
    #: Draws of the tasks where it acts.
    draws: int
    #: Estimator -> mean of minus time over NCCL's default; empty where the policy acts nowhere.
    estimates: Mapping[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """Plain data; times over NCCL's default, null where there is no number."""
        figures = {name: time_over_default(each) for name, each in self.estimates.items()}
        counts = {"tasks": self.tasks, "acts": self.acts, "draws": self.draws}
        return counts | {
            name: {"mean": mean, "low": low, "high": high, "note": self.estimates[name].note}
            for name, (mean, low, high) in figures.items()
        }


def time_over_default(found: Estimate) -> tuple[float | None, float | None, float | None]:
    """An estimate and its interval as time / NCCL's default."""
    mean, low, high = (
        None if end is None else -end for end in (found.value, found.high, found.low)
    )
    return mean, low, high


def logged_values(
    frame: pl.DataFrame, catalogue: Catalogue, grid: TaskGrid, policies: Sequence[LearnedPolicy]
) -> dict[str, list[LoggedValue]]:
    """System -> every policy's values; systems without draws are left out."""
    drawn = drawn_rows(frame, catalogue, grid)
    return {
        str(system): [_value(rows, catalogue, grid, policy) for policy in policies]
        for (system,), rows in drawn.group_by("system", maintain_order=True)
    }


def _value(
    drawn: pl.DataFrame, catalogue: Catalogue, grid: TaskGrid, policy: LearnedPolicy
) -> LoggedValue:
    asked = drawn["task"].unique().sort().to_numpy()
    tasks = grid.tasks[asked]
    possible = action_masks(drawn, tasks, catalogue)
    shape = (grid.tasks.height, len(catalogue))
    chosen, behaviour = np.full(shape[0], ABSTAIN_ACTION), np.zeros(shape)
    chosen[asked] = policy.choose_among(tasks, possible > 0)
    behaviour[asked] = possible
    log = read_log(drawn, grid)
    log = log.rows(chosen[log.task] != ABSTAIN_ACTION)
    estimates: Mapping[str, Estimate] = {}
    if len(log):
        wanted = deterministic(chosen, len(catalogue))
        (estimates,) = every_estimate(log, [wanted], behaviour, CONFIDENCE)
    return LoggedValue(
        policy=policy.name,
        tasks=len(asked),
        acts=int((chosen != ABSTAIN_ACTION).sum()),
        draws=len(log),
        estimates=estimates,
    )


def logged_blocks(found: Sequence[LoggedValue]) -> Iterator[TableBlock]:
    """A table of the estimates; nothing where the data have no draws."""
    if not found:
        return
    heads = ["policy", "tasks where it acts", "draws there", *ESTIMATORS]
    note = (
        "Mean time over NCCL's default, on the tasks where a policy acts, free to take any config "
        "that this sweep may draw: estimated from the configs that it drew and from their "
        f"probabilities, with {CONFIDENCE:.0%} intervals (DM has none, and a sweep that follows "
        "what it sees gives none). The tables above let it choose among what was drawn for a task."
    )
    yield TableBlock(
        "Estimated from what the sweep drew",
        heads,
        [_row(each) for each in found],
        note,
        layout="numbers",
    )


def _row(found: LoggedValue) -> list[str]:
    estimates = [_text(found.estimates.get(name)) for name in ESTIMATORS]
    return [found.policy, f"{found.acts} of {found.tasks}", str(found.draws), *estimates]


def _text(found: Estimate | None) -> str:
    if found is None:
        return "-"
    mean, low, high = time_over_default(found)
    if mean is None:
        return found.note
    return f"{mean:.4f}" if low is None else f"{mean:.4f} ({low:.4f} to {high:.4f})"
