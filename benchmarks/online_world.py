"""A small world to learn in, for bench_a3c.py and bench_mvfst.py; trained in by online_play.py.

It is four all-reduces of `lora` on the simulated B300 node whose host CPUs are busy for seconds at
a time: rings feel that, NVLS does not. A round is what ranks need to agree (28 ms), and is drawn as
one: every key has the mean of its calls. First uses of an algorithm are free. All else is the
product's: times, states of the surroundings, observations.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.history import UNKNOWN, CallColumns
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.scenario import MarkovLink, Scenario
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import AGREEMENT_US, LATE, DecisionEnv, Rounds, Tables, Variation
from dynamiccl.train.online import Place
from dynamiccl.train.recipe import Recipe

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
    place = Place.parse(setting.place)
    rings = tuple(Config(Algorithm.Ring, Protocol.Simple, count) for count in setting.ladder)
    configs = (ABSTAIN, *rings) if rings else all_configs(place.system, place.workload)
    around = shifted(place.scenario) if setting.is_shifted else place.scenario
    world = World(place.system, place.workload, configs, around)
    return world, Tables.of(world, [DEFAULT_PROFILE])


def shifted(scenario: Scenario) -> Scenario:
    """The scenario half as strong again, coming and going twice as fast."""
    links = []
    for link in scenario.link:
        assert isinstance(link, MarkovLink)
        strong = tuple(1.0 + 1.5 * (each - 1.0) for each in link.slowdowns)
        fast = tuple(0.5 * each for each in link.dwell_us)
        links.append(link.model_copy(update={"slowdowns": strong, "dwell_us": fast}))
    return scenario.model_copy(update={"link": tuple(links)})


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
        self._record(key.ravel(), now.ravel(), measured.ravel())
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

    def _record(self, key: Actions, action: Actions, measured: Floats) -> None:
        named = ("algorithm", "protocol", "num_channels")
        ran = {name: getattr(self.world, name)[key, action] for name in named}
        sizes = np.array([each.size_bytes for each in self.world.keys])[key]
        level, skew = np.full(len(key), float(UNKNOWN)), np.zeros(len(key))
        calls = CallColumns(sizes, measured, **ran, interference=level, skew_us=skew)
        self.calls._rings.add(np.arange(len(key)), calls)
