"""From choices to figures: one row per (task, policy), and summaries with bootstrap intervals.

The interval of a mean regret comes from resampling the independent repeats of the chosen and of the
best cell, over tasks all of whose cells were repeated. The best config stays the one found on all
repeats: choosing it anew in every resample would count noise as regret. A task with a cell that was
measured once is marked 'optimistic oracle, no interval': the best of noisy single figures looks
better than it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import NOISE_KEY
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.policies import Actions

INDEPENDENT: Final = "independent runs"
OPTIMISTIC: Final = "optimistic oracle, no interval"
_RESAMPLES: Final = 200


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one policy on one group of tasks; regrets and bands are fractions."""

    policy: str
    tasks: int
    mean: float
    p95: float
    max: float
    #: Geometric mean of time over the default's time; below 1 is faster than NCCL.
    ratio_to_default: float
    #: Total time over the oracle's total time - 1: large messages weigh more.
    time_weighted: float
    #: 95 % bootstrap interval of `mean` over the tasks with independent runs; None without any.
    interval: tuple[float, float] | None
    tasks_with_interval: int
    #: Share of tasks on which the policy leaves the choice to NCCL.
    abstained: float
    #: Share of tasks slower than the default by more than the noise band (None: band unknown).
    slower_than_default: float | None
    #: Mean number of calls of a task that it tried before it chose; 0 for all but searchers.
    probes: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def result_rows(
    grid: TaskGrid,
    catalogue: Catalogue,
    choices: Mapping[str, Actions],
    bands: Mapping[tuple[str, str | None], float],
) -> pl.DataFrame:
    """One row per (task, policy): what was chosen, its time, regret, and the evidence behind it."""
    names = np.array([config.key for config in catalogue.configs])
    best = np.nanargmin(grid.times_us, axis=1)
    base = grid.tasks.with_columns(
        oracle_config=pl.Series(names[best]),
        oracle_us=pl.Series(grid.oracle_us),
        default_us=pl.Series(grid.default_us),
        evidence=pl.Series(np.where(_repeated(grid), INDEPENDENT, OPTIMISTIC)),
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

    `probes` (T,) of the searchers among them.
    """
    repeated = rows[_repeated(grid)[rows]]
    intervals = _intervals(grid, repeated, choices)
    return [
        _summary(
            grid,
            rows,
            name,
            actions,
            (intervals[name], len(repeated)),
            band,
            float(probes[name][rows].mean()) if name in probes else 0.0,
        )
        for name, actions in choices.items()
    ]


def _summary(  # noqa: PLR0913, PLR0917 - all of a row
    grid: TaskGrid,
    rows: npt.NDArray[np.int64],
    name: str,
    actions: Actions,
    interval: tuple[tuple[float, float] | None, int],
    band: float | None,
    probes: float,
) -> Summary:
    regret = grid.regret(actions)[rows]
    chosen, oracle = grid.chosen_us(actions)[rows], grid.oracle_us[rows]
    ratio = chosen / grid.default_us[rows]
    return Summary(
        policy=name,
        tasks=len(rows),
        mean=float(regret.mean()),
        p95=float(np.quantile(regret, 0.95)),
        max=float(regret.max()),
        ratio_to_default=float(np.exp(np.log(ratio).mean())),
        time_weighted=float(chosen.sum() / oracle.sum() - 1.0),
        interval=interval[0],
        tasks_with_interval=interval[1],
        abstained=float((actions[rows] == ABSTAIN_ACTION).mean()),
        slower_than_default=None if band is None else float((ratio > 1.0 + band).mean()),
        probes=probes,
    )


def _repeated(grid: TaskGrid) -> npt.NDArray[np.bool_]:
    """(T,) whether every measured cell of a task has at least two independent repeats."""
    return np.asarray(((grid.repeats >= 2) | ~grid.mask).all(axis=1))


def _intervals(
    grid: TaskGrid,
    rows: npt.NDArray[np.int64],
    choices: Mapping[str, Actions],
) -> dict[str, tuple[float, float] | None]:
    """Intervals over `rows`, tasks all of whose cells were repeated; None without any."""
    if not len(rows):
        return dict.fromkeys(choices)
    random = np.random.default_rng(0)
    means: dict[str, npt.NDArray[np.float64]] = {n: np.zeros(_RESAMPLES) for n in choices}
    for row in map(int, rows):
        best = int(np.nanargmin(grid.times_us[row]))
        wanted = {best, *(int(actions[row]) for actions in choices.values())}
        medians = {
            action: _resampled_medians(grid.samples[row, action], random) for action in wanted
        }
        for name, actions in choices.items():
            means[name] += medians[int(actions[row])] / medians[best] - 1.0
    low_high = {n: np.quantile(m / len(rows), [0.025, 0.975]) for n, m in means.items()}
    return {name: (float(ends[0]), float(ends[1])) for name, ends in low_high.items()}


def _resampled_medians(
    repeats: npt.NDArray[np.float64], random: np.random.Generator
) -> npt.NDArray[np.float64]:
    drawn = random.integers(0, len(repeats), size=(_RESAMPLES, len(repeats)))
    medians: npt.NDArray[np.float64] = np.median(repeats[drawn], axis=1)
    return medians


def default_verdicts(
    where: str, summaries: Sequence[Summary], learned: Sequence[str], band: float | None
) -> list[str]:
    """Plain words, one line a policy: does it beat NCCL's default beyond the noise?"""
    by_name = {summary.policy: summary for summary in summaries}
    default = by_name["nccl-default"]
    return [f"{where}: {_against_default(n, by_name[n], default, band)}" for n in learned]


def baseline_verdicts(
    where: str, summaries: Sequence[Summary], learned: Sequence[str], band: float | None
) -> list[str]:
    """Plain words: does something simpler beat a policy?"""
    by_name = {summary.policy: summary for summary in summaries}
    lines = []
    for name in learned:
        ours = by_name[name]
        # Not a searcher, which measures the very task, nor the oracle, which knows it.
        others = [s for s in summaries if s.probes == 0.0]
        simple = [s for s in others if s.policy not in {*learned, "nccl-default", "oracle"}]
        better = [s for s in simple if s.mean < ours.mean]
        for other in better:
            word = (
                "beats" if other.mean < ours.mean - (band or 0.0) else "is level with or ahead of"
            )
            lines.append(
                f"{where}: the simple baseline {other.policy} {word} {name}: mean regret "
                f"{other.mean:.2%} against {ours.mean:.2%}."
            )
        if not better:
            lines.append(f"{where}: no simple baseline has a lower mean regret than {name}.")
    return lines


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
