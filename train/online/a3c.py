"""Asynchronous advantage actor-critic (Mnih et al. 2016) in the simulated worlds of a recipe.

    T rounds, S = T + 1, N jobs, K task keys, R = N x K rows (a row is a task key of a job), B rows
    of any rounds, A actions, H decisions that are seen, W calls in a window, F features, U units
    of a job's state

What is exported is the actor, which sees what a brain shows: window and context. The critic, which
only training asks, sees pending decisions, too, and what the last round earned (Katsikopoulos and
Engelbrecht 2003: a constant delay is none where the state holds what was decided).

Each actor-learner is a process with a world of its own; weights and RMSProp's statistics are in
shared memory and updated without locks (Hogwild). Not as in the paper: an actor plays several jobs
at once and learns from all their keys; gradients are clipped.
"""

import contextlib
import os
import pickle
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import multiprocessing, nn

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.errors import UserError
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import DecisionEnv, Rounds, Tables, Variation
from dynamiccl.train.loop import Source
from dynamiccl.train.networks import Imitator, StatefulTrunk
from dynamiccl.train.recipe import Recipe
from dynamiccl.train.trigger import Detector

_DECISION_UNITS = 8
_CRITIC_UNITS = 64


class Seen(NamedTuple):
    """Observations of T rounds."""

    window: torch.Tensor  # (T, R, W, features)
    context: torch.Tensor  # (T, R, F)
    mask: torch.Tensor  # (T, R, A)
    decided: torch.Tensor  # (T, R, H), -1 = nothing
    #: Below 0, or 0 where the key had no call in the round before.
    earned: torch.Tensor  # (T, R)


class State(NamedTuple):
    """LSTM state of N jobs; U may be 0."""

    h: torch.Tensor  # (N, U)
    c: torch.Tensor  # (N, U)


class ActorCritic(nn.Module):
    """(Seen, State) -> log probabilities, values, State."""

    def __init__(self, actor: Imitator, hidden_size: int, num_actions: int, decisions: int) -> None:
        super().__init__()
        self.actor = actor
        self.decision = nn.Embedding(num_actions + 1, _DECISION_UNITS)
        width = hidden_size + decisions * _DECISION_UNITS + 1
        self.critic = nn.Sequential(
            nn.Linear(width, _CRITIC_UNITS), nn.SiLU(), nn.Linear(_CRITIC_UNITS, 1)
        )
        nn.init.zeros_(cast(nn.Linear, self.critic[2]).bias)

    @property
    def state_units(self) -> int:
        """U."""
        return int(getattr(self.actor.trunk, "units", 0))

    def forward(self, seen: Seen, state: State) -> tuple[torch.Tensor, torch.Tensor, State]:
        """Log probabilities (T, R, A), masked ones far below; values (T, R); new state."""
        rounds = seen.window.size(0)
        flat = Seen(*(part.flatten(0, 1) for part in seen))
        hidden_BH, state = self._features(flat, rounds, state)
        logits_BA = self.actor.logits(hidden_BH, flat.context, flat.mask)
        decided_BD = self.decision(flat.decided + 1).flatten(1)
        known = torch.cat([hidden_BH, decided_BD, flat.earned.unsqueeze(1)], dim=1)
        value_TR = self.critic(known).view(rounds, -1)
        log_TRA = torch.log_softmax(logits_BA, dim=1).view(rounds, value_TR.size(1), -1)
        return log_TRA, value_TR, state

    def _features(self, flat: Seen, rounds: int, state: State) -> tuple[torch.Tensor, State]:
        trunk = self.actor.trunk
        if not isinstance(trunk, StatefulTrunk):
            return trunk(flat.window, flat.context), state
        shape = (rounds, state.h.size(0), -1)
        seen_BH = trunk.trunk(flat.window, flat.context)
        features, *after = trunk.unroll(
            seen_BH.view(rounds, shape[1], -1, seen_BH.size(1)),
            flat.decided[:, -1].view(shape),
            (flat.earned != 0.0).view(shape),
            *state,
        )
        return features.flatten(0, 2), State(*after)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """T rounds, and the observation after them."""

    seen: Seen  # (T + 1, R, ...)
    state: State
    action: torch.Tensor  # (T, R)
    log_probability: torch.Tensor  # (T, R)
    #: Left to NCCL for its news.
    is_probe: torch.Tensor  # (T, R)
    reward: torch.Tensor  # (T, R)
    #: Rows without calls are not trained on.
    calls: torch.Tensor  # (T, R)
    true_us: float
    default_us: float
    curiosity: float

    @property
    def speedup(self) -> float:
        """Time of NCCL's own choice over ours."""
        return self.default_us / self.true_us


