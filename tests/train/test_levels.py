"""The levels of recorded calls are those that the Trigger tells while they run."""

from pathlib import Path

import numpy as np
import torch

from dynamiccl.datasets.sequences import CALLS_USED, timed_calls
from dynamiccl.datasets.store import read
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.recording import Recording
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import CollectiveEnv, Course, Tables
from dynamiccl.train.trigger.detector import Detector
from dynamiccl.train.trigger.levels import interference_levels
from dynamiccl.train.trigger.module import TriggerModule


def test_a_recording_gets_the_levels_that_the_environment_saw(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = TriggerModule(0.05).eval()
    system, workload = find_system("h100-ib"), make_workload(["lora"], Group(4, 8))
    world = World(system, workload, all_configs(system, workload), find_scenario("congested"))
    tables = Tables.of(world, ["default"])
    env = CollectiveEnv(world, tables, 2, Course(episode_calls=600), lambda: Detector(module))
    env.reset(seed=3)
    recording = Recording(world, "played")
    random = np.random.default_rng(0)
    seen: dict[tuple[str, int], float] = {}
    for call in range(600):
        # Two configs and NCCL's own: streams get long enough to be known.
        allowed = np.flatnonzero(world.mask.all(axis=0))[:3]
        info = env.step(allowed[random.integers(3, size=2)])[4]
        recording.add(info["ran"])
        seen |= {(f"played-{job}", call): float(env.level[job]) for job in range(2)}
    recording.write(tmp_path)

    calls = timed_calls(read(tmp_path, "calls").select(CALLS_USED))
    levels = interference_levels(Detector(module), calls)
    expected = [seen[key] for key in calls.select("run", "sequence").iter_rows()]
    np.testing.assert_allclose(levels, expected, rtol=1e-4, atol=1e-4)
    assert (levels > 0.5).any()
    assert (levels < 0).any()
