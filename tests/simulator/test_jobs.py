"""Simulated jobs that record: how they stray from NCCL's choice."""

import numpy as np
import pytest

from dynamiccl.simulator.group import Group
from dynamiccl.simulator.record_jobs import Exploration, Explorer, all_configs
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.simulator.world import World


def explorer(share: float, hold: float) -> tuple[World, Explorer]:
    system, workload = find_system("h100-ib"), make_workload(["decode"], Group(4, 8))
    world = World(system, workload, all_configs(system, workload), find_scenario("quiet"))
    return world, Explorer(world, 200, Exploration(share, hold), 0)


def test_a_share_of_the_calls_strays_and_only_to_what_nccl_has() -> None:
    world, each = explorer(0.4, 5.0)
    jobs = world.jobs(200, 0)
    strayed = []
    for _ in range(400):
        action = each.act(jobs)
        assert world.mask[jobs.key, action].all()
        strayed.append(action != 0)
        jobs.step(action)
    # A draw may be NCCL's own choice, one of the configs.
    assert np.mean(strayed) == pytest.approx(0.4 * (1 - 1 / world.mask[0].sum()), abs=0.02)


def test_a_draw_is_held_for_some_calls_of_its_key() -> None:
    world, each = explorer(1.0, 8.0)
    jobs = world.jobs(200, 0)
    last = np.full((200, len(world.keys)), -1)
    repeats = []
    for _ in range(600):
        key, action = jobs.key, each.act(jobs)
        known = last[np.arange(200), key] >= 0
        repeats.append((last[np.arange(200), key] == action)[known].mean() if known.any() else 0)
        last[np.arange(200), key] = action
        jobs.step(action)
    same = 1 - 1 / 8 + 1 / 8 / world.mask[0].sum()  # a new draw may be the old one
    assert np.mean(repeats[100:]) == pytest.approx(same, abs=0.01)


def test_shares_and_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="share"):
        Exploration(1.5)
    with pytest.raises(ValueError, match="call at least"):
        Exploration(0.5, 0.2)
