"""The choice of a config by the time of the step: with slack, or by what compute loses to a call.

A channel holds a multiprocessor (one CTA each: NCCL 2.30.7 `enqueue.cc:1756`), so what is fastest
alone need not make the shortest step (Lagom, arXiv 2602.20656). T tasks, A configs, of which the
first is NCCL's own choice. Times are of one call, in us.
"""

import numpy as np
import numpy.typing as npt

from dynamiccl.drawn_worlds import Floats, Ints


def fewest_within(
    times_us: Floats, channels: npt.NDArray[np.integer], slack: float | Floats
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


def least_change(change_us: Floats, caution: float = 1.0) -> Ints:
    """(T,) the config with the least mean + caution x spread over draws of its change (D, T, A).

    NaN: may not be chosen. NCCL's own is 0, so gains must exceed `caution` times their spread.
    """
    worth = change_us.mean(axis=0) + caution * change_us.std(axis=0)
    chosen: Ints = np.where(np.isnan(worth), np.inf, worth).argmin(axis=1)
    return chosen
