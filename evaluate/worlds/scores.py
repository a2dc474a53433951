"""Scores of choices with known truth: regret, gain kept, share slower, with intervals.

Intervals are 95 % bootstraps of draws (clusters), and of tasks within each.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.policies import Actions

#: What counts as slower, and as something to gain.
WORSE: Final = 0.01
#: What `summary` tells, each with `_lo` and `_hi`.
FIGURES: Final = ("mean_regret", "headroom_regret", "share_worse", "gain_kept")


def judged(
    choices: Mapping[str, Actions], truth: TaskGrid, setting: str, draw: int
) -> list[dict[str, Any]]:
    """One row for each policy and task."""
    best = truth.oracle_us
    rows = []
    for name, actions in choices.items():
        time = truth.chosen_us(actions)
        rows += [
            {
                "setting": setting,
                "draw": draw,
                "policy": name,
                "regret": float(time[i] / best[i] - 1.0),
                "headroom": bool(truth.default_us[i] > (1.0 + WORSE) * best[i]),
                "worse": bool(time[i] > (1.0 + WORSE) * truth.default_us[i]),
                "acts": bool(actions[i] != ABSTAIN_ACTION),
                "gain": float(np.log(truth.default_us[i] / time[i])),
                "possible": float(np.log(truth.default_us[i] / best[i])),
            }
            for i in range(len(time))
        ]
    return rows


def summary(rows: pl.DataFrame, draws: int = 1000) -> dict[str, float]:
    """Metrics of one policy in one setting, with intervals."""
    by_draw = [part for _, part in rows.group_by("draw", maintain_order=True)]
    random = np.random.default_rng(0)

    def figures(parts: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        every = np.concatenate(parts)
        regret, headroom, worse, gain, possible = every.T
        on = headroom > 0
        return np.array(
            [
                regret.mean(),
                regret[on].mean() if on.any() else np.nan,
                worse.mean(),
                gain.sum() / possible.sum(),
            ]
        )

    columns = ["regret", "headroom", "worse", "gain", "possible"]
    tables = [part.select(columns).cast(pl.Float64).to_numpy() for part in by_draw]
    point = figures(tables)
    drawn = []
    for _ in range(draws):
        picked = [tables[i] for i in random.integers(0, len(tables), len(tables))]
        drawn.append(figures([t[random.integers(0, len(t), len(t))] for t in picked]))
    low, high = np.nanquantile(drawn, [0.025, 0.975], axis=0)
    found: dict[str, float] = {"tasks": float(rows.height), "draws": float(len(tables))}
    for i, name in enumerate(FIGURES):
        found |= {name: float(point[i]), f"{name}_lo": float(low[i]), f"{name}_hi": float(high[i])}
    return found


def paired(rows: pl.DataFrame, ours: str, rival: str) -> dict[str, float]:
    """Difference of mean regret (ours - rival) by draw: mean and 95 % bootstrap interval."""
    found = (
        rows.filter(pl.col("policy").is_in([ours, rival]))
        .group_by("draw", "policy")
        .agg(pl.col("regret").mean(), head=pl.col("regret").filter("headroom").mean())
    )
    a, b = (found.filter(pl.col("policy") == name).sort("draw") for name in (ours, rival))
    random = np.random.default_rng(0)
    told: dict[str, float] = {}
    for column in ("regret", "head"):
        apart = (a[column] - b[column]).drop_nulls().to_numpy()
        if not len(apart):
            continue  # there was nothing to gain in any draw
        drawn = [apart[random.integers(0, len(apart), len(apart))].mean() for _ in range(2000)]
        low, high = np.quantile(drawn, [0.025, 0.975])
        told |= {
            column: float(apart.mean()),
            f"{column}_lo": float(low),
            f"{column}_hi": float(high),
        }
    return told
