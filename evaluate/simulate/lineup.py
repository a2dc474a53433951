"""The rows of a simulated comparison: player, world, and detector.

Every policy plays in a world with its own catalogue of configs; all worlds of one seed have the
same interference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.drawn_worlds import Floats
from dynamiccl.evaluate.simulate.players import (
    Actions,
    Fixed,
    Learned,
    Oracle,
    Player,
    Searching,
    best_fixed,
    best_table,
    mean_times_us,
)
from dynamiccl.nccl import ABSTAIN, Config
from dynamiccl.serve.search.autoccl import AutoCcl
from dynamiccl.serve.search.belief import Prior, predicted
from dynamiccl.serve.search.policy_search import PolicySearch
from dynamiccl.serve.search.space import Choice, SearchSpace
from dynamiccl.serve.search.tuner import Key
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.scenario import Scenario
from dynamiccl.simulator.system import System
from dynamiccl.simulator.workloads import Workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import Course, JobCalls, Tables, Watch, delay_calls
from dynamiccl.train.policy import TorchPolicy

NCCL: Final = "nccl-default"
ORACLE: Final = "oracle"
#: The oracle with the delay of agreement: an upper bound for all deciding players.
DELAYED: Final = "oracle, delayed"
ORACLES: Final = frozenset({ORACLE, DELAYED})
FIXED: Final = "best fixed config"
QUIET_TABLE: Final = "best quiet table"
ALL_STATES_TABLE: Final = "best table of all states"
SEARCH: Final = "AutoCCL search"
#: Rows that need no trained policy.
SIMPLE: Final = frozenset({NCCL, FIXED, QUIET_TABLE, ALL_STATES_TABLE, SEARCH, *ORACLES})
#: Jobs used to find the best fixed choices, with seeds not used in the comparison.
_PILOT_SEEDS: Final = (1_000_001, 1_000_002)
_PILOT_STEPS: Final = 4_000

MakeWatch = Callable[[], Watch]


@dataclass(frozen=True, slots=True)
class Setting:
    """The simulated system, workload and scenario."""

    system: System
    workload: Workload
    scenario: Scenario
    calls: int
    jobs: int

    def world(self, configs: Sequence[Config]) -> World:
        """The world with a catalogue's configs."""
        return World(self.system, self.workload, configs, self.scenario)


@dataclass(frozen=True, slots=True)
class Contender:
    """One row: a player, made anew for each seed, and its environment."""

    name: str
    world: World
    tables: Tables
    make: Callable[[JobCalls, int], Player]
    make_watch: MakeWatch | None = None
    #: Whether the player needs observations, which cost time.
    observes: bool = False
    #: Whether decisions take effect at once: a table from the start, and the oracle's.
    at_once: bool = False

    def prepare(self, setting: Setting, seed: int) -> tuple[JobCalls, Player]:
        """The environment and the player for one seed."""
        course = Course(
            episode_calls=setting.calls,
            delay_calls=0 if self.at_once else delay_calls(self.world),
            observed=self.observes,
        )
        env = JobCalls(self.world, self.tables, setting.jobs, course, self.make_watch)
        return env, self.make(env, seed)


def simple_contenders(setting: Setting) -> list[Contender]:
    """NCCL, fixed choices, AutoCCL's search, and the oracle, with and without the delay."""
    world = setting.world(all_configs(setting.system, setting.workload))
    tables = Tables.of(world, [DEFAULT_PROFILE])
    mean_us = mean_times_us(world, _PILOT_SEEDS, steps=_PILOT_STEPS)
    default = np.zeros(len(world.keys), dtype=np.int64)
    fixed = {
        NCCL: default,
        FIXED: best_fixed(world, mean_us),
        QUIET_TABLE: np.nanargmin(world.quiet_us, axis=1),
        ALL_STATES_TABLE: best_table(mean_us),
    }
    rows = [
        Contender(name, world, tables, partial(_fixed, chosen), at_once=True)
        for name, chosen in fixed.items()
    ]
    rows.append(Contender(SEARCH, world, tables, _autoccl))
    rows += [
        Contender(name, world, tables, lambda _env, _seed: Oracle(), at_once=name == ORACLE)
        for name in (DELAYED, ORACLE)
    ]
    return rows


def policy_contenders(
    setting: Setting, name: str, policy: TorchPolicy, make_watch: MakeWatch | None
) -> list[Contender]:
    """A policy alone; with a Trigger; and as the start of a search with a Trigger."""
    world = setting.world(policy.manifest.actions().configs)
    known = policy.manifest
    tables = Tables.of(world, known.launch_profiles, known.noise_table(), known.cost_table())

    def learned(env: JobCalls, _seed: int) -> Player:
        return Learned(policy, env)

    if make_watch is None:
        return [Contender(name, world, tables, learned, observes=True)]
    spaces = search_spaces(world)
    said = cold_predictions(policy, tables)
    priors: dict[Key, Prior] = {
        key: Prior.of_policy(spaces[key], call.size_bytes, said[key])
        for key, call in enumerate(world.keys)
    }

    def search(env: JobCalls, _seed: int) -> Player:
        def tuner(_job: int) -> PolicySearch:
            return PolicySearch(lambda key: spaces[key], lambda key: priors[key])

        return Searching(tuner, env.num_envs, alarmed=True)

    return [
        Contender(f"{name} + Trigger", world, tables, learned, make_watch, observes=True),
        Contender(f"search from {name} + Trigger", world, tables, search, make_watch),
    ]


def _fixed(chosen: Actions, _env: JobCalls, _seed: int) -> Player:
    return Fixed(chosen)


def cold_predictions(policy: TorchPolicy, tables: Tables) -> list[Floats]:
    """A policy's log(time / NCCL's own choice) for every task key without history, (A,) each."""
    q = policy.values(Observations.cold(tables.context.copy()), tables.mask)
    return [predicted(row) for row in q]


def _autoccl(env: JobCalls, seed: int) -> Player:
    spaces = search_spaces(env.world)

    def tuner(job: int) -> AutoCcl:
        return AutoCcl(lambda key: spaces[key], seed=seed * 1000 + job)

    return Searching(tuner, env.num_envs, alarmed=False)


def search_spaces(world: World) -> dict[Key, SearchSpace]:
    """The search space of each task key; it begins with NCCL's own knobs."""
    choices = [Choice(config) for config in world.configs]
    return {
        key: SearchSpace(
            choices,
            np.flatnonzero(world.mask[key]).tolist(),
            default_runs=Choice(world.system.resolve(call, ABSTAIN)),
        )
        for key, call in enumerate(world.keys)
    }
