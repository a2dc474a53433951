"""Metrics of choices: one row per (task, policy), and one per policy.

Gains are time saved against NCCL's own choice. Regrets are against the best measured config, chosen
on all runs: the minimum of many noisy times is biased low, so that they are too high, and a policy
evaluated on the same runs looks too good. Beside them stand cross-fitted ones, over the tasks all
of whose cells have independent runs enough; the others are marked 'optimistic oracle, no interval'.

Cross-fitted, the independent runs of every cell are split in two at random; the config with the
smallest median in one half is the oracle, and its time in the other half is the reference there.
Regret may be negative: the config that looked best was not. The interval is a bootstrap over runs,
within each half, over random splits, and over the seeds of a policy trained more than once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.evaluate.policies import Actions

INDEPENDENT: Final = "independent runs"
OPTIMISTIC: Final = "optimistic oracle, no interval"
#: What is shown for scale, and is no rival.
SCALE: Final = ("nccl-default", "random", "oracle")
#: Runs of a cell from which on there is something to part.
MIN_RUNS: Final = 3
RESAMPLES: Final = 200
_ENDS: Final = (0.025, 0.975)


def result_rows(
    grid: TaskGrid,
    catalogue: Catalogue,
    choices: Mapping[str, Actions],
    bands: Mapping[str, float],
) -> pl.DataFrame:
    """One row per (task, policy): chosen config, time, gain, regret, and what is behind them.

    `bands` are the noise bands of systems.
    """
    names = np.array([config.key for config in catalogue.configs])
    best = np.nanargmin(grid.times_us, axis=1)
    base = grid.tasks.with_columns(
        oracle_config=pl.Series(names[best]),
        oracle_us=pl.Series(grid.oracle_us),
        default_us=pl.Series(grid.default_us),
        evidence=pl.Series(np.where(has_runs(grid), INDEPENDENT, OPTIMISTIC)),
        noise_band=pl.col("system").replace_strict(bands, default=None, return_dtype=pl.Float64),
    )
    frames = [
        base.with_columns(
            policy=pl.lit(name),
            chosen_config=pl.Series(names[actions]),
            chosen_us=pl.Series(grid.chosen_us(actions)),
            gain=pl.Series(1.0 - grid.chosen_us(actions) / grid.default_us),
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
) -> pl.DataFrame:
    """One row a policy, over the tasks `rows` of a grid; regrets, gains and shares are fractions.

    `mean`, `p50`, `p95` and `max` are of regret; `ratio_to_default` is the geometric mean of time
    over NCCL's own, and `gain` what that saves; in `time_weighted`, total time / the oracle's - 1,
    large messages weigh more. `crossfit` with its `interval`, and `gain_crossfit` with its
    `gain_interval`, are over the `tasks_with_interval` (`fitted_rows`), null without any.
    `abstained` is the share of tasks that are left to NCCL, `slower_than_default` of those slower
    than it by more than the noise band (null: band unknown). `probes` are the calls of a task that
    a search tried before it chose; `channels` is the geometric mean over those of NCCL's own
    choice, as read back (null: nowhere).
    """
    fitted = cross_fit(grid, rows, {name: [actions] for name, actions in choices.items()}, band)
    num_fitted, default = len(fitted_rows(grid, rows)), grid.default_us[rows]
    found = []
    for name, actions in choices.items():
        regret, chosen, crossed = grid.regret(actions)[rows], grid.chosen_us(actions), fitted[name]
        ratio = chosen[rows] / default
        given = (_channels(grid, actions) / _channels(grid, np.zeros_like(actions)))[rows]
        given = given[~np.isnan(given)]
        mean_ratio = float(np.exp(np.log(ratio).mean()))
        interval = gain_interval = gain_crossfit = None
        if crossed is not None:
            gain_crossfit = 1 - crossed.ratio_to_default.mean
            interval = [crossed.regret.low, crossed.regret.high]
            gain_interval = [1 - crossed.ratio_to_default.high, 1 - crossed.ratio_to_default.low]
        summary = {
            "policy": name,
            "tasks": len(rows),
            "mean": float(regret.mean()),
            "p50": float(np.median(regret)),
            "p95": float(np.quantile(regret, 0.95)),
            "max": float(regret.max()),
            "ratio_to_default": mean_ratio,
            "gain": 1.0 - mean_ratio,
            "gain_crossfit": gain_crossfit,
            "gain_interval": gain_interval,
            "time_weighted": float(chosen[rows].sum() / grid.oracle_us[rows].sum() - 1.0),
            "crossfit": None if crossed is None else crossed.regret.mean,
            "interval": interval,
            "tasks_with_interval": num_fitted,
            "abstained": float((actions[rows] == ABSTAIN_ACTION).mean()),
            "slower_than_default": None if band is None else float((ratio > 1.0 + band).mean()),
            "probes": float(probes[name][rows].mean()) if name in probes else 0.0,
            "channels": float(np.exp(np.log(given).mean())) if len(given) else None,
        }
        found.append(summary)
    return pl.DataFrame(found, infer_schema_length=None)


def _channels(grid: TaskGrid, actions: Actions) -> npt.NDArray[np.float64]:
    """(T,) channels of each chosen action; NaN where they were not read back."""
    channels = np.full_like(grid.times_us, np.nan) if grid.channels is None else grid.channels
    return channels[np.arange(len(actions)), actions]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: npt.NDArray[np.float64]) -> Self:
        """Mean and 95 % interval of bootstrap draws."""
        low, high = np.quantile(draws, _ENDS)
        return cls(float(draws.mean()), float(low), float(high))


@dataclass(frozen=True, slots=True)
class CrossFit:
    """Results of a policy over tasks; regrets and shares are fractions."""

    regret: Interval
    p95_regret: Interval
    #: Geometric mean of time over the default's time.
    ratio_to_default: Interval
    #: Share of tasks slower than the default by more than the noise band; None without a band.
    share_worse: Interval | None


def has_runs(grid: TaskGrid) -> npt.NDArray[np.bool_]:
    """(T,) whether every measured cell of a task has MIN_RUNS independent runs."""
    return np.asarray(((grid.repeats >= MIN_RUNS) | ~grid.mask).all(axis=1))


def fitted_rows(grid: TaskGrid, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The `rows` with runs enough; of simulated twins, all of whose times are equal, the first."""
    kept = rows[has_runs(grid)[rows]]
    sizes = grid.tasks["size_bytes"].to_numpy()[kept, None]
    told = np.hstack([sizes, np.nan_to_num(grid.times_us[kept])])
    return kept[np.sort(np.unique(told, axis=0, return_index=True)[1])]


