"""Runs trials as tasks of an existing Ray cluster, one CPU each.

Ray gives a task whose node was lost to another one, and the trial goes on from its last epoch. A
worker takes one trial and ends, as a process here does, so that nothing of one reaches the next.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynamiccl.errors import DynamicclError
from dynamiccl.train.fanout.backend import TrialResult
from dynamiccl.train.ray_join import RayJoin, ray
from dynamiccl.train.worker import ONE_THREAD

#: How often a trial is given to another worker after its own was lost.
_RETRIES: Final = 3


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A backend on a Ray cluster."""

    cluster: RayJoin
    #: Trials at a time; None: as many as the cluster has processors.
    jobs: int | None = None

    def run(self, run_id: str, numbers: Sequence[int], tracking_uri: str) -> Iterator[TrialResult]:
        """Run trials as tasks; an interrupt ends them, and they can be resumed."""
        with self.cluster.joined():
            yield from self._outcomes(run_id, numbers, tracking_uri)

    def _outcomes(self, run_id: str, numbers: Sequence[int], uri: str) -> Iterator[TrialResult]:
        task = ray.remote(num_cpus=1, max_calls=1, max_retries=_RETRIES)(_run_trial)
        running: dict[Any, int] = {}
        left = list(numbers)
        while left or running:
            while left and (self.jobs is None or len(running) < self.jobs):
                number = left.pop(0)
                running[task.remote(run_id, number, uri)] = number
            over, _ = ray.wait(list(running), num_returns=1)
            for reference in over:
                number = running.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    # Its worker was lost again and again; a trial's own errors are no exceptions.
                    yield TrialResult(number, None, " ".join(str(error).split()))


def _run_trial(run_id: str, number: int, tracking_uri: str) -> TrialResult:
    """The task of a Ray worker."""
    os.environ.update(ONE_THREAD)
    import torch

    from dynamiccl.train.study import run_trial

    torch.set_num_threads(1)
    try:
        return TrialResult(number, run_trial(run_id, number, tracking_uri).validation_regret, "")
    except DynamicclError as error:
        return TrialResult(number, None, str(error))
    except Exception as error:  # stops no other trial, and is told with its number
        return TrialResult(number, None, f"{type(error).__name__}: {error}")
