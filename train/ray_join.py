"""Joins an existing Ray cluster from one of its own nodes."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Final

from dynamiccl.errors import MachineError, UserError
from dynamiccl.train.worker import reason

# Nothing is sent anywhere, and no notice of a future release is printed; read at Ray's import.
#   RAY_USAGE_STATS_ENABLED  set to 0 where it is not set: Ray sends nothing.
#   RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO  set to 0 where it is not set: no notice of Ray's.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray

__all__ = ["RayJoin", "ray"]

#: Where Ray itself looks for a cluster: RAY_ADDRESS, then one that was started on this machine.
AUTO: Final = "auto"
#: Seconds in which a head that is there takes a connection.
_ANSWER_S: Final = 10.0
_JOIN: Final = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='error')"


@dataclass(frozen=True, slots=True)
class RayJoin:
    """A reachable Ray cluster."""

    #: HOST:PORT of its head, or `auto`.
    address: str
    #: Seconds in which a cluster that is there is joined; a second or two is usual.
    join_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise UserError for an invalid address, MachineError if nothing answers there."""
        if self.address != AUTO:
            self._knock()
        self._try_to_join()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Context manager: connected to the cluster."""
        # Ray tells of lost workers on stdout, which is for results alone.
        with redirect_stdout(sys.stderr):
            ray.init(self.address, log_to_driver=False, logging_level="error")
            try:
                yield
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
        """Try in a child process: a wrong address can block Ray for minutes, or abort it."""
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
