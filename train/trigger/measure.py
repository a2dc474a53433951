"""Detection delays of a detector on streams with a known onset.

A detector is a function from the log times (N,) of one call of each of N streams to whether each is
alarmed then (N,); so the Trigger and its rivals are measured alike.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dynamiccl.train.trigger.series import FloatArray

#: Log times (N,) to alarms (N,), with a state of its own.
Watch = Callable[[FloatArray], npt.NDArray[np.bool_]]


def watch_with(module: Any, width: int) -> Watch:
    """A Trigger over `width` new streams; alarms of both directions count."""
    state = [module.new_state(width)]
    sizes = torch.zeros(width)

    def watch(log_time: FloatArray) -> npt.NDArray[np.bool_]:
        with torch.inference_mode():
            state[0], alarm, _ = module(state[0], torch.from_numpy(log_time), sizes)
        alarms: npt.NDArray[np.bool_] = alarm.numpy() != 0
        return alarms

    return watch


def delays(watch: Watch, log_time: FloatArray, onset: int) -> FloatArray:
    """Calls from the onset (the first slow call is 1) to the alarm; infinite where none came.

    Of streams (T, N) that are slow from call `onset` on; those that were alarmed before are left
    out.
    """
    found = np.full(log_time.shape[1], np.inf, dtype=np.float32)
    before = np.zeros(log_time.shape[1], dtype=np.bool_)
    for number, times in enumerate(log_time):
        now = watch(times)
        if number < onset:
            before = now
        else:
            found[now & np.isinf(found)] = number - onset + 1
            if not np.isinf(found[~before]).any():
                break
    return found[~before]
