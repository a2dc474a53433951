"""For bench_a3c.py and bench_mvfst.py: training in the world of online_world.py, and scores.

A *score* is the share that most likely actions get of what an oracle gains over NCCL that knows the
state and is as late: 0 is NCCL's own choice, 1 the oracle. Constants are of seeds 100, 101.
"""

import copy
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from harness import FULL
from online_world import Actions, RoundEnv, Setting

from dynamiccl.datasets.history import WINDOW_FEATURES, WINDOW_LENGTH
from dynamiccl.train.networks import Imitator, StatefulTrunk, Trunk
from dynamiccl.train.online.a3c import ActorCritic, Player, SharedRmsProp, update
from dynamiccl.train.recipe import Recipe, make_recipe

#: FULL has ten seeds and 1,000 updates, in place of three and 300.
SEEDS: Final = range(10 if FULL else 3)
UPDATES: Final = 1_000 if FULL else 300
#: Seed, jobs and rounds of episodes to score in, where no actor plays.
JUDGED, JOBS, ROUNDS = 5_000_000, 48, 120
Found = dict[str, Any]


class Actor(NamedTuple):
    """As the product's settings of an actor."""

    setting: Setting
    recipe: Recipe
    seed: int
    place: str = "online_world.py"

    def player(self, units: int, *, is_greedy: bool = False) -> Player:
        """The player in this world."""
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        env = RoundEnv(self.setting, self.recipe.jobs, self.recipe)
        return Player(env, units, self.recipe, self.seed, is_greedy=is_greedy)


def recipe_of(name: str = "a3c", **settings: Any) -> Recipe:
    """A recipe at the size of this world."""
    small: dict[str, Any] = {"jobs": 48, "hidden_sizes": (32,), "actors": 1, "steps": UPDATES}
    small |= {"gamma": 0.5, "entropy_start": 0.2, "learning_rate": 0.005, "num_steps": 6}
    if "lstm" in name:
        small |= {"state_units": 32, "probe_every": (24,)}
    return replace(make_recipe(name), **small | settings)


def make_network(setting: Setting, recipe: Recipe, seed: int) -> ActorCritic:
    """Untrained, with observations scaled as in some rounds of random play."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    env, draw = RoundEnv(setting, 8, recipe), np.random.default_rng(seed)
    seen, actions = [env.reset(seed)], env.tables.mask.shape[1]
    for _ in range(40):
        drawn = draw.random((8, *env.tables.mask.shape)) * env.tables.mask
        seen.append(env.step(drawn.argmax(2))[0])
    shape, width = (WINDOW_LENGTH, len(WINDOW_FEATURES)), recipe.hidden_sizes[-1]
    trunk: Any = Trunk(shape, seen[0]["context"].shape[-1], recipe.hidden_sizes)
    for name in ("context", "window"):
        rows = torch.from_numpy(np.concatenate([each[name] for each in seen])).flatten(0, -2)
        getattr(trunk, f"{name}_mean").copy_(rows.mean(0))
        getattr(trunk, f"{name}_scale").copy_(rows.std(0).clamp_min(1e-3))
    if recipe.state_units:
        trunk = StatefulTrunk(trunk, width, actions, recipe.state_units)
        width = trunk.width
    return ActorCritic(Imitator(trunk, width, actions, None), width, actions, recipe.seen_decisions)


@dataclass(frozen=True, slots=True)
class Judge:
    """What NCCL's own choice and the late oracle cost in fixed episodes."""

    actor: Actor
    #: (costs, their ln): the latter is what rewards fall with.
    usual: tuple[float, float] = (0.0, 0.0)
    known: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, setting: Setting, recipe: Recipe, seed: int = JUDGED) -> "Judge":
        """Its episodes are those of the setting, without variation."""
        judged = replace(recipe, jobs=JOBS, episode_rounds=ROUNDS, vary=1.0, vary_times=0.0)
        made = cls(Actor(setting, judged, seed))
        usual = made.play(lambda env: np.zeros(env.shape, dtype=np.int64)).both
        return cls(made.actor, usual, made.play(lambda env: env.costs().argmin(2)).both)

    def play(self, choose: Callable[[RoundEnv], Actions]) -> RoundEnv:
        """Episodes of a rule, whose decisions are configs."""
        env = RoundEnv(replace(self.actor.setting, has_moves=False), JOBS, self.actor.recipe)
        env.reset(self.actor.seed)
        while not env.is_over:
            env.step(choose(env))
        return env

    def score_of(self, env: RoundEnv, *, in_reward: bool = False) -> float:
        """The share of the late oracle's gain, of time or of reward."""
        usual, known, mine = (each[in_reward] for each in (self.usual, self.known, env.both))
        return float((usual - mine) / (usual - known))

    def watch(self, trained: Any) -> RoundEnv:
        """Episodes of a network's most likely actions."""
        player = self.actor.player(trained.state_units, is_greedy=True)
        for _ in range(-(-ROUNDS // self.actor.recipe.num_steps)):
            player.play(trained)
        return cast(RoundEnv, player.env)

    def scores(self, marks: Sequence["Mark"], like: Any) -> list[float]:
        """Of snapshots."""
        found = []
        for each in marks:
            like.load_state_dict(each.weights)
            found.append(self.score_of(self.watch(like)))
        return found


class Mark(NamedTuple):
    """Weights after so many updates, and seconds."""

    updates: int
    seconds: float
    weights: dict[str, torch.Tensor]

    @classmethod
    def of(cls, updates: int, began: float, network: Any) -> "Mark":
        """A snapshot."""
        weights = {name: each.clone() for name, each in network.state_dict().items()}
        return cls(updates, time.monotonic() - began, weights)


def actors(setting: Setting, recipe: Recipe, seed: int) -> Any:
    """As many as the recipe has, in worlds of their own."""
    return [Actor(setting, recipe, seed * 1000 + each) for each in range(recipe.actors)]


def train(  # noqa: PLR0913, PLR0917 - what one run is
    setting: Setting,
    recipe: Recipe,
    seed: int,
    shared: Any,
    marks: int = 1,
    learn: Callable[..., Any] = update,
    curiosity: Callable[[], float] | None = None,
) -> list[Mark]:
    """Actor-learner threads on shared weights, without locks, as the paper's; snapshots.

    `curiosity` draws the factor of the entropy's weight of each actor, in place of the product's.
    """
    players = [each.player(shared.state_units) for each in actors(setting, recipe, seed)]
    optimizer, average = SharedRmsProp(list(shared.parameters())), copy.deepcopy(shared)
    counter, found, began = itertools.count(1), list[Mark](), time.monotonic()

    def act(player: Player) -> None:
        own = copy.deepcopy(shared)
        while (number := next(counter)) <= recipe.steps:
            learn(player, shared, own, optimizer, lambda number=number: number)
            mix(average, shared, recipe)
            if number % (recipe.steps // marks) == 0:
                found.append(Mark.of(number, began, average))

    for player in players:
        player.curiosity = curiosity() if curiosity else player.curiosity
    threads = [threading.Thread(target=act, args=(player,)) for player in players]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found)


@torch.no_grad()
def mix(average: Any, shared: Any, recipe: Recipe) -> None:
    """The running average of weights, which is what runs export."""
    for mean, now in zip(average.parameters(), shared.parameters(), strict=True):
        mean.lerp_(now, 1.0 - recipe.average_decay)
