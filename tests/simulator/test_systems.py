"""What every simulated system must keep to, and the jobs that it records."""

import numpy as np
import pytest

from dynamiccl.errors import UnknownName
from dynamiccl.nccl import ABSTAIN, COST_IGNORE, Algorithm, Config
from dynamiccl.simulator.record_jobs import Explorer, all_configs
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import QUIET, Call, Group, Surroundings
from dynamiccl.simulator.systems import SYSTEMS, System, find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.simulator.world import World

SIZES = [1 << 10, 3 << 16, 1 << 22, 1 << 28]


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest) -> System:
    return find_system(request.param)


def calls(system: System) -> list[Call]:
    shapes = system.groups()
    few = list(dict.fromkeys([shapes[0], shapes[len(shapes) // 2], shapes[-1]]))
    return [Call(g, c, s) for g in few for c in system.collectives() for s in SIZES]


def test_the_cost_table_has_a_price_for_every_cell_and_no_other(system: System) -> None:
    for call in calls(system):
        table = system.cost_table(call)
        there = {(int(a), int(p)) for a, p in np.argwhere(table != COST_IGNORE)}
        assert there == {(int(a), int(p)) for a, p in system.cells(call.group, call.collective)}
        assert (table[table != COST_IGNORE] > 0).all()


def test_nccl_takes_the_cheapest_cell_of_its_table(system: System) -> None:
    for call in calls(system):
        ran = system.resolve(call, ABSTAIN)
        table = system.cost_table(call)
        assert table[ran.algorithm, ran.protocol] == table[table != COST_IGNORE].min()
        assert ran.algorithm is not None
        assert ran.num_channels is not None
        assert 1 <= ran.num_channels <= system.max_channels(call.group, ran.algorithm)


def test_every_cell_has_parts_that_add_up(system: System) -> None:
    for call in calls(system):
        for cell in system.cells(call.group, call.collective):
            parts = system.parts(call, Config(*cell))
            assert (parts.algorithm, parts.protocol) == cell
            assert parts.fixed_us >= 0
            assert parts.intra_us >= 0
            assert (parts.inter_us > 0) == (call.group.num_nodes > 1)
            assert parts.time_us(QUIET) == pytest.approx(parts.quiet_us)
            worse = Surroundings(intra=2.0, inter=2.0)
            moving = max(parts.intra_us, parts.inter_us)
            assert parts.time_us(worse) == pytest.approx(parts.quiet_us + moving)


def test_a_cell_that_nccl_lacks_is_refused(system: System) -> None:
    call = calls(system)[0]
    known = {a for a, _ in system.cells(call.group, call.collective)}
    [lacking, *_] = [a for a in Algorithm if a not in known]
    with pytest.raises(KeyError):
        system.parts(call, Config(lacking))


def test_an_unknown_system_is_named_with_the_choices() -> None:
    with pytest.raises(UnknownName, match="h100-ib"):
        find_system("h200")


def explorer(share: float, hold: float) -> tuple[World, Explorer]:
    system, workload = find_system("h100-ib"), make_workload(["decode"], Group(4, 8))
    world = World(system, workload, all_configs(system, workload), find_scenario("quiet"))
    return world, Explorer(world, 200, share, hold, 0)


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


@pytest.mark.parametrize(("share", "hold_calls"), [(1.5, 1.0), (0.5, 0.2)])
def test_shares_and_lengths_are_checked(share: float, hold_calls: float) -> None:
    with pytest.raises(ValueError, match=r"a share lies in 0\.\.1, and a draw lasts a call"):
        explorer(share, hold_calls)