def cross_fit(
    grid: TaskGrid,
    rows: npt.NDArray[np.int64],
    choices: Mapping[str, Sequence[Actions]],
    band: float | None = None,
) -> dict[str, CrossFit | None]:
    """Each policy over the `fitted_rows` of `rows`; None without any.

    `choices` (T,) of every seed of a policy: figures are means over seeds, and intervals are of the
    seeds too.
    """
    kept = fitted_rows(grid, rows)
    if not len(kept):
        return dict.fromkeys(choices)
    random = np.random.default_rng(0)
    times = {name: np.empty((len(seeds), len(kept), RESAMPLES)) for name, seeds in choices.items()}
    oracle, default = np.empty((2, len(kept), RESAMPLES))
    for place, row in enumerate(map(int, kept)):
        actions = np.flatnonzero(grid.mask[row])
        halves = [_halves(grid.samples[row, int(action)], random) for action in actions]
        chosen_on = np.stack([first for first, _ in halves])  # (measured actions, resamples)
        scored_on = np.stack([second for _, second in halves])
        oracle[place] = np.take_along_axis(scored_on, chosen_on.argmin(axis=0)[None], axis=0)[0]
        index = {int(action): i for i, action in enumerate(actions)}
        default[place] = scored_on[index[ABSTAIN_ACTION]]
        for name, seeds in choices.items():
            for seed, chosen in enumerate(seeds):
                times[name][seed, place] = scored_on[index[int(chosen[row])]]
    return {name: _figures(each, oracle, default, band, random) for name, each in times.items()}


def _figures(
    times: npt.NDArray[np.float64],
    oracle: npt.NDArray[np.float64],
    default: npt.NDArray[np.float64],
    band: float | None,
    random: np.random.Generator,
) -> CrossFit:
    """Results from times (seeds, tasks, resamples)."""
    regret, ratio = times / oracle - 1.0, times / default
    drawn = random.integers(0, len(times), (len(times), RESAMPLES))

    def interval(by_seed: npt.NDArray[np.float64]) -> Interval:
        return Interval.of(np.take_along_axis(by_seed, drawn, axis=0).mean(axis=0))

    return CrossFit(
        interval(regret.mean(axis=1)),
        interval(np.quantile(regret, 0.95, axis=1)),
        interval(np.exp(np.log(ratio).mean(axis=1))),
        None if band is None else interval((ratio > 1.0 + band).mean(axis=1)),
    )


def _halves(
    times_us: npt.NDArray[np.float64], random: np.random.Generator
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Medians (RESAMPLES,) of the two halves of a cell's runs, resampled within each."""
    order = random.random((RESAMPLES, len(times_us))).argsort(axis=1)
    # Now the one and now the other half is the larger.
    size = len(times_us) // 2 + (random.integers(2) if len(times_us) % 2 else 0)
    parts = order[:, :size], order[:, size:]
    first, second = (np.median(times_us[_resampled(part, random)], axis=1) for part in parts)
    return first, second


def _resampled(part: npt.NDArray[np.int64], random: np.random.Generator) -> npt.NDArray[np.int64]:
    drawn = random.integers(0, part.shape[1], size=part.shape)
    return np.take_along_axis(part, drawn, axis=1)
