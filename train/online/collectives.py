"""`gymnasium.make("dynamiccl/Collectives-v0")`: one job in a simulated world, for any RL library.

import gymnasium, dynamiccl.train.online
env = gymnasium.make("dynamiccl/Collectives-v0", system="b300-nvlink", scenario="busy-host")
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.record_jobs import all_configs, check_workload
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import Tables
from dynamiccl.train.online.decisions import LATE, DecisionEnv, Rounds


def make_vector(  # noqa: PLR0913 - all of a world, by name
    num_envs: int = 1,
    *,
    system: str = "b300-nvlink",
    workload: str | Sequence[str] = "decode",
    scenario: str = "busy-host",
    num_nodes: int = 0,
    ranks_per_node: int = 0,
    period_calls: int = 0,
    episode_rounds: int = 200,
    seen_decisions: int = 4,
) -> DecisionEnv:
    """N jobs on a system by name or file; 0 nodes or ranks: the largest group.

    Raises UnknownName for an unknown name, and UserError for a workload that the system cannot run.
    """
    found = find_system(system)
    largest = found.groups()[-1]
    shape = Group(num_nodes or largest.num_nodes, ranks_per_node or largest.ranks_per_node)
    names = [workload] if isinstance(workload, str) else list(workload)
    made = make_workload(names, shape)
    check_workload(found, made)
    world = World(found, made, all_configs(found, made), find_scenario(scenario))
    rounds = Rounds.of(
        world, period_calls, episode_rounds=episode_rounds, seen_decisions=seen_decisions
    )
    return DecisionEnv(world, Tables.of(world, [DEFAULT_PROFILE]), num_envs, rounds)


class Collectives(gymnasium.Env[dict[str, Any], npt.NDArray[np.int64]]):
    """One job: `DecisionEnv` without the dimension N, and lenient towards invalid configs.

    A config that NCCL lacks for a call is no error: NCCL decides itself, as it does when a tuner
    asks for one. `info` has `earned` and `calls` by task key, `true_us` and `default_us`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own

    def __init__(self, render_mode: str | None = None, **world: Any) -> None:
        """The arguments are those of `make_vector`; there is nothing to render."""
        self.render_mode = render_mode
        self.jobs = make_vector(1, **world)
        self.observation_space = self.jobs.single_observation_space
        self.action_space = self.jobs.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; every key uses NCCL's own choice."""
        super().reset(seed=seed)
        found, _ = self.jobs.reset(seed=seed, options=options)
        return _only(found), {}

    def step(
        self, action: npt.NDArray[np.int64]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Set the config of every task key, and run a round."""
        asked = np.asarray(action, dtype=np.int64)
        mask = self.jobs.tables.mask
        has = mask[np.arange(len(mask)), np.maximum(asked, 0)] | (asked == LATE)
        found, earned, _, over, info = self.jobs.step(np.where(has, asked, ABSTAIN_ACTION)[None])
        return _only(found), float(earned[0]), False, bool(over[0]), _only(info)


def _only(found: dict[str, Any]) -> dict[str, Any]:
    return {name: part[0] for name, part in found.items()}
