"""One actor-learner: plays in its world, and updates the shared weights (Mnih et al. 2016, S3)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from dynamiccl.train.online.actor_critic import ActorCritic, filled, loss, returns
from dynamiccl.train.online.player import Player
from dynamiccl.train.online.rmsprop import SharedRmsProp
from dynamiccl.train.recipe import Recipe


class Counter(Protocol):
    """The number of updates by all actors."""

    def add(self) -> int:
        """Increment, and return the new number."""


@dataclass(frozen=True, slots=True)
class Update:
    """Metrics of one update."""

    #: Number of updates by all actors, this one included.
    number: int
    loss: float
    #: Time of NCCL's own choice over ours, in the trajectory.
    speedup: float
    calls: int


class Actor:
    """Updates the shared weights after each trajectory that it plays."""

    def __init__(
        self,
        player: Player,
        shared: ActorCritic,
        own: ActorCritic,
        optimizer: SharedRmsProp,
        recipe: Recipe,
    ) -> None:
        """`own` is a local network of the same form as `shared`."""
        self.player, self.shared, self.own = player, shared, own
        self.optimizer, self.recipe = optimizer, recipe

    def update(self, counter: Counter) -> Update:
        """Play one trajectory, and update the shared weights without a lock."""
        self.own.load_state_dict(self.shared.state_dict())
        played = self.player.play(self.own)
        log_SRA, value_SR, _ = self.own(played.seen, played.state)
        gamma, known_SR = self.recipe.gamma, value_SR.detach()
        reward_TR = filled(played.reward, known_SR, played.calls, gamma)
        return_TR = returns(reward_TR, known_SR[-1], gamma)
        number = counter.add()
        total = loss(
            log_SRA[:-1],
            value_SR[:-1],
            played.action,
            (return_TR - known_SR[:-1]) * ~played.is_probe,
            return_TR,
            (played.calls > 0).float(),
            played.curiosity * self.recipe.entropy_weight(number),
        )
        descend(total, self.own, self.optimizer, self.recipe, number)
        calls = int(played.calls.sum())
        return Update(number, float(total.detach()), played.speedup, calls)


def descend(
    total: torch.Tensor, network: ActorCritic, optimizer: SharedRmsProp, recipe: Recipe, number: int
) -> None:
    """One gradient step on a loss; the learning rate falls linearly to 0 over the run."""
    gradients = torch.autograd.grad(total, list(network.parameters()), allow_unused=True)
    left = max(1.0 - number / recipe.steps, 0.0)
    optimizer.step(_clipped(gradients), recipe.learning_rate * left)


def _clipped(
    gradients: Iterable[torch.Tensor | None], most: float = 40.0
) -> list[torch.Tensor | None]:
    """Gradients clipped to a norm of `most`, as in IMPALA (Espeholt et al. 2018, appendix D)."""
    found = list(gradients)
    squares = [each.square().sum() for each in found if each is not None]
    norm = float(torch.stack(squares).sum().sqrt())
    factor = min(1.0, most / max(norm, 1e-12))
    return [None if each is None else each * factor for each in found]
