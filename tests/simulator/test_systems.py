"""What every simulated system must keep to, whoever made it."""

import numpy as np
import pytest

from dynamiccl.errors import UnknownName
from dynamiccl.nccl import ABSTAIN, COST_IGNORE, Algorithm, Config
from dynamiccl.simulator.parts import QUIET, Surroundings
from dynamiccl.simulator.system import Call, System
from dynamiccl.simulator.systems import SYSTEMS, find_system

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