class Player:
    """Plays N jobs, one episode after the other."""

    def __init__(
        self, env: DecisionEnv, units: int, recipe: Recipe, seed: int, *, is_greedy: bool = False
    ) -> None:
        self.env, self.recipe, self._units, self._is_greedy = env, recipe, units, is_greedy
        self.random = torch.Generator().manual_seed(seed)
        self._draw_probes = np.random.default_rng(seed)
        # Actors explore differently (section 4): the paper draws epsilons, we factors of entropy.
        self.curiosity = float(np.random.default_rng(seed).uniform(0.5, 2.0))
        self._begin(seed)

    def _begin(self, seed: int | None) -> None:
        jobs = self.env.num_envs
        self.seen = _rows(self.env.reset(seed))
        self.state = State(*torch.zeros(2, jobs, self._units))
        #: (N,) decisions from probe to probe, 0 = none; and those since the last.
        self.probe_every = torch.from_numpy(self._draw_probes.choice(self.recipe.probe_every, jobs))
        self._since_N = torch.zeros(jobs, dtype=torch.int64)

    def play(self, network: ActorCritic) -> Trajectory:
        """Play `num_steps` rounds, or those left in the episode."""
        begin, rows = self.state, [self.seen]
        made: list[tuple[torch.Tensor, ...]] = []
        true_us = default_us = 0.0
        while len(made) < self.recipe.num_steps and not self.env.is_over:
            with torch.no_grad():
                log_TRA, _, self.state = network(self.seen, self.state)
            is_probe_R = self._probe()
            action_R = self._choose(log_TRA[0]).masked_fill(is_probe_R, ABSTAIN_ACTION)
            found, info = self.env.step(action_R.view(self.env.num_envs, -1).numpy())
            self.seen = _rows(found)
            rows.append(self.seen)
            log_R = log_TRA[0].gather(1, action_R.unsqueeze(1)).squeeze(1)
            reward_R = _scaled(_flat(info["earned"]))
            calls_R = _flat(info["calls"])
            made.append((action_R, log_R, is_probe_R, reward_R, calls_R))
            true_us += float(info["true_us"].sum())
            default_us += float(info["default_us"].sum())
        if self.env.is_over:
            self._begin(None)
        seen = Seen(*map(torch.cat, zip(*rows, strict=True)))
        action, log, is_probe, reward, calls = map(torch.stack, zip(*made, strict=True))
        times = true_us, default_us
        return Trajectory(seen, begin, action, log, is_probe, reward, calls, *times, self.curiosity)

    def _probe(self) -> torch.Tensor:
        """(R,) left to NCCL; counts as the policy module's `step`."""
        is_new_NK = (self.seen.earned[0] != 0.0).view(self.env.num_envs, -1)
        found_NK = torch.zeros_like(is_new_NK)
        for key in range(is_new_NK.size(1)):
            is_due_N = (self._since_N + 1 >= self.probe_every) & (self.probe_every > 0)
            found_NK[:, key] = is_due_N
            counted_N = torch.where(is_due_N, 0, self._since_N + 1)
            self._since_N = torch.where(is_new_NK[:, key], counted_N, self._since_N)
        return found_NK.flatten()

    def _choose(self, log_RA: torch.Tensor) -> torch.Tensor:
        if self._is_greedy:
            return log_RA.argmax(dim=1)
        return torch.multinomial(log_RA.exp(), 1, generator=self.random).squeeze(1)


def _scaled(earned_R: torch.Tensor) -> torch.Tensor:
    """Minus ln(time / NCCL's default in quiet): a first use of 20 ms would drown all else."""
    return -torch.log((-earned_R).clamp_min(1e-3)).masked_fill(earned_R == 0.0, 0.0)


def _rows(found: Mapping[str, Any]) -> Seen:
    flat = (torch.from_numpy(found[name]).flatten(0, 1).unsqueeze(0) for name in Seen._fields)
    seen = Seen(*flat)
    return seen._replace(mask=seen.mask.float())


