"""Online training in simulated worlds: actors, validation, and loops.

Importing it registers `gymnasium.make("dynamiccl/Collectives-v0")`.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import gymnasium
from torch import nn

from dynamiccl.errors import UserError
from dynamiccl.simulator.world import World
from dynamiccl.train.data import TrainingData
from dynamiccl.train.environment import Place, Tables
from dynamiccl.train.loop import Loop
from dynamiccl.train.networks import (
    ActionInputs,
    Imitator,
    Network,
    StatefulTrunk,
    Trunk,
    set_scaling,
)
from dynamiccl.train.online.a3c import ActorCritic, ActorLearners, ActorSettings, Player
from dynamiccl.train.online.impala import Learner, RayActors, local_actors
from dynamiccl.train.recipe import Recipe

_log = logging.getLogger(__name__)
gymnasium.register("dynamiccl/Collectives-v0", "dynamiccl.train.environment:Collectives")


_JOBS: Final = 8
#: Of the episodes to validate in: no run of a seed below 3000 has it.
_SEED: Final = 3_000_000


class Pilot:
    """Validation by playing, in the same episodes each time.

    Cold validation tells nothing of choices by a job's state; actors explore, in other worlds.
    """

    def __init__(self, actors: Sequence[ActorSettings], make: Callable[[], ActorCritic]) -> None:
        places = {each.place: each for each in actors}
        self._actors = list(places.values())
        self._network = make()

    def play(self, actor: Imitator) -> tuple[float, int]:
        """(speedup over NCCL, probe_every): the best of the recipe's, which `actor` then has."""
        self._network.actor.load_state_dict(actor.state_dict())
        found = {each: self._log_speedup(each) for each in self._actors[0].recipe.probe_every}
        best = max(found, key=lambda each: found[each])
        if isinstance(actor.trunk, StatefulTrunk):
            actor.trunk.probe_every.fill_(best)
        return math.exp(found[best]), best

    def _log_speedup(self, probe_every: int) -> float:
        changes: dict[str, Any] = {"jobs": _JOBS, "vary": 1.0, "vary_times": 0.0}
        logs = []
        for actor in self._actors:
            recipe = replace(actor.recipe, probe_every=(probe_every,), **changes)
            env = replace(actor, recipe=recipe).env()
            player = Player(env, self._network.state_units, recipe, _SEED, is_greedy=True)
            count = math.ceil(recipe.episode_rounds / recipe.num_steps)
            played = [player.play(self._network) for _ in range(count)]
            default_us, true_us = sum(p.default_us for p in played), sum(p.true_us for p in played)
            logs.append(math.log(default_us / true_us))
        return sum(logs) / len(logs)


def make_loop(
    data: TrainingData, recipe: Recipe, seed: int, *, uses_cost: bool, ray: str | None = None
) -> Loop:
    """The loop of an A3C or IMPALA recipe; `ray` is a cluster's address for IMPALA's actors.

    Raises as `Place.parse` and `check_cluster`, and UserError for a place without the data's
    configs.
    """
    make = partial(network_of, data, recipe, uses_cost=uses_cost)
    orders, shared = orders_of(data, recipe, seed), make()
    pilot, margin = Pilot(orders, make), recipe.abstain_margins[0]

    def validate(members: nn.ModuleList) -> dict[str, float]:
        networks = cast(Iterable[Network], members)
        regret = data.validation_regret(networks, margin, is_unanimous=False)
        speedup, probe_every = pilot.play(cast(Imitator, members[0]))
        told = {"validation_regret": regret, "validation_speedup": speedup}
        return told | {"probe_every": probe_every}

    if recipe.algorithm == "A3C":
        return Loop(ActorLearners(shared, orders, make), recipe, validate)
    actors: Any = (
        local_actors(shared, orders, make) if ray is None else RayActors(shared, orders, ray)
    )
    return Loop(Learner(shared, actors, recipe), recipe, validate)


def network_of(data: TrainingData, recipe: Recipe, *, uses_cost: bool) -> ActorCritic:
    """The untrained network of a recipe."""
    steps = data.training.steps
    window, context, _ = steps.shapes
    trunk: Any = Trunk(window, context[0], recipe.hidden_sizes, recipe.window_encoder)
    inputs = ActionInputs(data.catalogue.configs, data.cost_start, uses_cost)
    width, actions = recipe.hidden_sizes[-1], steps.mask.shape[1]
    if recipe.state_units:
        trunk = StatefulTrunk(trunk, width, actions, recipe.state_units)
        width = trunk.width
    imitator = Imitator(trunk, width, actions, inputs if recipe.action_inputs else None)
    set_scaling([imitator], data.sources(recipe))
    return ActorCritic(imitator, width, actions, recipe.seen_decisions)


def orders_of(data: TrainingData, recipe: Recipe, seed: int) -> list[ActorSettings]:
    """Settings of each actor; raises as `make_loop`."""
    orders, places = [], [Place.parse(text) for text in recipe.places.split(",")]
    played = {place.system.name for place in places}
    others = sorted(set(data.frame["system"].unique()) - played)
    if others:
        _log.warning(
            "no actor plays on %s, which the data are of, but on %s: on the former the policy may "
            "be slower than NCCL's own choice. Check it with 'dynamiccl-evaluate gate', or add a "
            "place with --set places",
            ", ".join(others),
            ", ".join(sorted(played)),
        )
    for index in range(max(recipe.actors, len(places))):
        place = places[index % len(places)]
        world = World(place.system, place.for_training, data.catalogue.configs, place.scenario)
        if not world.mask[:, 1:].any():
            raise UserError(
                f"nothing that {place.text} has is among the configs of the data: choose --set "
                "places by the systems that were measured"
            )
        tables = Tables.of(world, data.profiles, data.training.noise, data.costs)
        orders.append(ActorSettings(place.text, tables, world, recipe, seed * 1000 + index))
    return orders
