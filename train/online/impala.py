"""IMPALA (Espeholt et al. 2018): actors play, one learner updates, asynchronously.

An actor copies the weights at the start of a trajectory and plays on while the learner updates
them; V-trace corrects for this difference. A trajectory that does not fit into the queue is
dropped; its calls are counted.
"""

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from dynamiccl.train.online.actor_critic import ActorCritic, SharedRmsProp, descend, filled, loss
from dynamiccl.train.online.actors import (
    ActorProcesses,
    ActorSettings,
    Player,
    Playing,
    Trajectory,
)
from dynamiccl.train.recipe import Recipe

#: Queue capacity in trajectories per actor: a longer queue holds more off-policy data.
_WAITING: Final = 2


class Learner(Playing):
    """The updates of one learner on trajectories of actors."""

    def __init__(self, network: ActorCritic, actors: Any, recipe: Recipe) -> None:
        """Keep the network, whose weights the actors use.

        `actors` have `start`, `close` and `next`, which waits for a trajectory and also tells the
        calls played for it, dropped ones included: processes here, or a Ray cluster's.
        """
        self._optimizer = SharedRmsProp(list(network.parameters()), shared=False)
        super().__init__(network, self._optimizer.squares, actors)
        self._recipe = recipe
        #: Seconds of all updates, and the part not spent waiting for trajectories.
        self.wall_s = self.busy_s = 0.0

    def update(self, step: int) -> dict[str, float]:
        """Wait for a trajectory, and update on it; raises UserError when an actor died."""
        began = time.monotonic()
        played, calls = self.actors.next()
        ready = time.monotonic()
        found = self.learn(played, step)
        self.busy_s += time.monotonic() - ready
        self.wall_s += time.monotonic() - began
        return self.made(found, played.speedup, calls)

    def learn(self, played: Trajectory, number: int) -> float:
        """One update on one trajectory; returns its loss."""
        recipe = self._recipe
        log_SRA, value_SR, _ = self.network(played.seen, played.state)
        known_SR = value_SR.detach()
        now_TR = log_SRA[:-1].detach().gather(2, played.action.unsqueeze(2)).squeeze(2)
        is_called_TR = played.calls > 0
        target_TR, advantage_TR = vtrace(
            (now_TR - played.log_probability) * (is_called_TR & ~played.is_probe),
            filled(played.reward, known_SR, played.calls, recipe.gamma),
            known_SR,
            recipe.gamma,
            rho_most=recipe.rho_most,
            c_most=recipe.c_most,
        )
        total = loss(
            log_SRA[:-1],
            value_SR[:-1],
            played.action,
            advantage_TR * ~played.is_probe,
            target_TR,
            is_called_TR.float(),
            played.curiosity * recipe.entropy_weight(number),
        )
        descend(total, self.network, self._optimizer, recipe, number)
        return float(total.detach())

    @property
    def metrics(self) -> dict[str, float]:
        """Also the fraction of time that the learner computes."""
        return super().metrics | {"learner_utilisation": self.busy_s / max(self.wall_s, 1e-9)}


def local_actors(
    network: ActorCritic, orders: Sequence[ActorSettings], make: Callable[[], ActorCritic]
) -> ActorProcesses:
    """Actors as local processes, which read the learner's weights in shared memory.

    `make` makes the network of an actor.
    """
    room = _WAITING * len(orders)
    return ActorProcesses(orders, _play, make, network.share_memory(), room=room)


def _play(
    player: Player,
    put: Callable[[object], None],
    is_orphan: Callable[[], bool],
    own: ActorCritic,
    shared: ActorCritic,
) -> None:
    """An actor process."""
    calls = 0
    while not is_orphan():
        own.load_state_dict(shared.state_dict())
        played = player.play(own)
        calls += int(played.calls.sum())
        try:
            put((played, calls))
        except queue.Full:
            continue
        calls = 0


def vtrace(
    log_ratio_TR: torch.Tensor,
    reward_TR: torch.Tensor,
    value_SR: torch.Tensor,
    gamma: float,
    *,
    rho_most: float,
    c_most: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace: off-policy corrected targets (section 4.1) of values, and advantages of actions.

    Both are (T, R).

    `log_ratio_TR` is ln pi(a) / mu(a) of the actions that were taken, `value_SR` (T + 1, R) has the
    value after the last.

        v_t = V_t + d_t + gamma c_t (v_(t+1) - V_(t+1)),  d_t = rho_t (r_t + gamma V_(t+1) - V_t)
        advantage = rho_t (r_t + gamma v_(t+1) - V_t)

    rho and c are the ratio, clipped from above. On policy v_t is the n-step return.

    >>> off = vtrace(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]]),
    ...              torch.tensor([[0.0], [0.0], [4.0]]), 0.5, rho_most=1.0, c_most=1.0)
    >>> off[0].flatten().tolist()
    [3.0, 4.0]
    """
    ratio_TR = log_ratio_TR.exp()
    rho_TR, c_TR = ratio_TR.clamp(max=rho_most), ratio_TR.clamp(max=c_most)
    delta_TR = rho_TR * (reward_TR + gamma * value_SR[1:] - value_SR[:-1])
    off_R = torch.zeros_like(value_SR[0])
    target = []
    for step in reversed(range(len(delta_TR))):
        off_R = delta_TR[step] + gamma * c_TR[step] * off_R
        target.append(value_SR[step] + off_R)
    target_TR = torch.stack(target[::-1])
    after_TR = torch.cat([target_TR[1:], value_SR[-1:]])
    return target_TR, rho_TR * (reward_TR + gamma * after_TR - value_SR[:-1])
