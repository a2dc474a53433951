"""Warm start of a search by a trained policy that never saw the system.

For each system, noisy sweeps of the *other* ones are simulated, and a policy is trained on them as
anybody would. It knows algorithm, protocol and channels: other knobs of a config are predicted to
change nothing, and channels that it does not know as the nearest that it does. What its values say
without a history is the prior.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from learning_figures import parallel
from search_world import COLLECTIVES, SIZES, Task, chosen_groups
from sweeps import without

from dynamiccl.collect.simulated import simulate
from dynamiccl.evaluate.simulate.players import cold_predictions
from dynamiccl.nccl import Config
from dynamiccl.serve.search.policy_search import Prior
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.systems import SYSTEMS, find_system
from dynamiccl.simulator.workloads import WorkCall, Workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import Tables
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe

RECIPE: Final = "ddqn-dueling"
SWEEP: Final = """
name = "{name}"
system = "{name}"
collectives = [{collectives}]
groups = [{groups}]
sizes = {{ min = "{least}", max = "{most}", factor = 2 }}
num_channels = [0, 1, 2, 4, 8, 16, 32, 64]
cycles = 3
[simulator]
system = "{name}"
seed = {seed}
"""


#: What is predicted of a task, (A,) log(time / NCCL's own choice).
Prediction = npt.NDArray[np.float64]
#: By the systems that were left out, and seed.
Policies = Mapping[tuple[frozenset[str], int], TorchPolicy]


def train_all(out: Path, seeds: Sequence[int]) -> Policies:
    """Train policies without each system, for every seed."""
    for _ in parallel(_measure_all, [(out, seed) for seed in seeds]):
        pass
    jobs = [(out, frozenset({name}), seed) for name in SYSTEMS for seed in seeds]
    return {job[1:]: TorchPolicy.load(path) for job, path in parallel(_train, jobs)}


def policy_priors(
    trained: Policies, tasks: Mapping[str, Sequence[Task]], seeds: Sequence[int]
) -> dict[tuple[str, int], Prior]:
    """By (task, training seed) of all systems' tasks."""
    found = {}
    for name, held in tasks.items():
        for seed in seeds:
            for task, predicted in _predict(trained[frozenset({name}), seed], held):
                found[task.name, seed] = Prior.of_policy(
                    task.space, task.call.size_bytes, predicted
                )
    return found


def _train(out: Path, left_out: frozenset[str], seed: int) -> Path:
    """Train a policy without some systems."""
    data = without(out / f"{seed}", out / f"{'-'.join(sorted(left_out))}-{seed}", left_out)
    uri = f"sqlite:///{data / 'mlflow.db'}"
    done = fit(data, make_recipe(RECIPE), experiment="search", tracking_uri=uri, seed=seed)
    return Path(done.run_directory) / "policy"


def _measure_all(out: Path, seed: int) -> None:
    """Sweep every system, once for all policies of a seed."""
    for name in SYSTEMS:
        _measure(name, seed, out / f"{seed}")


def _measure(name: str, seed: int, data: Path) -> None:
    """A sweep of a system."""
    system = find_system(name)
    shapes = (
        f"{{ num_nodes = {group.num_nodes}, ranks_per_node = {group.ranks_per_node} }}"
        for group in chosen_groups(system)
    )
    known = (f'"{c.wire}"' for c in COLLECTIVES if c in system.collectives())
    text = SWEEP.format(
        name=name,
        collectives=", ".join(known),
        groups=", ".join(shapes),
        least=min(SIZES),
        most=max(SIZES),
        seed=seed,
    )
    simulate(text, data)


def _predict(policy: TorchPolicy, tasks: Sequence[Task]) -> Iterator[tuple[Task, Prediction]]:
    """A policy's predictions for tasks of one system."""
    calls = [
        WorkCall(task.call.group, task.call.collective, task.call.size_bytes, before_us=0.0)
        for task in tasks
    ]
    configs = policy.manifest.actions().configs
    system = find_system(tasks[0].system)
    world = World(system, Workload("tasks", tuple(calls)), configs, find_scenario("quiet"))
    tables = Tables.of(world, policy.manifest.launch_profiles, policy.manifest.noise_table())
    for task, mask, cold in zip(tasks, world.mask, cold_predictions(policy, tables), strict=True):
        known = np.flatnonzero(mask).tolist()
        yield task, _spread_out(task, configs, known, cold)


def _spread_out(
    task: Task, configs: Sequence[Config], known: Sequence[int], log_ratio: Prediction
) -> Prediction:
    """(A,) predictions of the task's choices, from those of the policy's configs.

    An algorithm and protocol that the other systems lack is expected to do as NCCL's own choice.
    """
    found = np.zeros(len(task.space.choices))
    for action, choice in enumerate(task.space.choices):
        asked = choice.config
        near = [
            (abs(math.log2(count / asked.num_channels)), a)
            for a in known
            if (configs[a].algorithm, configs[a].protocol) == (asked.algorithm, asked.protocol)
            and (count := configs[a].num_channels) and asked.num_channels
        ]  # fmt: skip
        if near:
            found[action] = log_ratio[min(near)[1]]
    return found
