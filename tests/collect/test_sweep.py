"""Sweep files, sizes, walks and splits; and the plan: counts by hand, hours of the simulator."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.grid import Setting, chains, communicators, factor_ladder, parse_size, walks
from dynamiccl.collect.plan import (
    GBYTES_PER_S,
    LATENCY_US,
    START_S,
    START_S_PER_RANK,
    Plan,
    make_plan,
    plan_lines,
)
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.sweep import Sizes, Sweep, load_sweep, parse_sweep, sweep_text
from dynamiccl.errors import InvalidSweep, UserError
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.system import QUIET as UNDISTURBED
from dynamiccl.simulator.system import UNTOUCHED, Call, Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.sizes import size_bin
from tests.collect.benchmark.stand_in import sweep
from tests.collect.parsed import INPUTS

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = """
name = "grid"
system = "box"
collectives = ["AllReduce"]
groups = [{ num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "1M", max = "4M" }
"""


def parse(*changes: str) -> Sweep:
    """Parse the plain sweep with some keys written anew, and new ones added."""
    lines = HEAD.strip().splitlines()
    for change in changes:
        key = change.partition(" = ")[0]
        lines = [line for line in lines if line.partition(" = ")[0] != key]
        lines.append(change)
    return parse_sweep(
        "\n".join(sorted(lines, key=lambda line: line.startswith("["))), where="s.toml"
    )


def group(words: str) -> str:
    return f"groups = [{{ {words} }}]"


@pytest.mark.parametrize(("change", "said"), INPUTS["sweep_mistakes"])
def test_mistake_names_key_value_and_choices(change: str, said: str) -> None:
    with pytest.raises(InvalidSweep) as caught:
        parse(change)
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_example_survives_being_written_down(path: Path) -> None:
    sweep = load_sweep(path)
    feasible = [trial.config for trial in sweep.trials if trial.infeasible is None]
    assert any((config != ABSTAIN) is bool(sweep.file.algorithms) for config in feasible)
    assert sweep.text == path.read_text()
    assert parse_sweep(sweep_text(sweep.file), where="again").trials == sweep.trials


def test_single_trials_and_hosts_that_are_no_nodes() -> None:
    keys = [f"AllReduce:4x8:{1 << 20}:{config}" for config in ("ABSTAIN", "Ring/LL")]
    sweep = parse(f"only = {keys}")
    assert [trial.key for trial in sweep.trials] == keys
    assert parse_sweep(sweep_text(sweep.file), where="again").trials == sweep.trials
    setting = setting_of("num_nodes = 1, ranks_per_node = 72, num_hosts = 18")
    assert (setting.hosts, setting.ranks_per_host, setting.num_ranks) == (18, 4, 72)
    assert setting.key == "AllReduce:1x72:18hosts"


def reasons(*changes: str) -> dict[str, str | None]:
    trials = parse(*changes, 'sizes = { min = "1M", max = "1M" }').trials
    return {trial.config.key: trial.infeasible for trial in trials}


def test_what_nccl_cannot_run_is_a_trial_with_the_reason() -> None:
    """All reasons: tests/kernel/test_nccl.py."""
    gather = 'collectives = ["AllGather"]'
    found = reasons(gather)
    assert len(found) == 1 + 7 * 3
    assert (found["ABSTAIN"], found["Ring/LL128"]) == (None, None)
    assert found["Tree/Simple"] == "AllGather has no Tree"
    old = reasons(gather, 'nccl_version = "2.22.3"')["PAT/Simple"]
    assert old == "PAT needs NCCL 2.23.0 and this is 2.22.3"
    small = parse(gather, "sizes = { list = [256, 512] }").trials
    left = {trial.size_bytes: trial.infeasible for trial in small if trial.config == ABSTAIN}
    assert left == {256: "256 bytes leave nothing to each of 32 ranks", 512: None}
    # A number of channels and a chunk size of 0 are NCCL's own.
    ring = ('algorithms = ["Ring"]', 'protocols = ["Simple"]', 'chunk_sizes = [0, "512K"]')
    found = reasons("num_channels = [0, 65]", 'nccl_version = "2.29.7"', *ring)
    assert found == {
        "ABSTAIN": None,
        "Ring/Simple": None,
        "Ring/Simple/524288B": "a chunk size needs NCCL 2.30.0 and this is 2.29.7",
        "Ring/Simple/65ch": "65 channels are outside 1..64",
        "Ring/Simple/65ch/524288B": "65 channels are outside 1..64",
    }


def setting_of(words: str) -> Setting:
    [setting] = {trial.setting for trial in parse(group(words)).trials}
    return setting


def test_split_makes_communicators_of_one_shape() -> None:
    for text, shape, second in (
        ("MOD 8", (4, 1), (1, 9, 17, 25)),
        ("AND 0x7", (4, 1), (1, 9, 17, 25)),
        ("DIV 8", (1, 8), (*range(8, 16),)),
        ("OR 0x7", (1, 8), (*range(8, 16),)),
        ("MOD 2", (4, 4), (*range(1, 32, 2),)),
    ):
        setting = setting_of(f"num_nodes = 4, ranks_per_node = 8, split = '{text}'")
        assert (setting.num_nodes, setting.ranks_per_node, setting.split) == (*shape, text)
        comms = setting.comms or ()
        assert comms[1] == second
        assert sorted(process for each in comms for process in each) == [*range(32)]
    # Single processes may be left over where that is said.
    job = ("AND 0x17", 3, 8)
    with pytest.raises(ValueError, match=r"'AND 0x17' makes no equal .*'DIV 8'"):
        communicators(*job)
    assert communicators(*job, spare=True) == tuple((k, k + 8) for k in range(8))


def test_sizes_are_read_and_laddered() -> None:
    texts = ("4096", "64K", "64k", "16M", "1GiB", "2 TB", 7)
    assert [*map(parse_size, texts)] == [4096, 65536, 65536, 16 << 20, 1 << 30, 2 << 40, 7]
    assert Sizes(min=1, max=64).ladder() == (16, 32, 64)
    assert Sizes(min=1000, max=27000, factor=3).ladder() == (1000, 3000, 9000, 27000)
    assert Sizes.model_validate({"list": ["1M", 12, 100, 12]}).ladder() == (12, 100, 1 << 20)


@given(low=st.integers(9, 27), octaves=st.integers(0, 9), steps=st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=30)
def test_a_ladder_has_a_size_a_bin_and_a_walk_a_step(low: int, octaves: int, steps: int) -> None:
    sizes = {"min": 1 << low, "max": 1 << (low + octaves), "steps_per_octave": steps}
    ladder = Sizes.model_validate(sizes).ladder()
    bins = range(4 * low, 4 * (low + octaves) + 1, 4 // steps)
    assert [size_bin(size) for size in ladder] == list(bins)
    assert (ladder[0], ladder[-1]) == (1 << low, 1 << (low + octaves))
    assert all(size % 16 == 0 for size in ladder)
    assert len(chains(ladder)) == (steps if octaves else 1)


@given(sizes=st.sets(st.integers(1, 4096), min_size=1, max_size=30))
@settings(deadline=None, max_examples=40)
def test_walks_pass_every_size_once(sizes: set[int]) -> None:
    cut, plain = walks(sizes), chains(sizes)
    assert sorted(size for walk in plain for size in walk) == sorted(sizes)
    passed = [size for walk in cut for size in walk]
    assert sizes <= set(passed)
    assert sum(size in sizes for size in passed) == len(sizes)
    assert len(cut) <= len(plain)
    assert len(passed) <= 2 * len(sizes)
    for walk in (*cut, *plain):
        factor = walk[1] // walk[0] if len(walk) > 1 else 2
        assert walk == factor_ladder(walk[0], walk[-1], factor)


TWO_NODES = "[{ num_nodes = 2, ranks_per_node = 8 }]"


def plan(**keys: str) -> Plan:
    return make_plan(sweep(**keys))


def test_counts_of_a_small_grid_by_hand() -> None:
    found = plan()
    # 3 sizes x (default + 2 algorithms x 2 protocols x 2 channel counts), 2 cycles, the default
    # twice; 9 configs in each cycle, and 9 read-backs.
    assert (found["trials"], found["feasible"], found["infeasible"]) == (27, 27, {})
    assert (found["rounds"], found["measurements"]) == (2, 2 * 30)
    assert "27 feasible trials of 27" in plan_lines(found)[0]
    assert sum(one["share"] for one in found["dominates"]) == pytest.approx(1.0, abs=1e-3)
    assert plan(strategy='{ kind = "random", share = 0.25 }')["measurements"] == 2 * 3 * (2 + 2)


def test_what_cannot_run_is_left_out_and_told() -> None:
    found = plan(algorithms='["Ring", "NVLSTree"]', num_channels="[0]")
    assert found["infeasible"] == {
        "NVLSTree has no LL for AllReduce": 3,
        "NVLSTree needs more than one node": 3,
    }
    assert (found["trials"], found["feasible"], found["measurements"]) == (15, 9, 2 * 3 * (2 + 2))
    assert "     3 trials left out: NVLSTree needs more than one node" in plan_lines(found)
    made = sweep(collectives='["AllGather"]', sizes="{ list = [64] }")
    none = make_plan(made)
    assert (none["feasible"], none["launches"], none["measurements"]) == (0, 0, 0)
    assert none["hours"] == 0
    assert make_plan(replace(made, trials=()))["launches"] == 0
    old = plan(nccl_version='"2.18.1"')
    assert old["refused"].startswith("a sweep of configs needs NCCL 2.24")
    assert plan_lines(old)[-1].startswith("run refuses it, but with --runner simulator: a sweep")
    assert plan(nccl_version='"2.18.1"', algorithms="[]")["refused"] is None
    assert plan(nccl_version='"2.24.3"')["refused"] is None
    with pytest.raises(UserError, match="nothing is known of a group of 513 nodes"):
        plan(groups="[{ num_nodes = 513, ranks_per_node = 8 }]")


def one_config(**keys: str) -> Sweep:
    """One size of one config, one cycle, nothing read back."""
    plain = {
        "groups": TWO_NODES,
        "sizes": '{ min = "1G", max = "1G" }',
        "algorithms": '["Ring"]',
        "protocols": '["Simple"]',
        "num_channels": "[2]",
        "cycles": "1",
        "runner": '{ read_back = false, slow_max = "1T" }',
    }
    return sweep(**(plain | keys))


def test_hours_are_starts_and_simulated_times() -> None:
    made = one_config()
    found = make_plan(made)
    call = Call(Group(2, 8), made.trials[0].setting.collective, 1 << 30)
    ring = Config(Algorithm.Ring, Protocol.Simple, 2)
    h100 = find_system("h100-ib")
    default_s, ring_s = (
        h100.parts(call, config, UNTOUCHED).time_us(UNDISTURBED) / 1e6 for config in (ABSTAIN, ring)
    )
    # One process plays the config, and NCCL's own choice twice; another one the latter alone.
    launches = (found["launches_timed"], found["launches_reference"])
    assert (launches, found["measurements"]) == ((1, 1), 3)
    start_s = START_S + 16 * START_S_PER_RANK
    # Two halves of a synchronising, five timed and a checked call; a warm-up of two calls.
    seconds = 2 * (start_s + 2 * default_s) + 2 * 7 * (2 * default_s + ring_s + 2 * default_s)
    assert found["hours"] == pytest.approx(seconds / 3600, rel=0.01)
    assert found["gpu_hours"] == pytest.approx(16 * found["hours"], rel=0.01)
    slower = make_plan(one_config(simulator='{ system = "rtx5090-sockets" }'))
    assert slower["model"] == "rtx5090-sockets"
    assert slower["hours"] > 2 * found["hours"]


def test_each_rule_that_stands_in_for_a_time_is_told() -> None:
    for key, value, rule in (
        ("groups", "[{ num_nodes = 64, ranks_per_node = 8 }]", "64 x 8: the times of 32 x 8"),
        ("collectives", '["AlltoAll"]', f"2 x 8: {LATENCY_US:g} us and {GBYTES_PER_S:g} GB/s"),
        ("algorithms", '["NVLS"]', "no NVLS Simple for AllReduce: NCCL's own choice runs there"),
    ):
        found = make_plan(one_config(**{key: value}))
        assert [told for told in found["rules"] if rule in told]
        assert any(rule in line for line in plan_lines(found))


@pytest.mark.parametrize(("keys", "said"), INPUTS["not_simulated"])
def test_sweep_outside_the_model_is_refused_before_it_runs(keys: dict[str, str], said: str) -> None:
    """The simulator's rows are in the goldens of sweeps."""
    made = sweep(**keys)
    with pytest.raises(InvalidSweep, match=said):
        SimulatorRunner(made.file).check(made.trials)