def _flat(part: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(part.astype(np.float32)).flatten()


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """One actor's world, recipe and seed."""

    place: str
    tables: Tables
    world: World
    recipe: Recipe
    seed: int

    def env(self) -> DecisionEnv:
        """The environment of this actor."""
        recipe = self.recipe
        lengths = {name: getattr(recipe, name) for name in ("episode_rounds", "seen_decisions")}
        rounds = Rounds.of(self.world, **lengths)
        watch = None if not recipe.trigger else partial(Detector.load, Path(recipe.trigger))
        variation = Variation(recipe.vary, recipe.vary_times)
        return DecisionEnv(self.world, self.tables, recipe.jobs, rounds, watch, variation)

    def player(self, state_units: int) -> Player:
        """The player in this environment."""
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        return Player(self.env(), state_units, self.recipe, self.seed)


class Playing(Source):
    """Updates of a network by actors that play."""

    def __init__(self, network: ActorCritic, squares: list[torch.Tensor], actors: Any) -> None:
        self.network, self.squares, self.actors = network, squares, actors
        self.members = nn.ModuleList([network.actor])
        #: Calls played, and seconds of earlier parts of the run.
        self._calls, self._before_s = 0, 0.0
        self._began = time.monotonic()

    def start(self, step: int) -> None:  # noqa: ARG002 - they play on as long as they may
        """Start the actors."""
        self.actors.start()

    def close(self) -> None:
        """Stop the actors."""
        self.actors.close()

    @property
    def metrics(self) -> dict[str, float]:
        """Calls played, and seconds, validation included."""
        seconds = self._before_s + time.monotonic() - self._began
        return {"simulated_calls": self._calls, "train_wall_s": seconds}

    def made(self, loss: float, speedup: float, calls: int) -> dict[str, float]:
        """Metrics of an update."""
        self._calls += calls
        return {"loss": loss, "speedup": speedup}

    def state(self) -> dict[str, Any]:
        """Network, statistic and metrics; the actors go on meanwhile."""
        return {"network": self.network.state_dict(), "squares": self.squares, **self.metrics}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the weights; asynchronous actors do not repeat exactly."""
        self.network.load_state_dict(state["network"])
        for own, kept in zip(self.squares, state["squares"], strict=True):
            own.copy_(kept)
        self._calls, self._before_s = state["simulated_calls"], state["train_wall_s"]


_PATIENCE_S: Final = 5.0
CONTEXT: Final = multiprocessing.get_context("spawn")


class ActorProcesses:
    """One process for each order: `play(player, put, is_orphan, own, *shared)`."""

    def __init__(
        self,
        orders: Sequence[ActorSettings],
        play: Callable[..., None],
        make: Callable[[], ActorCritic],
        *shared: Any,
        room: int = 0,
    ) -> None:
        """`make` makes their networks; beyond `room` items (0 = any), `put` raises queue.Full."""
        self._orders, self._play, self._make, self._shared = orders, play, make, shared
        self._made: Any = CONTEXT.Queue(room)
        self._processes: list[Any] = []

    def start(self) -> None:
        """Start all processes."""
        for order in self._orders:
            given = (os.getpid(), order, self._made, self._make(), *self._shared)
            process = CONTEXT.Process(target=_run, args=(self._play, *given), daemon=True)
            process.start()
            self._processes.append(process)

    def next(self) -> Any:
        """The next item of any actor; UserError when one died."""
        while True:
            dead = [p for p in self._processes if not p.is_alive() and p.exitcode]
            if dead:
                place = self._orders[self._processes.index(dead[0])].place
                self.close()
                raise UserError(
                    f"the actor in '{place}' ended with {dead[0].exitcode}; what it said "
                    "stands above, and the run goes on with --resume"
                )
            with contextlib.suppress(queue.Empty):
                return pickle.loads(self._made.get(timeout=_PATIENCE_S))

    def close(self) -> None:
        """Stop them."""
        for process in self._processes:
            process.terminate()
            process.join()
        self._processes = []


def _run(
    play: Callable[..., None],
    parent: int,
    order: ActorSettings,
    made: Any,
    own: ActorCritic,
    *shared: Any,
) -> None:

    def put(item: object) -> None:
        # As bytes: torch would send each tensor as an open file.
        made.put_nowait(pickle.dumps(item))

    play(order.player(own.state_units), put, lambda: os.getppid() != parent, own, *shared)
    made.close()
    made.join_thread()


def filled(
    reward_TR: torch.Tensor, value_SR: torch.Tensor, calls_TR: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Rewards (T, R), where those of keys without calls follow from the values (T + 1, R)."""
    expected_TR = value_SR[:-1] - gamma * value_SR[1:]
    return torch.where(calls_TR > 0, reward_TR, expected_TR)


def returns(reward_TR: torch.Tensor, bootstrap_R: torch.Tensor, gamma: float) -> torch.Tensor:
    """(T, R) R_t = r_t + gamma R_(t+1), from the value after the last (Mnih et al. 2016, S3).

    >>> returns(torch.tensor([[1.0], [2.0]]), torch.tensor([4.0]), 0.5).flatten().tolist()
    [3.0, 4.0]
    """
    found, last = [], bootstrap_R
    for reward_R in reward_TR.flip(0):
        last = reward_R + gamma * last
        found.append(last)
    return torch.stack(found[::-1])


def loss(  # noqa: PLR0913, PLR0917 - what the papers name
    log_TRA: torch.Tensor,
    value_TR: torch.Tensor,
    action_TR: torch.Tensor,
    advantage_TR: torch.Tensor,
    target_TR: torch.Tensor,
    weight_TR: torch.Tensor,
    entropy_weight: float,
) -> torch.Tensor:
    """-log pi(a) A - beta H(pi) + (target - V)^2 / 2, a mean over rows by weight.

    Half of the critic's gradient of Mnih et al. 2016 (4.2, S3): encoder and step are shared.
    """
    of_action_TR = log_TRA.gather(2, action_TR.unsqueeze(2)).squeeze(2)
    entropy_TR = -(log_TRA.exp() * log_TRA.clamp_min(-1e4)).sum(dim=2)
    error_TR = 0.5 * (target_TR - value_TR).square()
    sum_TR = -of_action_TR * advantage_TR - entropy_weight * entropy_TR + error_TR
    return (weight_TR * sum_TR).sum() / weight_TR.sum().clamp_min(1e-6)


_ALPHA: Final = 0.99
#: The common 0.1 would make it plain gradient descent; the paper gives none.
_EPSILON: Final = 1e-5
_MOST_NORM: Final = 40.0


class SharedRmsProp:
    """RMSProp with a statistic shared by all actors, updated without a lock (Mnih et al. 2016).

        g <- alpha g + (1 - alpha) d^2,    theta <- theta - eta d / sqrt(g + epsilon)

    `torch.optim.RMSprop` adds epsilon outside of the root, and keeps one statistic a process.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.squares = [torch.zeros_like(each).share_memory_() for each in self.parameters]  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor | None], rate: float) -> None:
        """One update; parameters without a gradient are unchanged."""
        for parameter, square, gradient in zip(
            self.parameters, self.squares, gradients, strict=True
        ):
            if gradient is not None:
                square.mul_(_ALPHA).addcmul_(gradient, gradient, value=1.0 - _ALPHA)
                parameter.addcdiv_(gradient, (square + _EPSILON).sqrt(), value=-rate)


def descend(
    total: torch.Tensor, network: ActorCritic, optimizer: SharedRmsProp, recipe: Recipe, number: int
) -> None:
    """A gradient step, the rate falling linearly to 0, the norm clipped to 40 as in IMPALA."""
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        total, list(network.parameters()), allow_unused=True
    )
    squares = [each.square().sum() for each in found if each is not None]
    factor = min(1.0, _MOST_NORM / max(float(torch.stack(squares).sum().sqrt()), 1e-12))
    rate = recipe.learning_rate * max(1.0 - number / recipe.steps, 0.0)
    optimizer.step([None if each is None else each * factor for each in found], rate)


def update(
    player: Player,
    shared: ActorCritic,
    own: ActorCritic,
    optimizer: SharedRmsProp,
    count: Callable[[], int],
) -> tuple[float, float, int]:
    """Play a trajectory, and update the shared weights; its loss, speedup and calls."""
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
    """Updates of asynchronous actor-learner processes."""

    def __init__(
        self, network: ActorCritic, orders: Sequence[ActorSettings], make: Callable[[], ActorCritic]
    ) -> None:
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

    def counted() -> int:
        with count.get_lock():
            count.value += 1
            return int(count.value)

    while count.value < player.recipe.steps and not is_orphan():
        put(update(player, shared, own, optimizer, counted))
