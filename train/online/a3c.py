"""Asynchronous advantage actor-critic (Mnih et al. 2016) in the simulated worlds of a recipe.

Each actor-learner is a process with a place of its own; the weights and RMSProp's statistic lie in
shared memory and are stepped without locks (Hogwild). This process counts, averages the weights, as
other recipes do, looks at the validation bins, and keeps what a kill would lose.

Not as in the paper: an actor plays several jobs at once and learns from all their keys (one call at
a time, the world would take most of the time); the state's decisions are part of what the critic
sees; gradients are clipped.
"""

import os
import queue
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import multiprocessing, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dynamiccl.errors import UserError
from dynamiccl.simulator.world import World
from dynamiccl.train.action_head import ActionInputs
from dynamiccl.train.algorithms import set_scaling
from dynamiccl.train.data import TrainingData
from dynamiccl.train.encoders import ObservationEncoderFactory
from dynamiccl.train.environment import Tables
from dynamiccl.train.heads import Imitator, Member
from dynamiccl.train.loop import STATE_VERSION, Checkpoint, write_state
from dynamiccl.train.online.actor import Actor, Update
from dynamiccl.train.online.actor_critic import ActorCritic
from dynamiccl.train.online.decisions import DecisionEnv, Rounds
from dynamiccl.train.online.places import Place
from dynamiccl.train.online.rmsprop import SharedRmsProp
from dynamiccl.train.recipe_checks import RewardScale
from dynamiccl.train.recipes import Recipe
from dynamiccl.train.trigger.detector import Detector

#: How long to wait for an update before looking whether the actors live.
_PATIENCE_S: Final = 5.0
#: Decisions that the critic sees.
_DECISIONS: Final = 4


@dataclass(frozen=True, slots=True)
class Order:
    """What an actor's process is given."""

    place: str
    tables: Tables
    world: World
    trigger: str
    recipe: Recipe
    seed: int

    def env(self) -> DecisionEnv:
        """The actor's own world."""
        rounds = Rounds.of(
            self.world, episode_rounds=self.recipe.episode_rounds, seen_decisions=_DECISIONS
        )
        watch = partial(Detector.load, Path(self.trigger)) if self.trigger else None
        return DecisionEnv(self.world, self.tables, self.recipe.jobs, rounds, watch)


class A3C:
    """The shared network, as `fit` wants an algorithm."""

    def __init__(self, network: ActorCritic) -> None:
        """Keep it."""
        self.network = network
        self.members = nn.ModuleList([network.actor])

    def save(self, path: str) -> None:
        """Write the weights of actor and critic."""
        torch.save(self.network.state_dict(), path)


class _Count:
    """Updates of all actors, in shared memory."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def add(self) -> int:
        with self.value.get_lock():
            self.value.value += 1
            return int(self.value.value)


class OnlineLoop:
    """The updates of all actors, up to the end of an epoch at a time; what `loop.Loop` is."""

    def __init__(
        self,
        network: ActorCritic,
        orders: Iterable[Order],
        recipe: Recipe,
        validate: Callable[[Iterable[Member]], float],
        make: Callable[[], ActorCritic],
    ) -> None:
        """Begin before the first update; `make` gives an actor a network of its own."""
        self.step = 0
        #: Values at the end of each epoch: `steps`, `losses`, `regrets`, and of the actors' jobs
        #: `speedups` (time of NCCL's own choice over theirs), and all calls that were played.
        self.curves: dict[str, list[Any]] = {
            name: [] for name in ("steps", "losses", "regrets", "speedups", "calls")
        }
        self._network, self._orders, self._recipe = network.share_memory(), list(orders), recipe
        self._validate, self._make = validate, make
        self._optimizer = SharedRmsProp(list(network.parameters()))
        self._online = nn.ModuleList([self._network.actor])
        decay = get_ema_multi_avg_fn(recipe.average_decay)  # type: ignore[no-untyped-call]
        self._averaged = AveragedModel(self._online, multi_avg_fn=decay)
        self._context = multiprocessing.get_context("spawn")
        self._count = _Count(self._context.Value("l", 0))
        self._updates: Any = self._context.Queue()
        self._processes: list[Any] = []

    @property
    def is_over(self) -> bool:
        """Whether all updates are made."""
        return self.step >= self._recipe.steps

    @property
    def latest(self) -> dict[str, float]:
        """Metrics of the latest epoch."""
        last = {name: values[-1] for name, values in self.curves.items()}
        return {
            "loss": last["losses"],
            "validation_regret": last["regrets"],
            "speedup": last["speedups"],
            "simulated_calls": last["calls"],
        }

    def run_epoch(self) -> None:
        """Wait for the updates up to the next look at the validation bins, and look.

        The actors do not wait for it. Raises UserError when one of them died.
        """
        if not self._processes:
            self._start()
        seen: list[Update] = []
        end = min(self.step + self._recipe.steps_per_epoch, self._recipe.steps)
        while self.step < end:
            seen.append(self._next())
            self.step += 1
            self._averaged.update_parameters(self._online)
        calls = sum(each.calls for each in seen)
        before = self.curves["calls"][-1] if self.curves["calls"] else 0
        values = (
            self.step,
            float(np.mean([each.loss for each in seen])),
            self._validate(cast(Iterable[Member], self._averaged.module)),
            float(np.mean([each.speedup for each in seen])),
            before + calls,
        )
        for name, value in zip(self.curves, values, strict=True):
            self.curves[name].append(value)
        if self.is_over:
            self.close()

    def best(self) -> Checkpoint:
        """The last: the rate is at 0 there, and cold validation says little of warm choices."""
        state = self._averaged.module.state_dict()
        weights = {name: value.clone() for name, value in state.items()}
        return Checkpoint(self.step, self.curves["regrets"][-1], weights)

    def save(self, path: Path, **facts: Any) -> None:
        """Write what `restore` takes; the actors go on meanwhile."""
        state = {
            "version": STATE_VERSION,
            "step": self.step,
            "curves": self.curves,
            "network": self._network.state_dict(),
            "averaged": self._averaged.state_dict(),
            "squares": self._optimizer.squares,
            "facts": facts,
        }
        write_state(path, state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved, as far as Hogwild repeats itself: actors begin anew."""
        self._network.load_state_dict(state["network"])
        self._averaged.load_state_dict(state["averaged"])
        for own, kept in zip(self._optimizer.squares, state["squares"], strict=True):
            own.copy_(kept)
        self.step, self.curves = state["step"], state["curves"]
        self._count.value.value = self.step

    def close(self) -> None:
        """End the actors."""
        for process in self._processes:
            process.terminate()
            process.join()
        self._processes = []

    def _start(self) -> None:
        for order in self._orders:
            given = (order, self._network, self._make(), self._optimizer, self._count)
            process = self._context.Process(
                target=_play, args=(*given, self._updates, os.getpid()), daemon=True
            )
            process.start()
            self._processes.append(process)

    def _next(self) -> Update:
        while True:
            try:
                return cast(Update, self._updates.get(timeout=_PATIENCE_S))
            except queue.Empty:
                dead = [p for p in self._processes if not p.is_alive() and p.exitcode]
                if dead:
                    place = self._orders[self._processes.index(dead[0])].place
                    self.close()
                    raise UserError(
                        f"the actor in '{place}' ended with {dead[0].exitcode}; what it said "
                        "stands above, and the run goes on with --resume"
                    ) from None


