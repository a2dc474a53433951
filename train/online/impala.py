"""IMPALA (Espeholt et al. 2018): actors play, one learner updates, asynchronously.

V-trace corrects for weights that move on while an actor plays. Local actors drop trajectories that
do not fit into the queue, but count their calls. Actors on a Ray cluster have one to play and one
that waits; a node that dies costs those, and Ray starts its actors again.
"""

import os
import pickle
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from typing import Any, Final

import torch

from dynamiccl.errors import MachineError
from dynamiccl.train.online.a3c import (
    ActorCritic,
    ActorProcesses,
    ActorSettings,
    Player,
    Playing,
    SharedRmsProp,
    Trajectory,
    descend,
    filled,
    loss,
)
from dynamiccl.train.recipe import Recipe

_WAITING: Final = 2


class Learner(Playing):
    """Updates of one learner on trajectories of actors."""

    def __init__(self, network: ActorCritic, actors: Any, recipe: Recipe) -> None:
        """`actors.next` waits for a trajectory and the calls played, dropped ones included."""
        self._optimizer = SharedRmsProp(list(network.parameters()))
        super().__init__(network, self._optimizer.squares, actors)
        self._recipe = recipe

    def update(self, step: int) -> dict[str, float]:
        """Wait for a trajectory, and update on it; UserError when an actor died."""
        played, calls = self.actors.next()
        return self.made(self.learn(played, step), played.speedup, calls)

    def learn(self, played: Trajectory, number: int) -> float:
        """Update on one trajectory; its loss."""
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


def local_actors(
    network: ActorCritic, orders: Sequence[ActorSettings], make: Callable[[], ActorCritic]
) -> ActorProcesses:
    """Local processes, which read the learner's weights in shared memory."""
    room = _WAITING * len(orders)
    return ActorProcesses(orders, _play, make, network.share_memory(), room=room)


def _play(
    player: Player,
    put: Callable[[object], None],
    is_orphan: Callable[[], bool],
    own: ActorCritic,
    shared: ActorCritic,
) -> None:
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
    """V-trace (section 4.1): targets of values (T, R), and advantages of actions (T, R).

    `log_ratio_TR` is ln pi(a) / mu(a); rho and c are the ratio, clipped from above.

        v_t = V_t + d_t + gamma c_t (v_(t+1) - V_(t+1)),  d_t = rho_t (r_t + gamma V_(t+1) - V_t)
        advantage = rho_t (r_t + gamma v_(t+1) - V_t)

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


#: Trajectories of an actor that are asked for.
_ASKED: Final = 2
#: Seconds until the run ends, and of one poll.
_PATIENCE_S: Final = 300.0
_PAUSE_S: Final = 1.0
#: Seconds of joining (1 to 2 usually).
_JOIN_S: Final = 30.0
_JOIN: Final = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='error')"


def check_cluster(address: str, join_s: float = _JOIN_S) -> None:
    """Raise MachineError if no head answers.

    A child process tries: a wrong address can block Ray for minutes, or abort it.
    """
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
        f"cannot join the Ray cluster at '{address}': {said}; give HOST:PORT as `ray start --head` "
        "prints it, or auto, on one of its nodes, with the Ray and the Python that they have"
    )


class RayActors:
    """Trajectories from a Ray cluster."""

    def __init__(self, network: ActorCritic, orders: Sequence[ActorSettings], address: str) -> None:
        #   RAY_USAGE_STATS_ENABLED  set to 0 where it is not set: Ray sends nothing.
        #   RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO  set to 0 where it is not set: no notice of Ray's.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self._ray = ray
        check_cluster(address)
        self._network, self._orders, self._address = network, orders, address
        #: Pending request -> its actor; and lost actors, one for each request.
        self._asked: dict[Any, Any] = {}
        self._lost: list[Any] = []
        self._stack = ExitStack()

    def start(self) -> None:
        """Join the cluster and start the actors."""
        # Ray tells of lost workers on stdout, which is for results alone.
        self._stack.enter_context(redirect_stdout(sys.stderr))
        ray = self._ray
        ray.init(self._address, log_to_driver=False, logging_level="error")
        self._stack.callback(ray.shutdown)
        # A lost trajectory is not played again: the weights have moved on.
        make = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=0)(_RayActor)
        network = ray.put(self._network)
        for order in self._orders:
            actor = make.remote(order, network)
            for _ in range(_ASKED):
                self._ask(actor)

    def next(self) -> tuple[Trajectory, int]:
        """Wait for a trajectory; those of lost actors are skipped."""
        deadline, said, gone = time.monotonic() + _PATIENCE_S, "", self._ray.exceptions
        while time.monotonic() < deadline:
            if not self._asked:  # all were lost
                time.sleep(_PAUSE_S)
                self._ask_again()
            done, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=_PAUSE_S)
            if not done:
                continue
            actor = self._asked.pop(done[0])
            try:
                played: Trajectory = pickle.loads(self._ray.get(done[0]))
            except (gone.RayActorError, gone.ObjectLostError) as error:
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
        """Ask lost actors again; fails fast until Ray restarts them."""
        lost, self._lost = self._lost, []
        for actor in lost:
            self._ask(actor)

    def close(self) -> None:
        """Leave the cluster, which stops the actors."""
        self._asked, self._lost = {}, []
        self._stack.close()


class _RayActor:
    def __init__(self, order: ActorSettings, network: ActorCritic) -> None:
        self._own = network
        self._player = order.player(network.state_units)

    def play(self, weights: dict[str, Any]) -> bytes:
        import torch

        # Ray's own memory is read-only, which torch warns of.
        state = {name: torch.tensor(value) for name, value in weights.items()}
        self._own.load_state_dict(state)
        return pickle.dumps(self._player.play(self._own))
