"""IMPALA's actors on an existing Ray cluster, one CPU each.

Every actor has a trajectory to play and one that waits behind it, so that it does not wait for the
learner. A node that dies costs the trajectories that it had: Ray begins its actors anew elsewhere,
or when there is room again, and the others go on.
"""

import os
import pickle
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

from dynamiccl.errors import MachineError
from dynamiccl.train.online.actor_critic import ActorCritic
from dynamiccl.train.online.actors import ActorSettings, Trajectory
from dynamiccl.train.ray_join import RayJoin, ray
from dynamiccl.train.worker import ONE_THREAD

#: Trajectories requested from each actor ahead of time.
_ASKED: Final = 2
#: Seconds without any trajectory after which the run ends, and seconds of one poll.
_PATIENCE_S: Final = 300.0
_PAUSE_S: Final = 1.0


class RayActors:
    """Trajectories from a Ray cluster (`impala.Trajectories`)."""

    def __init__(self, network: ActorCritic, orders: Sequence[ActorSettings], address: str) -> None:
        """Keep the learner's network. Raises UserError and MachineError as `RayJoin`."""
        self._cluster = RayJoin(address)
        self._network, self._orders = network, orders
        #: Pending request -> its actor; and lost actors, one entry for each request.
        self._asked: dict[Any, Any] = {}
        self._lost: list[Any] = []
        self._stack = ExitStack()

    def start(self) -> None:
        """Join the cluster and start the actors."""
        self._stack.enter_context(self._cluster.joined())
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
    """The actor in a Ray worker."""

    def __init__(self, order: ActorSettings, network: ActorCritic) -> None:
        os.environ.update(ONE_THREAD)
        self._own = network
        self._player = order.player(network.state_units)

    def play(self, weights: dict[str, Any]) -> bytes:
        """The next trajectory with these weights, as `pickle` writes it."""
        import torch

        # Ray's own memory is read-only, which torch warns of: a copy.
        state = {name: torch.tensor(value) for name, value in weights.items()}
        self._own.load_state_dict(state)
        return pickle.dumps(self._player.play(self._own))
