"""Speed of the simulator: collectives a second of processor time of one thread.

    python benchmarks/bench_simulator.py

The best of several rounds: the machine's other work makes rounds slower and none faster. Half the
calls follow NCCL, half a config that was drawn at random.
"""

import time
from typing import Final

import numpy as np
from harness import write_result

from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import JobCalls, Tables

JOBS: Final = 2048
ROUND_S: Final = 0.25
ROUNDS: Final = 12
CONFIGS: Final = (
    ABSTAIN,
    *(Config(a, p) for a in (Algorithm.Tree, Algorithm.Ring) for p in Protocol),
    Config(Algorithm.NVLS, Protocol.Simple),
    Config(Algorithm.NVLSTree, Protocol.Simple),
)


def rate(world: World, *, observed: bool) -> float:
    """Calls a second, in the best round."""
    env = JobCalls(world, Tables.of(world, ["default"]), JOBS, delay=20, observed=observed)
    env.reset(seed=0)
    # A config for each key and job that does not change: drawing one is the player's work.
    random = np.random.default_rng(0)
    drawn = (random.random((JOBS, *world.mask.shape)) * world.mask).argmax(axis=2)
    drawn[::2] = 0
    job, rates = np.arange(JOBS), []
    for _ in range(ROUNDS):
        steps, began = 0, time.process_time()
        while (spent := time.process_time() - began) < ROUND_S:
            for _ in range(8):
                env.step(drawn[job, env.jobs.key])
            steps += 8 * JOBS
        rates.append(steps / spent)
    return max(rates)


def main() -> None:
    """Measure and write; bars are a million, and 300,000 with observations."""
    loop = make_workload(("ddp", "fsdp", "megatron", "moe"), Group(4, 8))
    world = World(find_system("h100-ib"), loop, CONFIGS, find_scenario("congested"))
    rates = {
        "collectives_per_s_per_core": rate(world, observed=False),
        "steps_with_observation_per_s_per_core": rate(world, observed=True),
    }
    write_result("simulator", rates)


if __name__ == "__main__":
    main()
