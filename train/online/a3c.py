"""Asynchronous advantage actor-critic (Mnih et al. 2016) in the simulated worlds of a recipe.

Each actor-learner is a process with a simulated world of its own; weights and RMSProp's statistics
are in shared memory and updated without locks (Hogwild).

Differences from the paper: an actor plays several jobs at once and learns from all their keys (the
world's overhead for a single call would dominate); pending decisions are an input of the critic;
gradients are clipped.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dynamiccl.train.online.actor_critic import (
    ActorCritic,
    SharedRmsProp,
    descend,
    filled,
    loss,
    returns,
)
from dynamiccl.train.online.actors import CONTEXT, ActorProcesses, ActorSettings, Player, Playing


def update(
    player: Player,
    shared: ActorCritic,
    own: ActorCritic,
    optimizer: SharedRmsProp,
    count: Callable[[], int],
) -> tuple[float, float, int]:
    """Play one trajectory, and update the shared weights without a lock (Mnih et al. 2016, S3).

    `own` is a local network of the same form as `shared`; `count` counts the updates of all actors.
    Returns the loss, the speedup over NCCL's own choice, and the calls that were played.
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
    return float(total.detach()), played.speedup, int(played.calls.sum())


class ActorLearners(Playing):
    """The updates of asynchronous actor-learner processes."""

    def __init__(
        self, network: ActorCritic, orders: Sequence[ActorSettings], make: Callable[[], ActorCritic]
    ) -> None:
        """Keep the shared network; `make` makes the local network of an actor."""
        optimizer = SharedRmsProp(list(network.share_memory().parameters()))
        self._count = CONTEXT.Value("l", 0)
        actors = ActorProcesses(orders, _play, make, network, optimizer, self._count)
        super().__init__(network, optimizer.squares, actors)

    def start(self, step: int) -> None:
        """Start the processes after `step` updates."""
        self._count.value = step
        super().start(step)

    def update(self, step: int) -> dict[str, float]:  # noqa: ARG002 - actors count themselves
        """Wait for an update; raises UserError when an actor died."""
        return self.made(*self.actors.next())


def _play(  # noqa: PLR0913, PLR0917 - what one process is given
    player: Player,
    put: Callable[[object], None],
    is_orphan: Callable[[], bool],
    own: ActorCritic,
    shared: ActorCritic,
    optimizer: SharedRmsProp,
    count: Any,
) -> None:
    """An actor-learner process: runs until all updates are made."""

    def counted() -> int:
        with count.get_lock():
            count.value += 1
            return int(count.value)

    if not player.recipe.shared_statistic:
        optimizer = SharedRmsProp(optimizer.parameters, shared=False)
    while count.value < player.recipe.steps and not is_orphan():
        put(update(player, shared, own, optimizer, counted))
