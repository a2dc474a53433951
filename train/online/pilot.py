"""Validation of online recipes by playing: NCCL's time over that of the greedy policy.

Validation on data is cold, and tells nothing about choices that depend on the state of a job; the
actors' own speedup is that of policies that explore, in worlds that differ from episode to episode.
Here the policy plays as it is deployed, by its most likely actions, in each place of the recipe as
the place stands, in episodes that are the same each time: so checkpoints can be compared.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from dynamiccl.train.heads import Imitator
from dynamiccl.train.online.actor_critic import ActorCritic
from dynamiccl.train.online.actors import ActorSettings
from dynamiccl.train.online.player import Player
from dynamiccl.train.stateful_trunk import StatefulTrunk

#: Jobs of a place; seeds of actors are below this one.
_JOBS: Final = 8
_SEED: Final = 3_000_000


class Pilot:
    """Plays one episode in each place of some actors."""

    def __init__(self, actors: Sequence[ActorSettings], make: Callable[[], ActorCritic]) -> None:
        """`make` returns a network of the actors' form."""
        places = {each.place: each for each in actors}
        self._actors = list(places.values())
        self._network = make()

    def play(self, actor: Imitator) -> tuple[float, int]:
        """(speedup, probe_every), of the recipe's the best one, which the actor has then.

        The speedup is the geometric mean over places of NCCL's time / that of the actor's most
        likely actions.
        """
        self._network.actor.load_state_dict(actor.state_dict())
        found = {each: self._log_speedup(each) for each in self._actors[0].recipe.probe_every}
        best = max(found, key=lambda each: found[each])
        trunk = actor.encoder.trunk
        if isinstance(trunk, StatefulTrunk):
            trunk.probe_every.fill_(best)
        return math.exp(found[best]), best

    def _log_speedup(self, probe_every: int) -> float:
        logs = [self._log_speedup_in(each, probe_every) for each in self._actors]
        return sum(logs) / len(logs)

    def _log_speedup_in(self, actor: ActorSettings, probe_every: int) -> float:
        changes: dict[str, Any] = {"jobs": _JOBS, "vary": 1.0, "vary_times": 0.0}
        recipe = replace(actor.recipe, probe_every=(probe_every,), **changes)
        env = replace(actor, recipe=recipe).env()
        player = Player(env, self._network.state_units, recipe, _SEED, is_greedy=True)
        count = math.ceil(recipe.episode_rounds / recipe.num_steps)
        played = [player.play(self._network) for _ in range(count)]
        default_us, true_us = sum(p.default_us for p in played), sum(p.true_us for p in played)
        return math.log(default_us / true_us)
