"""A filter that knows the scenario, where surroundings change, and what a shift changes."""

from dataclasses import replace

import pytest
from scenario_rivals import Filter, Levels

from dynamiccl.evaluate.simulate import (
    DELAYED,
    NCCL,
    Contender,
    Player,
    Setting,
    Totals,
    roll_out,
    simple_contenders,
)
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.train.environment import JobCalls

SETTING = Setting(
    system=find_system("b300-nvlink"),
    workload=make_workload(("decode",), Group(1, 8)),
    scenario=find_scenario("busy-host"),
    calls=10_000,
    jobs=8,
)


@pytest.fixture(scope="module")
def rows() -> dict[str, Contender]:
    return {row.name: row for row in simple_contenders(SETTING)}


def played(row: Contender) -> Totals:
    env, player = row.prepare(SETTING)
    return roll_out(env, player, SETTING.calls, seed=0)


def test_a_filter_that_leaves_one_key_where_it_feels_gains_most_of_what_can_be_gained(
    rows: dict[str, Contender],
) -> None:
    levels = Levels.of(rows[NCCL].world, SETTING.scenario)
    assert levels.next_call.sum(axis=1) == pytest.approx(1.0)

    def made(env: JobCalls) -> Player:
        return Filter(env, levels)

    usual, known = (played(rows[name]).total_us.sum() for name in (NCCL, DELAYED))
    mine = played(replace(rows[DELAYED], make=made)).total_us.sum()
    assert known < 0.97 * usual
    assert (usual - mine) > 0.6 * (usual - known)
