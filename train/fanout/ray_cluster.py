"""Trials of a study as tasks of a Ray cluster that is there already, one processor each.

Ray gives a task whose node was lost to another one, and the trial goes on from its last epoch. A
worker takes one trial and ends, as a process here does, so that nothing of one reaches the next.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Final

from dynamiccl.errors import DynamicclError, MachineError, UserError
from dynamiccl.train.fanout.backend import ONE_THREAD, Outcome, reason

# Nothing is sent anywhere, and no notice of a future release is printed; read at Ray's import.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray

#: Where Ray itself looks for a cluster: RAY_ADDRESS, then one that was started on this machine.
AUTO: Final = "auto"
#: How often a trial is given to another worker after its own was lost.
_RETRIES: Final = 3
#: Seconds in which a head that is there takes a connection.
_ANSWER_S: Final = 10.0
_JOIN: Final = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='error')"


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A Ray cluster, joined from one of its own nodes."""

    #: HOST:PORT of its head, or `auto`.
    address: str
    #: Trials at a time; None: as many as the cluster has processors.
    jobs: int | None = None
    #: Seconds in which a cluster that is there is joined; a second or two is usual.
    join_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise UserError for what is no address, MachineError when nobody answers there."""
        if self.address != AUTO:
            self._knock()
        self._try_to_join()

    def run(self, run_id: str, numbers: Sequence[int], tracking_uri: str) -> Iterator[Outcome]:
        """Run trials as tasks; interrupted, Ray ends them, and they can be gone on with."""
        # Ray tells of lost workers on stdout, which is for results alone.
        with redirect_stdout(sys.stderr):
            ray.init(self.address, log_to_driver=False, logging_level="error")
            try:
                yield from self._outcomes(run_id, numbers, tracking_uri)
            finally:
                ray.shutdown()

    def _knock(self) -> None:
        host, separator, port = self.address.rpartition(":")
        if not separator or not port.isdigit() or "/" in host:
            raise UserError(
                f"--ray {self.address} is no address of a head; write HOST:PORT as `ray start "
                f"--head` prints it, or {AUTO}, on a node of the cluster"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        except (OSError, OverflowError) as error:
            raise MachineError(
                f"no Ray cluster answers at {self.address}: {error}; start one with `ray start "
                "--head` and give the address that it prints"
            ) from error

    def _try_to_join(self) -> None:
        """By a process: what is no head can keep Ray waiting for minutes, or end it by SIGABRT."""
        try:
            subprocess.run(
                [sys.executable, "-P", "-c", _JOIN, self.address],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self.join_s,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            said = f"no end after {self.join_s:g} s; is that a head's port?"
            raise self._refused(said) from error
        except subprocess.CalledProcessError as error:
            raise self._refused(reason(error.stderr) or f"ended with {error.returncode}") from error

    def _refused(self, said: str) -> MachineError:
        return MachineError(
            f"cannot join the Ray cluster at '{self.address}': {said}; run this command on one of "
            "its nodes, with the Ray and the Python that they have"
        )

    def _outcomes(self, run_id: str, numbers: Sequence[int], uri: str) -> Iterator[Outcome]:
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
                    yield Outcome(number, None, " ".join(str(error).split()))


def _run_trial(run_id: str, number: int, tracking_uri: str) -> Outcome:
    """What a worker does."""
    os.environ.update(ONE_THREAD)
    import torch

    from dynamiccl.train.study import run_trial

    torch.set_num_threads(1)
    try:
        return Outcome(number, run_trial(run_id, number, tracking_uri).validation_regret, "")
    except DynamicclError as error:
        return Outcome(number, None, str(error))
    except Exception as error:  # stops no other trial, and is told with its number
        return Outcome(number, None, f"{type(error).__name__}: {error}")
