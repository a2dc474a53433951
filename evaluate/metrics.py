"""Metrics of choices: one row per (task, policy), and summaries.

Regrets here are against the best measured config, chosen on all runs. Beside their mean stands the
cross-fitted one (`crossfit`), with an interval, over the tasks all of whose cells have independent
runs enough. The others are marked 'optimistic oracle, no interval': the best of noisy single
figures looks better than it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import NOISE_KEY, TaskGrid
from dynamiccl.evaluate.crossfit import cross_fit, fitted_rows, has_runs
from dynamiccl.evaluate.policies import Actions

INDEPENDENT: Final = "independent runs"
#: What is shown for scale, and is no rival.
SCALE: Final = ("nccl-default", "random", "oracle")
OPTIMISTIC: Final = "optimistic oracle, no interval"


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics of one policy on a group of tasks; regrets and bands are fractions."""

    policy: str
    tasks: int
    mean: float
    p50: float
    p95: float
    max: float
    #: Geometric mean of time over the default's time; below 1 is faster than NCCL.
    ratio_to_default: float
    #: Total time over the oracle's total time - 1: large messages weigh more.
    time_weighted: float
    #: Cross-fitted mean over the `crossfit.fitted_rows`; None without any.
    crossfit: float | None
    #: Its 95 % interval.
    interval: tuple[float, float] | None
    tasks_with_interval: int
    #: Share of tasks on which the policy leaves the choice to NCCL.
    abstained: float
    #: Share of tasks slower than the default by more than the noise band (None: band unknown).
    slower_than_default: float | None
    #: Mean number of calls of a task that it tried before it chose; 0 for all but the search.
    probes: float
    #: Geometric mean of its channels over those of NCCL's own choice, as read back; None: nowhere.
    channels: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data for `json.dumps`."""
        return asdict(self)


def result_rows(
    grid: TaskGrid,
    catalogue: Catalogue,
    choices: Mapping[str, Actions],
    bands: Mapping[tuple[str, str | None], float],
) -> pl.DataFrame:
    """One row per (task, policy): chosen config, time, regret, and the measurements behind it."""
    names = np.array([config.key for config in catalogue.configs])
    best = np.nanargmin(grid.times_us, axis=1)
    base = grid.tasks.with_columns(
        oracle_config=pl.Series(names[best]),
        oracle_us=pl.Series(grid.oracle_us),
        default_us=pl.Series(grid.default_us),
        evidence=pl.Series(np.where(has_runs(grid), INDEPENDENT, OPTIMISTIC)),
        noise_band=pl.Series(
            [bands.get(key) for key in grid.tasks.select(NOISE_KEY).iter_rows()], dtype=pl.Float64
        ),
    )
    frames = [
        base.with_columns(
            policy=pl.lit(name),
            chosen_config=pl.Series(names[actions]),
            chosen_us=pl.Series(grid.chosen_us(actions)),
            regret=pl.Series(grid.regret(actions)),
            ratio_to_default=pl.Series(grid.chosen_us(actions) / grid.default_us),
            channels=pl.Series(_channels(grid, actions), nan_to_null=True),
            default_channels=pl.Series(_channels(grid, np.zeros_like(actions)), nan_to_null=True),
        )
        for name, actions in choices.items()
    ]
    return pl.concat(frames)


def summarise(
    grid: TaskGrid,
    rows: npt.NDArray[np.int64],
    choices: Mapping[str, Actions],
    band: float | None,
    probes: Mapping[str, Actions] = MappingProxyType({}),
) -> list[Summary]:
    """Summaries of every policy on the tasks `rows` of a grid.

    `probes` (T,) of the search among them.
    """
    fitted = cross_fit(grid, rows, {name: [actions] for name, actions in choices.items()}, band)
    num_fitted, default = len(fitted_rows(grid, rows)), grid.default_us[rows]
    found = []
    for name, actions in choices.items():
        regret, chosen, crossed = grid.regret(actions)[rows], grid.chosen_us(actions), fitted[name]
        ratio = chosen[rows] / default
        given = (_channels(grid, actions) / _channels(grid, np.zeros_like(actions)))[rows]
        given = given[~np.isnan(given)]
        summary = Summary(
            policy=name,
            tasks=len(rows),
            mean=float(regret.mean()),
            p50=float(np.median(regret)),
            p95=float(np.quantile(regret, 0.95)),
            max=float(regret.max()),
            ratio_to_default=float(np.exp(np.log(ratio).mean())),
            time_weighted=float(chosen[rows].sum() / grid.oracle_us[rows].sum() - 1.0),
            crossfit=None if crossed is None else crossed.regret.mean,
            interval=None if crossed is None else (crossed.regret.low, crossed.regret.high),
            tasks_with_interval=num_fitted,
            abstained=float((actions[rows] == ABSTAIN_ACTION).mean()),
            slower_than_default=None if band is None else float((ratio > 1.0 + band).mean()),
            probes=float(probes[name][rows].mean()) if name in probes else 0.0,
            channels=float(np.exp(np.log(given).mean())) if len(given) else None,
        )
        found.append(summary)
    return found


def _channels(grid: TaskGrid, actions: Actions) -> npt.NDArray[np.float64]:
    """(T,) channels of each chosen action; NaN where they were not read back."""
    channels = np.full_like(grid.times_us, np.nan) if grid.channels is None else grid.channels
    return channels[np.arange(len(actions)), actions]


def default_verdicts(
    where: str, summaries: Sequence[Summary], learned: Sequence[str], band: float | None
) -> list[str]:
    """One sentence for each policy: does it beat NCCL's default beyond noise?"""
    by_name = {summary.policy: summary for summary in summaries}
    default = by_name["nccl-default"]
    return [f"{where}: {_against_default(n, by_name[n], default, band)}" for n in learned]


def simple_baselines(summaries: Sequence[Summary], learned: Sequence[str]) -> list[Summary]:
    """Baselines with no more information than a policy.

    Excluded are the search, which measures the test task, the oracle, which knows it, and random
    choices.
    """
    others = [s for s in summaries if s.probes == 0.0]
    return [s for s in others if s.policy not in {*learned, *SCALE}]


def _against_default(name: str, ours: Summary, default: Summary, band: float | None) -> str:
    figures = f"mean regret {ours.mean:.2%} against the default's {default.mean:.2%}"
    if ours.abstained == 1.0:
        return f"{name} abstains on every task: NCCL's own choice stands ({figures})."
    if band is None:
        return f"{name} has {figures}; the noise is unknown (no repeats), so this proves nothing."
    if default.mean <= band:
        state = "no worse beyond" if ours.mean <= default.mean + band else "WORSE beyond"
        within = f"NCCL's default is within the noise band ({band:.2%})"
        return f"{within}; {name} is {state} it: {figures}."
    word = "beats" if ours.mean < default.mean else "DOES NOT BEAT"
    return f"{name} {word} NCCL's default: {figures} (noise band {band:.2%})."
