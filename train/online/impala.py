"""IMPALA (Espeholt et al. 2018): actors play, one learner updates, asynchronously.

An actor copies the weights at the start of a trajectory and plays on while the learner updates
them; V-trace corrects for this difference. A trajectory that does not fit into the queue is
dropped; its calls are counted.
"""

import pickle
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

import torch

from dynamiccl.train.online.actor_critic import ActorCritic, SharedRmsProp, descend, filled, loss
from dynamiccl.train.online.actors import ActorProcesses, ActorSettings, Playing, Trajectory, Update
from dynamiccl.train.recipe import Recipe

#: Queue capacity in trajectories per actor: a longer queue holds more off-policy data.
_WAITING: Final = 2


class Trajectories(Protocol):
    """A source of trajectories."""

    def start(self) -> None:
        """Start the actors."""

    def next(self) -> tuple[Trajectory, int]:
        """Wait for a trajectory; also returns the calls played for it, dropped ones included."""

    def close(self) -> None:
        """Stop the actors."""


class Learner(Playing):
    """The updates of one learner on trajectories of actors."""

    def __init__(self, network: ActorCritic, trajectories: Trajectories, recipe: Recipe) -> None:
        """Keep the network, whose weights the actors use."""
        self._optimizer = SharedRmsProp(list(network.parameters()), shared=False)
        super().__init__(network, self._optimizer.squares)
        self._trajectories, self._recipe = trajectories, recipe
        self._step = 0
        #: Seconds of all updates, and the part not spent waiting for trajectories.
        self.wall_s = self.busy_s = 0.0

    def start(self, step: int) -> None:
        """Start the actors."""
        self._step = step
        self._trajectories.start()

    def next(self) -> Update:
        """Wait for a trajectory, and update on it."""
        began = time.monotonic()
        played, calls = self._trajectories.next()
        ready = time.monotonic()
        self._step += 1
        found = self.learn(played, self._step)
        self.busy_s += time.monotonic() - ready
        self.wall_s += time.monotonic() - began
        return Update(self._step, found, played.speedup, calls)

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

    def close(self) -> None:
        """Stop the actors."""
        self._trajectories.close()


class LocalActors:
    """Actors as local processes, which read the learner's weights in shared memory."""

    def __init__(
        self, network: ActorCritic, orders: Sequence[ActorSettings], make: Callable[[], ActorCritic]
    ) -> None:
        """Start no process yet; `make` makes the network of an actor."""
        self._shared, self._make = network.share_memory(), make
        self._processes = ActorProcesses(orders, _play, room=_WAITING * len(orders))

    def start(self) -> None:
        """Start the processes."""
        self._processes.start(self._make, self._shared)

    def next(self) -> tuple[Trajectory, int]:
        """Wait for a trajectory."""
        plain, calls = self._processes.get()
        return cast(Trajectory, pickle.loads(plain)), calls

    def close(self) -> None:
        """Stop the processes."""
        self._processes.close()


def _play(
    order: ActorSettings,
    made: Any,
    is_orphan: Callable[[], bool],
    own: ActorCritic,
    shared: ActorCritic,
) -> None:
    """The main function of an actor process."""
    player = order.player(shared.state_units)
    calls = 0
    while not is_orphan():
        own.load_state_dict(shared.state_dict())
        played = player.play(own)
        calls += int(played.calls.sum())
        try:
            # As bytes: torch would send each tensor as an open file.
            made.put_nowait((pickle.dumps(played), calls))
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
