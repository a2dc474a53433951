"""A small world to learn in, training and scores, for bench_a3c.py and bench_mvfst.py.

Four all-reduces of `lora` on the simulated B300 node whose host CPUs are busy for seconds at a
time: rings feel that, NVLS does not. A round is what ranks need to agree (28 ms), and is drawn as
one: every key has the mean of its calls. First uses of an algorithm are free. All else is the
product's: times, states of the surroundings, observations.

A *score* is the share that most likely actions get of what an oracle gains over NCCL that knows the
state and is as late: 0 is NCCL's own choice, 1 the oracle. Constants are of seeds 100, 101.
"""

import copy
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from harness import FULL

from dynamiccl.datasets import history
from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.world import World
from dynamiccl.train import environment
from dynamiccl.train.environment import AGREEMENT_US, LATE, DecisionEnv, Rounds, Tables, Variation
from dynamiccl.train.networks import Imitator, StatefulTrunk, Trunk
from dynamiccl.train.online.a3c import ActorCritic, Player, SharedRmsProp, update
from dynamiccl.train.recipe import Recipe, make_recipe

#: FULL has ten seeds and 1,000 updates, in place of three and 300.
SEEDS: Final = range(10 if FULL else 3)
UPDATES: Final = 1_000 if FULL else 300
#: Seed, jobs and rounds of episodes to score in, where no actor plays.
JUDGED, JOBS, ROUNDS = 5_000_000, 48, 120
Found = dict[str, Any]
#: As mvfst-rl's updates of cwnd.
MOVES: Final = ("0", "/2", "-1", "+1", "*2")
#: Calls of a key in a round.
CALLS: Final = 2
Actions = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """A world, and what a decision is and costs."""

    place: str = "b300-nvlink:lora:busy-host"
    #: Half as strong again, and twice as fast: outside of what episodes draw.
    is_shifted: bool = False
    #: Rounds until a decision is in force.
    delay: int = 1
    #: Channel counts of Ring/Simple to choose from, in place of algorithms and protocols.
    ladder: tuple[int, ...] = ()
    #: Decisions are MOVES on the ladder.
    has_moves: bool = False
    #: Cost of a channel, as a share of the time of NCCL's own choice.
    price: float = 0.0


@cache
def world_of(setting: Setting) -> tuple[World, Tables]:
    """The simulated world, and what is seen of it cold."""
    place = environment.Place.parse(setting.place)
    rings = tuple(Config(Algorithm.Ring, Protocol.Simple, count) for count in setting.ladder)
    configs = (ABSTAIN, *rings) if rings else all_configs(place.system, place.workload)
    scenario, links = place.scenario, list[Any]()
    for link in cast(Any, scenario.link) if setting.is_shifted else ():
        strong = tuple(1.0 + 1.5 * (each - 1.0) for each in link.slowdowns)
        fast = tuple(0.5 * each for each in link.dwell_us)
        links.append(link.model_copy(update={"slowdowns": strong, "dwell_us": fast}))
    around = scenario.model_copy(update={"link": tuple(links) or scenario.link})
    world = World(place.system, place.workload, configs, around)
    return world, Tables.of(world, [DEFAULT_PROFILE])


