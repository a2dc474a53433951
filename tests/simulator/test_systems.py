"""What every simulated system must keep to, the files that describe them, and recorded jobs."""

from pathlib import Path

import numpy as np
import pytest

from dynamiccl.errors import DynamicclError, UserError
from dynamiccl.nccl import Algorithm, Config, Transport
from dynamiccl.simulator import systems
from dynamiccl.simulator.h100 import H100System
from dynamiccl.simulator.record_jobs import Explorer, all_configs
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import QUIET, Call, Group, Launch, Surroundings
from dynamiccl.simulator.toml_table import parse_toml
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.simulator.world import World

SIZES = [1 << 10, 3 << 16, 1 << 22, 1 << 28]


@pytest.fixture(params=systems.SYSTEMS)
def system(request: pytest.FixtureRequest) -> systems.System:
    return systems.find_system(request.param)


def calls(system: systems.System) -> list[Call]:
    shapes = system.groups()
    few = list(dict.fromkeys([shapes[0], shapes[len(shapes) // 2], shapes[-1]]))
    return [Call(g, c, s) for g in few for c in system.collectives() for s in SIZES]


def test_every_cell_of_nccls_has_parts_that_add_up_and_no_other(system: systems.System) -> None:
    assert isinstance(system, systems.ParametricSystem | H100System)
    assert system.contention.num_sms == system.num_sms
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
    call = calls(system)[0]
    known = {a for a, _ in system.cells(call.group, call.collective)}
    [lacking, *_] = [a for a in Algorithm if a not in known]
    with pytest.raises(KeyError):
        system.parts(call, Config(lacking))


# --- Their files ---

TEXT = systems.system_text(systems.system_file("b300-nvlink"))


@pytest.mark.parametrize("name", systems.PARAMETRIC)
def test_text_of_a_file_says_what_the_file_says(name: str) -> None:
    file = systems.system_file(name)
    text = systems.system_text(file, head="by hand\n\nand twice")
    assert parse_toml(systems.SystemFile, text.encode(), where="x") == file


@pytest.mark.parametrize("name", systems.PARAMETRIC)
def test_fitted_numbers_are_in_fitted_systems_only(name: str) -> None:
    file = systems.system_file(name)
    origins = {getattr(file.links, number).origin for number in systems.LINK_NUMBERS}
    origins |= {
        getattr(cell, number).origin for cell in file.cells for number in systems.CELL_NUMBERS
    }
    assert (systems.Origin.FITTED in origins) == (file.kind == "fitted")


def test_a_file_of_one_s_own_is_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace('name = "b300-nvlink"', 'name = "mine"'), encoding="utf-8")
    assert systems.find_system(str(path)).name == "mine"
    assert systems.system_file("gb10-roce").name == "gb10-roce"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('origin = "fitted"', 'origin = "measured"', "'fitted', 'published' or 'prior'"),
        ("per_s = { value = ", "per_s = { value = -", "links.inside_gbytes_per_s.value"),
        ('algorithm = "Tree"', 'algorithm = "Trie"', "unknown algorithm 'Trie'"),
        ('protocol = "LL128"', 'protocol = "LL"', "cell Ring/LL stands there twice"),
        ("num_sms = 148", "num_smss = 148", "num_sms"),
        ('name = "b300-nvlink"', 'name = "B 300"', "B 300"),
    ],
)
def test_a_wrong_file_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in TEXT
    path = tmp_path / "wrong.toml"
    path.write_text(TEXT.replace(old, new), encoding="utf-8")
    with pytest.raises(DynamicclError) as refused:
        systems.find_system(str(path))
    assert said in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_transport_without_figures_is_refused_with_those_that_have_some() -> None:
    system = systems.find_system("b300-nvlink")
    assert isinstance(system, systems.ParametricSystem)
    bare = systems.ParametricSystem(system.file.model_copy(update={"transports": {}}))
    with pytest.raises(UserError, match="'b300-nvlink' has no transport SHM; it has P2P"):
        bare.links_of(Launch(transport=Transport.SHM))


# --- Jobs that they record ---


def explorer(share: float, hold: float) -> tuple[World, Explorer]:
    system, workload = systems.find_system("h100-ib"), make_workload(["decode"], Group(4, 8))
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
