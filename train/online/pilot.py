"""Validation of online recipes by playing: NCCL's time over that of the greedy policy.

Validation on data is cold, and tells nothing about choices that depend on the state of a job; the
actors' own speedup is that of policies that explore, in worlds that differ from episode to episode.
Here the policy plays as it is deployed, by its most likely actions, in each place of the recipe as
the place stands, in episodes that are the same each time: so checkpoints can be compared.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from torch import nn

from dynamiccl.train.online.actor_critic import ActorCritic
from dynamiccl.train.online.actors import ActorSettings
from dynamiccl.train.online.player import Player

#: Jobs of a place; seeds of actors are below this one.
_JOBS: Final = 16
_SEED: Final = 3_000_000


class Pilot:
    """Plays one episode in each place of some actors."""

    def __init__(self, actors: Sequence[ActorSettings], make: Callable[[], ActorCritic]) -> None:
        """`make` returns a network of the actors' form."""
        places = {each.place: each for each in actors}
        self._actors = list(places.values())
        self._network = make()

    def speedup(self, actor: nn.Module) -> float:
        """Geometric mean over places of NCCL's time / that of an actor's most likely actions."""
        self._network.actor.load_state_dict(actor.state_dict())
        logs = [self._log_speedup(each) for each in self._actors]
        return math.exp(sum(logs) / len(logs))

    def _log_speedup(self, actor: ActorSettings) -> float:
        recipe = replace(actor.recipe, jobs=_JOBS, vary=1.0, vary_times=0.0)
        env = replace(actor, recipe=recipe).env()
        player = Player(env, self._network.state_units, recipe, _SEED, is_greedy=True)
        count = math.ceil(recipe.episode_rounds / recipe.num_steps)
        logs = [math.log(player.play(self._network).speedup) for _ in range(count)]
        return sum(logs) / count
