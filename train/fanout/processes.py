"""Runs trials as processes of this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from dynamiccl.train.fanout.backend import TrialResult, trial_arguments
from dynamiccl.train.worker import ONE_THREAD, reason


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of this machine."""

    #: Trials at a time.
    jobs: int

    def run(self, run_id: str, numbers: Sequence[int], tracking_uri: str) -> Iterator[TrialResult]:
        """Run trials, `jobs` at a time; an interrupt ends them, and they can be resumed."""
        processes: dict[int, subprocess.Popen[str]] = {}

        def run_one(number: int) -> TrialResult:
            process = subprocess.Popen(
                [sys.executable, *trial_arguments(run_id, str(number), tracking_uri)],
                env=os.environ | ONE_THREAD,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes[number] = process
            out, error = process.communicate()
            if process.returncode == 0:
                return TrialResult(number, float(json.loads(out)["validation_regret"]), "")
            return TrialResult(number, None, reason(error) or f"ended with {process.returncode}")

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                yield from _as_completed(pool, run_one, numbers, self.jobs)
            except BaseException:
                for process in processes.values():
                    process.terminate()
                raise


def _as_completed(
    pool: ThreadPoolExecutor, run: Callable[[int], TrialResult], numbers: Sequence[int], jobs: int
) -> Iterator[TrialResult]:
    """Outcomes as they come; at most `jobs` trials run, and none is queued."""
    running: set[Future[TrialResult]] = set()
    for number in numbers:
        running.add(pool.submit(run, number))
        if len(running) == jobs:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)
