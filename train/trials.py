"""Trials of a study as processes of this machine, a thread each."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

#: Two threads on a busy core spin against each other: trials side by side take one each.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial's process came to."""

    number: int
    #: Its mean regret on the validation bins; None when it failed.
    validation_regret: float | None
    #: What it said last, when it failed.
    error: str


def trial_command(run_id: str, number: int, tracking_uri: str) -> list[str]:
    """The command line of a trial."""
    command = [sys.executable, "-P", "-m", "dynamiccl.train.cli", "trial", run_id, str(number)]
    return [*command, "--tracking-uri", tracking_uri, "--json"]


def run_trials(
    run_id: str, numbers: Iterable[int], tracking_uri: str, *, jobs: int
) -> Iterator[Outcome]:
    """Run trials, `jobs` at a time; outcomes as they come. A trial that fails stops no other."""
    processes: dict[int, subprocess.Popen[str]] = {}

    def run(number: int) -> Outcome:
        process = subprocess.Popen(
            trial_command(run_id, number, tracking_uri),
            env=os.environ | _ONE_THREAD,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes[number] = process
        out, error = process.communicate()
        if process.returncode == 0:
            return Outcome(number, float(json.loads(out)["validation_regret"]), "")
        return Outcome(number, None, _reason(error) or f"ended with {process.returncode}")

    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield from _as_completed(pool, run, numbers, jobs)
        except BaseException:
            # Interrupted: the trials keep their state, and can be gone on with.
            for process in processes.values():
                process.terminate()
            raise


def _reason(said: str) -> str:
    """Our own error, or else the last line that begins at the margin."""
    lines = [line for line in said.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("error: ")]
    flush = [line for line in lines if not line[0].isspace()]
    return (ours or flush or [""])[-1].removeprefix("error: ")


def _as_completed(
    pool: ThreadPoolExecutor, run: Callable[[int], Outcome], numbers: Iterable[int], jobs: int
) -> Iterator[Outcome]:
    """No more than `jobs` are begun before one is over, so that an interrupt leaves no queue."""
    running: set[Future[Outcome]] = set()
    for number in numbers:
        running.add(pool.submit(run, number))
        if len(running) == jobs:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)