class RoundEnv(DecisionEnv):
    """As its base, with a round drawn as one."""

    def __init__(self, setting: Setting, jobs: int, recipe: Recipe) -> None:
        world, tables = world_of(setting)
        self.setting = setting
        #: Cost of all rounds in times of NCCL's own choice, and its ln.
        self.both = 0.0, 0.0
        #: Times of calls, and mean channels, by round.
        self.took, self.held = list[Floats](), list[float]()
        rounds = Rounds(1, setting.delay, recipe.episode_rounds, recipe.seen_decisions)
        varied = Variation(recipe.vary, recipe.vary_times) if recipe.vary > 1.0 else None
        super().__init__(world, tables, jobs, rounds, None, varied)
        self.shape = self._shape
        if setting.has_moves:
            mask = np.ones((self.shape[1], len(MOVES)), dtype=np.bool_)
            self.tables = replace(tables, mask=mask)
            self.calls.tables, self._like = self.tables, (world, self.tables)

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        """Start an episode with NCCL's own choices."""
        found = super().reset(seed)
        self._draw, links = np.random.default_rng(self._random.integers(1 << 62)), []
        for link in self.world.scenario.link:
            links.append((link.on, link.play(self.num_envs, self._draw)))
        self._links, self._slow = links, {on: next(link) for on, link in links}
        #: (N, K) configs in force from the oldest on; the last was decided last.
        self.configs = [np.zeros(self.shape, dtype=np.int64)] * (self.setting.delay + 1)
        return found

    def times(self) -> Floats:
        """(N, K, A) us in the state that is."""
        keys, one = self.shape[1], np.ones(self.num_envs)
        job, key = np.divmod(np.arange(self.num_envs * keys), keys)
        slow = (self._slow.get(on, one)[job] for on in ("intra", "inter", "host"))
        return self.world.times_us(key, *slow).reshape(self.num_envs, keys, -1)

    def costs(self) -> Floats:
        """(N, K, A) what the reward falls with, in the state that is; inf where NCCL lacks it."""
        priced = self.setting.price * self.world.num_channels
        found = self.times() / self.tables.reference_us[:, None] + priced
        return np.where(np.isnan(found), np.inf, found)

    def wanted(self, asked: Actions) -> Actions:
        """The configs that decisions stand for: of a move the nearest count of channels.

        A move is from what was decided last; NCCL's own choice stands for the count that it takes.
        """
        if not self.setting.has_moves:
            return np.where(asked == LATE, ABSTAIN_ACTION, asked)
        last = self.configs[-1]
        count = self.world.num_channels[np.arange(self.shape[1]), last].astype(float)
        each = np.stack([count, count / 2, count - 1, count + 1, count * 2], axis=2)
        moved = np.take_along_axis(each, np.maximum(asked, 0)[:, :, None], 2)
        nearest = 1 + np.abs(np.array(self.setting.ladder) - moved).argmin(2)
        return np.where((asked == LATE) | (asked == 0), last, nearest)

    def _run_round(self) -> dict[str, Any]:
        world, before = self.world, self.configs[0]
        self.configs = [*self.configs[1:], self.wanted(self._decided[:, :, -1])]
        now, times = self.configs[0], self.times()
        took = np.take_along_axis(times, now[:, :, None], 2)[:, :, 0]
        took = took + (now != before) * world.scenario.switch_us / CALLS
        key = np.broadcast_to(np.arange(self.shape[1]), self.shape)
        channels, reference = world.num_channels[key, now], self.tables.reference_us
        noise = world.scenario.jitter.sigma * self._draw.standard_normal(took.shape)
        measured = took * np.exp(noise / np.sqrt(CALLS))
        key, ran = key.ravel(), now.ravel()
        sizes = np.array([each.size_bytes for each in world.keys])[key]
        level, skew = np.full(len(key), float(history.UNKNOWN)), np.zeros(len(key))
        config = [world.algorithm[key, ran], world.protocol[key, ran], world.num_channels[key, ran]]
        calls = history.CallColumns(*[sizes, measured.ravel(), *config, level, skew])
        self.calls._windows.add(np.arange(len(key)), calls)
        self._slow = {on: link.send(np.full(self.num_envs, AGREEMENT_US))
                      for on, link in self._links}  # fmt: skip
        cost = took / reference + self.setting.price * channels
        self.both = self.both[0] + float(cost.sum()), self.both[1] + float(np.log(cost).sum())
        self.took.append(took)
        self.held.append(float(channels.mean()))
        return {
            "earned": -(measured / reference + self.setting.price * channels),
            "calls": np.full(self.shape, CALLS),
            "in_force": now,
            "true_us": CALLS * took.sum(1),
            "default_us": CALLS * times[:, :, ABSTAIN_ACTION].sum(1),
        }


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
    shape, width = (history.WINDOW_LENGTH, len(history.WINDOW_FEATURES)), recipe.hidden_sizes[-1]
    trunk: Any = Trunk(shape, seen[0]["context"].shape[-1], recipe.hidden_sizes)
    for name in ("context", "window"):
        rows = torch.from_numpy(np.concatenate([each[name] for each in seen])).flatten(0, -2)
        getattr(trunk, f"{name}_mean").copy_(rows.mean(0))
        getattr(trunk, f"{name}_scale").copy_(rows.std(0).clamp_min(1e-3))
    if recipe.state_units:
        trunk = StatefulTrunk(trunk, width, actions, recipe.state_units)
        width = trunk.width
    return ActorCritic(Imitator(trunk, width, actions, None), width, actions, recipe.seen_decisions)


class Judge:
    """What NCCL's own choice and the late oracle cost in fixed episodes, without variation."""

    def __init__(self, setting: Setting, recipe: Recipe, seed: int = JUDGED) -> None:
        judged = replace(recipe, jobs=JOBS, episode_rounds=ROUNDS, vary=1.0, vary_times=0.0)
        self.actor = Actor(setting, judged, seed)
        #: (costs, their ln): the latter is what rewards fall with.
        self.usual = self.play(lambda env: np.zeros(env.shape, dtype=np.int64)).both
        self.known = self.play(lambda env: env.costs().argmin(2)).both

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
