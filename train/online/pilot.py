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

import numpy as np
import numpy.typing as npt
import torch

from dynamiccl.train.heads import Imitator
from dynamiccl.train.online.actor_critic import ActorCritic
from dynamiccl.train.online.actors import ActorSettings
from dynamiccl.train.online.player import Player
from dynamiccl.train.stateful_trunk import StatefulTrunk

#: Jobs of a place for each `probe_every` to choose from; seeds of actors are below this one.
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
        choices = self._actors[0].recipe.probe_every
        logs = np.mean([self._log_speedups(each) for each in self._actors], axis=0)
        best = choices[int(logs.argmax())]
        trunk = actor.encoder.trunk
        if isinstance(trunk, StatefulTrunk):
            trunk.probe_every.fill_(best)
        return math.exp(logs.max()), best

    def _log_speedups(self, actor: ActorSettings) -> npt.NDArray[np.float64]:
        """Of each `probe_every`, in one place."""
        choices = actor.recipe.probe_every
        changes: dict[str, Any] = {"jobs": _JOBS * len(choices), "vary": 1.0, "vary_times": 0.0}
        recipe = replace(actor.recipe, **changes)
        env = replace(actor, recipe=recipe).env()
        player = Player(env, self._network.state_units, recipe, _SEED, is_greedy=True)
        player.probe_every = torch.tensor(choices).repeat_interleave(_JOBS)
        count = math.ceil(recipe.episode_rounds / recipe.num_steps)
        played = [player.play(self._network) for _ in range(count)]
        default_us, true_us = (
            torch.stack(each).sum(0).view(-1, _JOBS).sum(1)
            for each in ([p.default_us for p in played], [p.true_us for p in played])
        )
        found: npt.NDArray[np.float64] = (default_us / true_us).log().numpy()
        return found
