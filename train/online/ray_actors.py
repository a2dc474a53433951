"""IMPALA's actors on an existing Ray cluster, one CPU each.

Every actor has a trajectory to play and one that waits behind it, so that it does not wait for the
learner. A node that dies costs the trajectories that it had: Ray begins its actors anew elsewhere,
or when there is room again, and the others go on.
"""

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from typing import Any, Final

from dynamiccl.errors import MachineError, UserError
from dynamiccl.train.online.actor_critic import ActorCritic
from dynamiccl.train.online.actors import ActorSettings, Trajectory

# Nothing is sent anywhere, and no notice of a future release is printed; read at Ray's import.
#   RAY_USAGE_STATS_ENABLED  set to 0 where it is not set: Ray sends nothing.
#   RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO  set to 0 where it is not set: no notice of Ray's.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray

#: Trajectories requested from each actor ahead of time.
_ASKED: Final = 2
#: Seconds without any trajectory after which the run ends, and seconds of one poll.
_PATIENCE_S: Final = 300.0
_PAUSE_S: Final = 1.0
#: Where Ray itself looks for a cluster: RAY_ADDRESS, then one that was started on this machine.
AUTO: Final = "auto"
#: Seconds in which a head that is there takes a connection, and in which its cluster is joined (a
#: second or two is usual).
_ANSWER_S: Final = 10.0
_JOIN_S: Final = 30.0
_JOIN: Final = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='error')"


def check_cluster(address: str, join_s: float = _JOIN_S) -> None:
    """Raise UserError for an invalid address of a head, MachineError if nothing answers there.

    It is tried in a child process: a wrong address can block Ray for minutes, or abort it.
    """
    if address != AUTO:
        _knock(address)
    command = [sys.executable, "-P", "-c", _JOIN, address]
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=join_s, check=False, **given)
        if done.returncode == 0:
            return
        margin = [line for line in done.stderr.splitlines() if line and not line[0].isspace()]
        said = margin[-1] if margin else f"ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        said = f"no end after {join_s:g} s; is that a head's port?"
    raise MachineError(
        f"cannot join the Ray cluster at '{address}': {said}; run this command on one of its "
        "nodes, with the Ray and the Python that they have"
    )


def _knock(address: str) -> None:
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or "/" in host:
        raise UserError(
            f"--ray {address} is no address of a head; write HOST:PORT as `ray start --head` "
            f"prints it, or {AUTO}, on a node of the cluster"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise MachineError(
            f"no Ray cluster answers at {address}: {error}; start one with `ray start --head` and "
            "give the address that it prints"
        ) from error


class RayActors:
    """Trajectories from a Ray cluster (`impala.Learner`)."""

    def __init__(self, network: ActorCritic, orders: Sequence[ActorSettings], address: str) -> None:
        """Keep the learner's network. Raises UserError and MachineError as `check_cluster`."""
        check_cluster(address)
        self._network, self._orders, self._address = network, orders, address
        #: Pending request -> its actor; and lost actors, one entry for each request.
        self._asked: dict[Any, Any] = {}
        self._lost: list[Any] = []
        self._stack = ExitStack()

    def start(self) -> None:
        """Join the cluster and start the actors."""
        # Ray tells of lost workers on stdout, which is for results alone.
        self._stack.enter_context(redirect_stdout(sys.stderr))
        ray.init(self._address, log_to_driver=False, logging_level="error")
        self._stack.callback(ray.shutdown)
        # A trajectory that was lost is not played again: the weights have moved on.
        make = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=0)(_RayActor)
        network = ray.put(self._network)
        for order in self._orders:
            actor = make.remote(order, network)
            for _ in range(_ASKED):
                self._ask(actor)

    def next(self) -> tuple[Trajectory, int]:
        """Wait for a trajectory; those of lost actors are skipped."""
        deadline, said = time.monotonic() + _PATIENCE_S, ""
        while time.monotonic() < deadline:
            if not self._asked:  # all were lost
                time.sleep(_PAUSE_S)
                self._ask_again()
            done, _ = ray.wait(list(self._asked), num_returns=1, timeout=_PAUSE_S)
            if not done:
                continue
            actor = self._asked.pop(done[0])
            try:
                played: Trajectory = pickle.loads(ray.get(done[0]))
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
                said = f" ({' '.join(str(error).split())})"
                self._lost.append(actor)
                continue
            self._ask(actor)
            self._ask_again()
            return played, int(played.calls.sum())
        raise MachineError(
            f"no actor on the Ray cluster has played for {_PATIENCE_S:.0f} s{said}; `ray status` "
            "says which nodes are left, and the run goes on with --resume"
        )

    def _ask(self, actor: Any) -> None:
        weights = {k: v.numpy().copy() for k, v in self._network.state_dict().items()}
        self._asked[actor.play.remote(weights)] = actor

    def _ask_again(self) -> None:
        """Request trajectories from lost actors again; fails fast until Ray restarts them."""
        lost, self._lost = self._lost, []
        for actor in lost:
            self._ask(actor)

    def close(self) -> None:
        """Leave the cluster, which stops the actors."""
        self._asked, self._lost = {}, []
        self._stack.close()


class _RayActor:
    """The actor in a Ray worker, in which Ray leaves it one thread."""

    def __init__(self, order: ActorSettings, network: ActorCritic) -> None:
        self._own = network
        self._player = order.player(network.state_units)

    def play(self, weights: dict[str, Any]) -> bytes:
        """The next trajectory with these weights, as `pickle` writes it."""
        import torch

        # Ray's own memory is read-only, which torch warns of: a copy.
        state = {name: torch.tensor(value) for name, value in weights.items()}
        self._own.load_state_dict(state)
        return pickle.dumps(self._player.play(self._own))
