"""Asynchronous advantage actor-critic (Mnih et al. 2016) in the simulated worlds of a recipe.

Each actor-learner is a process with a simulated world of its own; weights and RMSProp's statistics
are in shared memory and updated without locks (Hogwild).

Differences from the paper: an actor plays several jobs at once and learns from all their keys (the
world's overhead for a single call would dominate); pending decisions are an input of the critic;
gradients are clipped.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from dynamiccl.train.online.actor_critic import (
    ActorCritic,
    SharedRmsProp,
    descend,
    filled,
    loss,
    returns,
)
from dynamiccl.train.online.actors import (
    CONTEXT,
    ActorProcesses,
    ActorSettings,
    Player,
    Playing,
    Update,
)


def update(
    player: Player,
    shared: ActorCritic,
    own: ActorCritic,
    optimizer: SharedRmsProp,
    count: Callable[[], int],
) -> Update:
    """Play one trajectory, and update the shared weights without a lock (Mnih et al. 2016, S3).

    `own` is a local network of the same form as `shared`; `count` counts the updates of all actors.
    """
    recipe = player.recipe
    own.load_state_dict(shared.state_dict())
    played = player.play(own)
    log_SRA, value_SR, _ = own(played.seen, played.state)
    known_SR = value_SR.detach()
    reward_TR = filled(played.reward, known_SR, played.calls, recipe.gamma)
    return_TR = returns(reward_TR, known_SR[-1], recipe.gamma)
    number = count()
    total = loss(
        log_SRA[:-1],
        value_SR[:-1],
        played.action,
        (return_TR - known_SR[:-1]) * ~played.is_probe,
        return_TR,
        (played.calls > 0).float(),
        played.curiosity * recipe.entropy_weight(number),
    )
    descend(total, own, optimizer, recipe, number)
    return Update(number, float(total.detach()), played.speedup, int(played.calls.sum()))


class ActorLearners(Playing):
    """The updates of asynchronous actor-learner processes."""

    def __init__(
        self, network: ActorCritic, orders: Sequence[ActorSettings], make: Callable[[], ActorCritic]
    ) -> None:
        """Keep the shared network; `make` makes the local network of an actor."""
        self._optimizer = SharedRmsProp(list(network.share_memory().parameters()))
        super().__init__(network, self._optimizer.squares)
        self._make, self._count = make, CONTEXT.Value("l", 0)
        self._processes = ActorProcesses(orders, _play)

    def start(self, step: int) -> None:
        """Start the processes after `step` updates."""
        self._count.value = step
        self._processes.start(self._make, self.network, self._optimizer, self._count)

    def next(self) -> Update:
        """Wait for an update."""
        return cast(Update, self._processes.get())

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
    count: Any,
) -> None:
    """The main function of an actor-learner process: runs until all updates are made."""
    player = order.player(shared.state_units)
    if not order.recipe.shared_statistic:
        optimizer = SharedRmsProp(optimizer.parameters, shared=False)
    while count.value < order.recipe.steps and not is_orphan():
        made.put(update(player, shared, own, optimizer, partial(_counted, count)))


def _counted(count: Any) -> int:
    with count.get_lock():
        count.value += 1
        return int(count.value)
