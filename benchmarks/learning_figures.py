"""What the parts of `learning.py` share: figures with intervals, and work on all cores."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final, Self

import numpy as np
from scipy import stats

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.crossfit import CrossFit, Interval
from dynamiccl.evaluate.policies import Actions

#: By name: the figure, and its interval as NAME_lo and NAME_hi; None where there is none.
Number = float | None
Figures = dict[str, Number]
_NAMES: Final = ("mean_regret", "p95_regret", "ratio_to_default", "share_worse_than_default")


@dataclass(frozen=True, slots=True)
class Draws:
    """One replicate's figures of a policy; regrets and shares are fractions."""

    mean_regret: float
    p95_regret: float
    ratio_to_default: float
    share_worse_than_default: float | None
    tasks: int

    @classmethod
    def of(cls, grid: TaskGrid, rows: Actions, actions: Actions, band: float | None) -> Self:
        """Choices (T,) on some tasks of a grid; worse is slower by more than `band`."""
        regret, ratio = (
            grid.regret(actions)[rows],
            (grid.chosen_us(actions) / grid.default_us)[rows],
        )
        return cls(
            float(regret.mean()),
            float(np.quantile(regret, 0.95)),
            float(np.exp(np.log(ratio).mean())),
            None if band is None else float((ratio > 1.0 + band).mean()),
            len(rows),
        )


def over_replicates(draws: Sequence[Draws]) -> Figures:
    """Means, and Student's 95 % interval; None with a single replicate."""
    figures: Figures = {}
    for name in _NAMES:
        values = [getattr(each, name) for each in draws]
        figures |= student([value for value in values if value is not None], name)
    return figures


def student(values: Sequence[float], name: str = "mean") -> Figures:
    """The mean of some replicates as `name`, and its 95 % interval; None where there is none."""
    if not values:
        return _row(name, None, None)
    mean = float(np.mean(values))
    if len(values) < 2:
        return _row(name, mean, None)
    reach = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return _row(name, mean, (mean - reach, mean + reach))


def of_crossfit(fitted: CrossFit) -> Figures:
    """The bootstrap's figures."""
    parts: tuple[Interval | None, ...] = (
        fitted.regret,
        fitted.p95_regret,
        fitted.ratio_to_default,
        fitted.share_worse,
    )
    figures: Figures = {}
    for name, part in zip(_NAMES, parts, strict=True):
        mean, ends = (None, None) if part is None else (part.mean, (part.low, part.high))
        figures |= _row(name, mean, ends)
    return figures


def _row(name: str, mean: Number, ends: tuple[float, float] | None) -> Figures:
    low, high = ends or (None, None)
    return {name: mean, f"{name}_lo": low, f"{name}_hi": high}


def parallel(
    work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[Any, Any]]:
    """Each job and what `work` made of it, as they come; one thread each, all cores."""
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=get_context("spawn"), initializer=_one_thread
    ) as pool:
        running = {pool.submit(work, *job): job for job in jobs}
        for future in as_completed(running):
            yield running[future], future.result()


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
