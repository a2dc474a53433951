"""Helpers of the parts of `learning.py`: figures with intervals, parallel work."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import numpy as np

from dynamiccl.train.study import student_interval

#: By name: the figure, and its interval as NAME_lo and NAME_hi; None where there is none.
Number = float | None
Figures = dict[str, Number]


def student(values: Sequence[float], name: str = "mean") -> Figures:
    """The mean of some replicates as `name`, and its 95 % interval; None where there is none."""
    low, high = student_interval(values)
    mean = float(np.mean(values)) if values else None
    return {name: mean, f"{name}_lo": low, f"{name}_hi": high}


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
