"""Helpers of the parts of `learning.py`: figures with intervals, parallel work."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, Final

import numpy as np

from dynamiccl.evaluate.metrics import CrossFit, Interval
from dynamiccl.train.study import student_interval

#: By name: the figure, and its interval as NAME_lo and NAME_hi; None where there is none.
Number = float | None
Figures = dict[str, Number]
#: The figures, and what a summary calls them.
_NAMES: Final = {
    "mean_regret": "mean",
    "p95_regret": "p95",
    "ratio_to_default": "ratio_to_default",
    "share_worse_than_default": "slower_than_default",
}


def over_replicates(summaries: Sequence[Mapping[str, Any]]) -> Figures:
    """Means of one policy's summaries, and Student's 95 % interval."""
    figures: Figures = {}
    for name, field in _NAMES.items():
        values = [each[field] for each in summaries]
        figures |= student([value for value in values if value is not None], name)
    return figures


def student(values: Sequence[float], name: str = "mean") -> Figures:
    """The mean of some replicates as `name`, and its 95 % interval; None where there is none."""
    return _row(name, float(np.mean(values)) if values else None, student_interval(values))


def of_crossfit(fitted: CrossFit) -> Figures:
    """Figures of a cross-fitted bootstrap."""
    parts: tuple[Interval | None, ...] = (
        fitted.regret,
        fitted.p95_regret,
        fitted.ratio_to_default,
        fitted.share_worse,
    )
    figures: Figures = {}
    for name, part in zip(_NAMES, parts, strict=True):
        ends = (None, None) if part is None else (part.low, part.high)
        figures |= _row(name, None if part is None else part.mean, ends)
    return figures


def _row(name: str, mean: Number, ends: tuple[Number, Number]) -> Figures:
    return {name: mean, f"{name}_lo": ends[0], f"{name}_hi": ends[1]}


def parallel(
    work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[Any, Any]]:
    """Each job with its result, as they come; one thread each, on all cores."""
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=get_context("spawn"), initializer=_one_thread
    ) as pool:
        running = {pool.submit(work, *job): job for job in jobs}
        for future in as_completed(running):
            yield running[future], future.result()


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
