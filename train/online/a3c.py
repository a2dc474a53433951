"""Asynchronous advantage actor-critic (Mnih et al. 2016) in the simulated worlds of a recipe.

Each actor-learner is a process with a simulated world of its own; weights and RMSProp's statistics
are in shared memory and updated without locks (Hogwild).

Differences from the paper: an actor plays several jobs at once and learns from all their keys (the
world's overhead for a single call would dominate); pending decisions are an input of the critic;
gradients are clipped.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from dynamiccl.train.online.actor import Actor, Update
from dynamiccl.train.online.actor_critic import ActorCritic
from dynamiccl.train.online.actors import CONTEXT, ActorProcesses, ActorSettings
from dynamiccl.train.online.rmsprop import SharedRmsProp


class _Count:
    """Number of updates of all actors, in shared memory."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def add(self) -> int:
        with self.value.get_lock():
            self.value.value += 1
            return int(self.value.value)


class ActorLearners:
    """The updates of asynchronous actor-learner processes (`loop.Updates`)."""

    def __init__(
        self, network: ActorCritic, orders: Sequence[ActorSettings], make: Callable[[], ActorCritic]
    ) -> None:
        """Keep the shared network; `make` makes the local network of an actor."""
        self.network, self._make = network.share_memory(), make
        self._optimizer = SharedRmsProp(list(network.parameters()))
        self.squares = self._optimizer.squares
        self._count = _Count(CONTEXT.Value("l", 0))
        self._processes = ActorProcesses(orders, _play)

    def start(self, step: int) -> None:
        """Start the processes after `step` updates."""
        self._count.value.value = step
        shared = (self.network, self._optimizer, self._count)
        self._processes.start(self._make, *(lambda each=each: each for each in shared))

    def next(self) -> Update:
        """Wait for an update."""
        return cast(Update, self._processes.get())

    @property
    def metrics(self) -> dict[str, float]:
        """{}: no metrics beside the loop's."""
        return {}

    def close(self) -> None:
        """Stop the processes."""
        self._processes.close()


def _play(  # noqa: PLR0913, PLR0917 - what one process is given
    order: ActorSettings,
    made: Any,
    is_orphan: Callable[[], bool],
    own: ActorCritic,
    shared: ActorCritic,
    optimizer: SharedRmsProp,
    counter: _Count,
) -> None:
    """The main function of an actor-learner process: runs until all updates are made."""
    player = order.player(shared.state_units)
    if not order.recipe.shared_statistic:
        optimizer = SharedRmsProp(optimizer.parameters, shared=False)
    actor = Actor(player, shared, own, optimizer, order.recipe)
    while counter.value.value < order.recipe.steps and not is_orphan():
        made.put(actor.update(counter))
