"""False alarm rate of a detector on quiet streams (delays: train/trigger/calibration.py)."""

from dataclasses import dataclass

import numpy as np

from dynamiccl.train.trigger.calibration import Watch
from dynamiccl.train.trigger.series import FloatArray


@dataclass(frozen=True, slots=True)
class FalseAlarms:
    """Alarms on quiet calls."""

    calls: int
    onsets: int
    #: Calls during an alarm: how long false ones last.
    alarmed: int


def count_false_alarms(watch: Watch, log_time: FloatArray, known: int) -> FalseAlarms:
    """Alarms on quiet streams (T, N), of which the first `known` calls are not judged."""
    was = np.zeros(log_time.shape[1], dtype=np.bool_)
    onsets = alarmed = 0
    for number, times in enumerate(log_time):
        now = watch(times)
        if number >= known:
            onsets += int((now & ~was).sum())
            alarmed += int(now.sum())
        was = now
    return FalseAlarms(log_time[known:].size, onsets, alarmed)
