"""What simulated systems must keep to, their files, and jobs in a world of changing links."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl.errors import DynamicclError, UserError
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol, Transport
from dynamiccl.simulator import systems
from dynamiccl.simulator.h100 import H100System
from dynamiccl.simulator.record_jobs import Explorer, all_configs
from dynamiccl.simulator.scenario import (
    BurstsLink,
    Jitter,
    MarkovLink,
    Scenario,
    TraceLink,
    find_scenario,
    shipped_scenarios,
)
from dynamiccl.simulator.system import QUIET, Call, Group, Launch, Surroundings
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.toml_table import parse_toml
from dynamiccl.simulator.workloads import WORKLOADS, make_workload
from dynamiccl.simulator.world import Noise, World
from tests.simulator.test_physics import iteration_us

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


SHAPE = Group(4, 8)
CONFIGS = [
    ABSTAIN,
    Config(Algorithm.Ring, Protocol.Simple),
    Config(Algorithm.Ring, Protocol.LL),
    Config(Algorithm.Tree, Protocol.LL128),
    Config(Algorithm.NVLSTree, Protocol.Simple),
]
SILENT = Scenario(meaning="", link=(), jitter=Jitter(sigma=0, drift_sigma=0), first_use_us=0.0)


def world(scenario: Scenario = SILENT, *names: str) -> World:
    workload = make_workload(names or ("megatron",), SHAPE)
    return World(find_system("h100-ib"), workload, CONFIGS, scenario)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_can_be_played_on_nodes_of_gpus(name: str) -> None:
    made = world(SILENT, name)
    assert np.isfinite(made.quiet_us[:, 0]).all()
    jobs = made.jobs(8, 0)
    for _ in range(len(made.order)):
        assert (jobs.step(np.zeros(8, dtype=np.int64)).true_us > 0).all()


def test_calls_come_in_the_order_of_the_loop_round_and_round() -> None:
    made = world()
    jobs = made.jobs(1, 3)
    keys = [int(jobs.step(np.zeros(1, dtype=np.int64)).key[0]) for _ in range(2 * len(made.order))]
    turns = [np.roll(made.order, -start).tolist() for start in range(len(made.order))]
    assert keys[: len(made.order)] in turns
    assert keys[: len(made.order)] == keys[len(made.order) :]


def test_times_are_those_of_the_system_under_the_surroundings() -> None:
    scenario = find_scenario("congested").model_copy(update={"switch_us": 0.0, "first_use_us": 0.0})
    made = world(scenario)
    jobs = made.jobs(64, 1)
    seen = set()
    for _ in range(300):
        place, key, around = (
            jobs.place,
            jobs.key,
            (jobs.intra.copy(), jobs.inter.copy(), jobs.host.copy()),
        )
        oracle = jobs.oracle_us()
        ran = jobs.step(np.ones(64, dtype=np.int64))
        assert (ran.true_us == oracle[np.arange(64), 1]).all()
        for job in (0, 17, 63):
            intra, inter, host = (each[job] for each in around)
            parts = made.system.parts(made.keys[key[job]], CONFIGS[1])
            beside = made.beside_us[place[job]] > 0
            compute = made.system.contention.surroundings(float(beside)).compute
            expected = parts.time_us(
                Surroundings(intra=intra, inter=inter, host=host, compute=compute)
            )
            assert ran.true_us[job] == pytest.approx(expected)
            seen.add(inter)
    assert len(seen) > 4


def test_compute_beside_a_call_ends_as_the_contention_of_the_system_says() -> None:
    system = find_system("b300-nvlink")
    workload = make_workload(["lora", "decode"], Group(1, 8))
    channels = [Config(Algorithm.Ring, Protocol.LL128, n) for n in (2, 8, 24)]
    made = World(system, workload, [ABSTAIN, *channels], SILENT)
    jobs = made.jobs(64, 0)
    trap = {}
    for step in range(200):
        place, key = jobs.place, jobs.key
        action = np.full(64, step % 4)
        ran = jobs.step(action)
        for job in (0, 40):
            parts = system.parts(made.keys[key[job]], made.configs[action[job]])
            beside_us = made.beside_us[place[job]]
            expected = made.before_us[place[job]] + (
                iteration_us(system.contention, parts, made.keys[key[job]].size_bytes, beside_us)
                if beside_us
                else parts.quiet_us
            )
            if not ran.changed[job]:
                assert ran.lasted_us[job] == pytest.approx(expected)
            trap[int(key[job]), int(action[job])] = (ran.true_us[job], ran.lasted_us[job])
    assert len(trap) > 20


def test_congestion_is_the_same_whatever_is_chosen() -> None:
    made = world(find_scenario("congested"))
    first, second = made.jobs(16, 5), made.jobs(16, 5)
    random = np.random.default_rng(0)
    for _ in range(500):
        assert (first.inter == second.inter).all()
        assert (first.key == second.key).all()
        first.step(np.zeros(16, dtype=np.int64))
        mask = made.mask[second.key]
        second.step((random.random(mask.shape) * mask).argmax(axis=1))


def test_a_change_of_config_and_a_first_use_cost_once() -> None:
    made = world(SILENT.model_copy(update={"switch_us": 7.0, "first_use_us": 1000.0}), "decode")
    jobs = made.jobs(1, 0)
    base = made.quiet_us
    spent: dict[int, list[float]] = {}
    first: dict[int, int] = {}
    for step in range(300):
        key = int(jobs.key[0])
        first.setdefault(key, step)
        action = 1 if len(spent.get(key, [])) % 4 >= 2 else 0
        ran = jobs.step(np.array([action]))
        spent.setdefault(key, []).append(float(ran.true_us[0] - base[key, action]))
    for extras in spent.values():
        assert set(np.round(extras[4:], 6)) <= {0.0, 7.0}
    total = sum(round(extra) for extras in spent.values() for extra in extras if extra > 500)
    used = {int(made.algorithm[key, action]) for key in spent for action in (0, 1)}
    assert total // 1000 == len(used)


def test_an_update_changes_the_times_of_its_algorithms_for_good() -> None:
    made = world(find_scenario("update").model_copy(update={"first_use_us": 0.0, "switch_us": 0.0}))
    jobs = made.jobs(4, 0)
    ratios = []
    for _ in range(20_000):
        quiet = made.quiet_us[jobs.key, 0]
        algorithm = made.algorithm[jobs.key, 0]
        ran = jobs.step(np.zeros(4, dtype=np.int64))
        ratios.append(np.where(algorithm == Algorithm.NVLS, ran.true_us / quiet, np.nan))
    course = np.array(ratios)
    assert np.nanmax(course[:50]) == 1.0
    assert np.nanmin(course[-2_000:]) == pytest.approx(1.3)


def test_shipped_scenarios_have_a_meaning_and_noise_has_heavy_tails() -> None:
    noise = Noise(Jitter(sigma=0.1, drift_sigma=0.0), None, 100_000)
    drawn = noise.log_factors(np.random.default_rng(0))
    robust = 1.4826 * np.median(np.abs(drawn))
    assert robust == pytest.approx(0.1, rel=0.02)
    assert (np.abs(drawn) > 0.4).mean() > 20 * 6.3e-5  # the normal's share beyond four sigmas
    assert {"quiet", "congested", "busy-host", "update", "shared-uplink"} <= {*shipped_scenarios()}
    for name in shipped_scenarios():
        assert find_scenario(name).meaning


# --- Links that change ---

FOLLOWING = [[0.0, 0.7, 0.3], [0.6, 0.0, 0.4], [0.5, 0.5, 0.0]]
DWELL = [200.0, 60.0, 20.0]


def markov(slowdowns: Any, dwell_us: Any, following: Any, links: int = 1) -> MarkovLink:
    facts = {"slowdowns": slowdowns, "dwell_us": dwell_us, "following": following, "links": links}
    return MarkovLink(on="inter", kind="markov", **facts)


def bursts(pause_us: float, shortest_us: float, tail: float, share: Any) -> BurstsLink:
    facts: Any = {"pause_us": pause_us, "shortest_us": shortest_us, "tail": tail, "share": share}
    return BurstsLink(on="inter", kind="bursts", **facts)


def trace(shares: Any, interval_us: float) -> TraceLink:
    return TraceLink(on="inter", kind="trace", shares=shares, interval_us=interval_us)


def course(
    link: MarkovLink | BurstsLink | TraceLink, *, jobs: int, steps: int, elapsed_us: float = 1.0
) -> np.ndarray:
    random = np.random.default_rng(0)
    process = link.play(jobs, random)
    next(process)
    elapsed = np.full(jobs, elapsed_us)
    return np.stack([process.send(elapsed).copy() for _ in range(steps)])


def test_congestion_stays_as_long_and_takes_the_share_of_time_that_it_says() -> None:
    link = markov([1.0, 2.0, 4.0], DWELL, FOLLOWING)
    seen = course(link, jobs=200, steps=4_000)
    for level, dwell in zip((1.0, 2.0, 4.0), DWELL, strict=True):
        inside = seen == level
        leaves = (inside[:-1] & ~inside[1:]).sum()
        assert inside[:-1].sum() / leaves == pytest.approx(dwell, rel=0.1)
    # Shares are the usual ones from the start. Balance by hand: flow into each state equals flow
    # out of it.
    seen = course(link, jobs=4_000, steps=50)
    shares = [float((seen == level).mean()) for level in (1.0, 2.0, 4.0)]
    rates = 1.0 / np.array(DWELL)
    flow = (link.usual() * rates) @ np.array(FOLLOWING)
    assert flow == pytest.approx(link.usual() * rates)
    assert shares == pytest.approx(link.usual(), abs=0.03)


def test_what_changes_does_so_by_time_and_of_several_links_the_slowest_counts() -> None:
    slow, fast = (
        (np.diff(course(markov([1.0, 2.0], [100.0, 100.0], [[0, 1], [1, 0]]), jobs=100, steps=1_000,
                        elapsed_us=each), axis=0) != 0).mean()
        for each in (1.0, 10.0)
    )  # fmt: skip
    assert fast == pytest.approx(1 - np.exp(-0.1), rel=0.1)
    assert slow == pytest.approx(1 - np.exp(-0.01), rel=0.1)
    args = ([1.0, 3.0], [90.0, 10.0], [[0, 1], [1, 0]])
    one = (course(markov(*args), jobs=2_000, steps=20) > 1).mean()
    four = (course(markov(*args, links=4), jobs=2_000, steps=20) > 1).mean()
    assert four == pytest.approx(1 - (1 - one) ** 4, abs=0.03)


def test_bursts_take_their_share_and_a_trace_comes_round_from_anywhere() -> None:
    seen = course(bursts(90.0, 5.0, 2.0, (0.5, 0.75)), jobs=400, steps=3_000)
    busy = seen > 1
    assert seen[busy].min() >= 2.0
    assert seen[busy].max() <= 4.0
    # Pareto's mean: shortest x tail / (tail - 1) = 10 us of bursts for 90 of pauses.
    assert busy.mean() == pytest.approx(0.1, abs=0.03)
    seen = course(trace([1.0, 0.5, 0.25], 10.0), jobs=300, steps=60)
    assert set(np.unique(seen)) == {1.0, 2.0, 4.0}
    assert (seen[:30] == seen[30:]).all()
    assert (seen == 4.0).mean() == pytest.approx(1 / 3, abs=0.02)
    assert len(np.unique(seen[0])) == 3
