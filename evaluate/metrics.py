"""Metrics of choices: one row per (task, policy), and one per policy.

Regrets are against the best measured config, which is biased low: the least of many noisy times.
Cross-fitted ones split the runs of every cell in two: the smallest median of one half is the
oracle, its time in the other half the reference. The interval is a bootstrap over runs and splits.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.datasets.steps import with_noise
from dynamiccl.evaluate.baselines import Actions
from dynamiccl.nccl import ABSTAIN

INDEPENDENT: Final = "independent runs"
OPTIMISTIC: Final = "optimistic oracle, no interval"
#: Shown for scale, no rivals.
SCALE: Final = ("nccl-default", "random", "oracle")
#: Fewest runs of a cell that can be split in two.
MIN_RUNS: Final = 3
RESAMPLES: Final = 200
_ENDS: Final = (0.025, 0.975)


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


def _channels(grid: TaskGrid, actions: Actions) -> npt.NDArray[np.float64]:
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
    times_us: npt.NDArray[np.float64], random: np.random.Generator
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Medians (RESAMPLES,) of the two halves of a cell's runs, resampled within each."""
    order = random.random((RESAMPLES, len(times_us))).argsort(axis=1)
    # Either half may be the larger.
    size = len(times_us) // 2 + (random.integers(2) if len(times_us) % 2 else 0)
    parts = order[:, :size], order[:, size:]
    drawn = [random.integers(0, part.shape[1], size=part.shape) for part in parts]
    taken = map(partial(np.take_along_axis, axis=1), parts, drawn)
    first, second = (np.median(times_us[each], axis=1) for each in taken)
    return first, second