def _play(  # noqa: PLR0913, PLR0917 - what one process is given
    order: Order,
    shared: ActorCritic,
    own: ActorCritic,
    optimizer: SharedRmsProp,
    counter: _Count,
    updates: Any,
    parent: int,
) -> None:
    """An actor's process: until all updates are made, or who started it is gone."""
    torch.set_num_threads(1)
    torch.manual_seed(order.seed)
    actor = Actor(order.env(), shared, own, optimizer, order.recipe, order.seed)
    while counter.value.value < order.recipe.steps and os.getppid() == parent:
        updates.put(actor.update(counter))
    updates.close()
    updates.join_thread()


def make_loop(
    data: TrainingData, recipe: Recipe, seed: int, *, uses_cost: bool
) -> tuple[OnlineLoop, A3C]:
    """The loop and the algorithm of a recipe whose algorithm is A3C.

    Raises UserError as `Place.parse`, and for a place none of whose configs the data know.
    """

    def network() -> ActorCritic:
        steps = data.training.steps
        encoder = ObservationEncoderFactory(
            list(recipe.hidden_sizes), recipe.window_encoder
        ).create(steps.shapes)
        inputs = ActionInputs(data.catalogue.configs, data.cost_start, uses_cost)
        width, actions = recipe.hidden_sizes[-1], steps.num_actions
        imitator = Imitator(encoder, width, actions, inputs if recipe.action_inputs else None)
        set_scaling([imitator], data.sources(recipe))
        # NCCL's own choices earn -1 a round undisturbed, of which the logarithm is 0.
        is_log = recipe.reward_scale == RewardScale.LOG
        usual = 0.0 if is_log else -1.0 / max(1.0 - recipe.gamma, 1e-3)
        return ActorCritic(imitator, width, actions, _DECISIONS, usual)

    orders, places = [], recipe.places.split(",")
    for index in range(max(recipe.actors, len(places))):
        place = Place.parse(places[index % len(places)])
        world = World(place.system, place.for_training, data.catalogue.configs, place.scenario)
        if not world.mask[:, 1:].any():
            raise UserError(
                f"nothing that {place.text} has is among the configs of the data: choose --set "
                "places by the systems that were measured"
            )
        tables = Tables.of(world, data.profiles, data.training.noise, data.costs)
        order = Order(place.text, tables, world, recipe.trigger, recipe, seed * 1000 + index)
        orders.append(order)
    shared = network()
    margin = recipe.abstain_margins[0]
    loop = OnlineLoop(
        shared,
        orders,
        recipe,
        lambda members: data.validation_regret(members, margin, is_unanimous=False),
        network,
    )
    return loop, A3C(shared)
