"""The choice of a config by the time of the step: with slack, or by what compute loses to a call.

A channel holds a multiprocessor (one CTA each: NCCL 2.30.7 `enqueue.cc:1756`), so what is fastest
alone need not make the shortest step (Lagom, arXiv 2602.20656). T tasks, A configs, of which the
first is NCCL's own choice. Times are of one call, in us.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.manifest import JobTask
from dynamiccl.drawn_worlds import Floats, Ints

#: Of what compute was measured to lose to NCCL's own choice, what the job's surely does; to another
#: config it may lose all of it (benchmarks/bench_job_time.py, on other sweeps than it judges by).
OWN_LOSES: Final = 0.7
#: Of the compute beside a call, the share that hides it in every iteration.
EARLY: Final = 0.8
#: A call is never let take more than so many times as long.
_MOST_LONGER: Final = 2.0
_HALVINGS: Final = 20


def fewest_within(
    times_us: Floats, channels: npt.NDArray[np.number], slack: float | Floats
) -> Ints:
    """(T,) of the configs within the slack of the fastest, the one with the fewest channels.

    `times_us` (T, A) of calls alone, NaN where a config may not be chosen; `channels` (T, A) that
    ran, never above NCCL's own (2.31 only lowers them). `slack` is a share of the fastest's time,
    (T, 1) where tasks differ: 0 where the GPU waits for the call. ValueError without NCCL's time.
    """
    if np.isnan(times_us[:, 0]).any():
        raise ValueError("NCCL's own choice has no time: measure it, too, or leave the task out")
    lower_us = np.where((channels <= channels[:, :1]) & ~np.isnan(times_us), times_us, np.inf)
    near = lower_us <= lower_us.min(axis=1, keepdims=True) * (1.0 + slack)
    counts = np.where(near, channels, np.inf)
    few_us = np.where(counts == counts.min(axis=1, keepdims=True), lower_us, np.inf)
    chosen: Ints = few_us.argmin(axis=1)
    return chosen


def step_change_us(times_us: Floats, loss: Floats, kernel_us: Floats, compute_us: Floats) -> Floats:
    """(..., T, A) change of the step by each config of a call.

    `times_us` and `loss` (..., T, A), the share of its speed that compute loses while the kernel is
    on the GPU, are measured beside compute. A job's trace tells of NCCL's choice `kernel_us` (T,),
    with waits for other ranks, and `compute_us` (T,), from its start to the end of the compute
    beside it, 0 without any, which its own choice slows already: only differences count.
    """
    kernel, compute = kernel_us[..., None], compute_us[..., None]
    work = compute - np.minimum(kernel, compute) * loss[..., :1]
    lasts = np.maximum(kernel + times_us - times_us[..., :1], 0.0)
    ends = np.minimum(work + lasts * loss, work / (1.0 - loss))
    return np.maximum(lasts, ends) - np.maximum(kernel, compute)


def sure_change_us(times_us: Floats, loss: Floats, kernel_us: Floats, compute_us: Floats) -> Floats:
    """(..., T, A) the most that the step surely changes by; as `step_change_us`, NCCL's own 0.

    `times_us` are what calls surely take at most. The job's compute loses another share than what
    was measured, and does not hide a call as long in every iteration.
    """
    factors = np.ones(loss.shape[-1])
    factors[0] = OWN_LOSES
    most = step_change_us(times_us, factors * loss, kernel_us, EARLY * compute_us)
    most[..., 0] = 0.0
    return most


def change_of_task_us(longer: Floats, loss: Floats, task: JobTask) -> Floats:
    """(A,) `sure_change_us` of a job's mean call that takes `longer` (E, A) times NCCL's own time.

    The most by any of the E kinds of compute whose `loss` (E, A) is known, and for the rank whose
    kernel waits as for the one for which the others wait; NaN where none is known.
    """
    times, compute_us = task.time_us * longer, np.array(task.compute_us)[:, None]
    times[:, 0] = task.time_us
    changes = [
        # Compute goes on so many times as long as a kernel, whatever that waits for.
        sure_change_us(times, loss, np.array(each * task.time_us), each * compute_us).mean(axis=0)
        for each in (1.0, 1.0 + task.skew_us / task.time_us)
    ]
    return np.asarray(np.fmax.reduce(np.concatenate(changes)))


def may_take(loss: Floats, task: JobTask) -> Floats:
    """(A,) times NCCL's own time, up to which the step is surely no longer by a task; from 1 on.

    A bisection, since the change rises with the time.
    """
    low, high = np.ones(loss.shape[1]), np.full(loss.shape[1], _MOST_LONGER)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        ok = change_of_task_us(np.tile(middle, (len(loss), 1)), loss, task) <= 0.0
        low, high = np.where(ok, middle, low), np.where(ok, high, middle)
    low[0] = 1.0
    return low
