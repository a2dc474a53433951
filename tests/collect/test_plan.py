"""The plan of a sweep: counts by hand, and hours from the simulator's times."""

from dataclasses import replace

import pytest

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
from dynamiccl.collect.sweep import Sweep
from dynamiccl.errors import InvalidSweep, UserError
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.system import QUIET as UNDISTURBED
from dynamiccl.simulator.system import UNTOUCHED, Call, Group
from dynamiccl.simulator.systems import find_system
from tests.collect.benchmark.stand_in import sweep
from tests.collect.parsed import INPUTS

TWO_NODES = "[{ num_nodes = 2, ranks_per_node = 8 }]"


def plan(**keys: str) -> Plan:
    return make_plan(sweep(**keys))


def test_counts_of_a_small_grid_by_hand_and_their_lines() -> None:
    found = plan()
    # 3 sizes x (default + 2 algorithms x 2 protocols x 2 channel counts), 2 cycles, the default
    # twice; 9 configs in each cycle, and 9 read-backs.
    assert (found["trials"], found["feasible"], found["infeasible"]) == (27, 27, {})
    assert (found["rounds"], found["measurements"]) == (2, 2 * 30)
    first, second, third, *shares = plan_lines(found)
    assert first == (
        "sweep grid on box: 27 feasible trials of 27, exhaustive, 2 rounds, about 60 measurements"
    )
    assert second == (
        "5 processes: 2 timed, 2 for NCCL's untouched default, 1 to read back what runs"
    )
    assert third.startswith("about 0.")
    assert "of the time: starts of processes" in shares[0]
    assert sum(one["share"] for one in found["dominates"]) == pytest.approx(1.0, abs=1e-3)
    assert plan(strategy='{ kind = "random", share = 0.25 }')["measurements"] == 2 * 3 * (2 + 2)


def test_what_cannot_run_is_left_out_with_its_reason_and_is_no_measurement() -> None:
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


def test_a_release_that_run_refuses_is_told_before() -> None:
    old = plan(nccl_version='"2.18.1"')
    assert old["refused"].startswith("a sweep of configs needs NCCL 2.24")
    assert plan_lines(old)[-1].startswith("run refuses it, but with --runner simulator: a sweep")
    assert plan(nccl_version='"2.18.1"', algorithms="[]")["refused"] is None
    assert plan(nccl_version='"2.24.3"')["refused"] is None


def test_a_group_far_beyond_the_model_has_no_plan() -> None:
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


def test_hours_are_starts_and_the_simulators_times_of_every_call() -> None:
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


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (
            {"groups": "[{ num_nodes = 64, ranks_per_node = 8 }]"},
            "no group of 64 x 8: the times of 32 x 8",
        ),
        (
            {"collectives": '["AlltoAll"]'},
            f"no AlltoAll of 2 x 8: {LATENCY_US:g} us and {GBYTES_PER_S:g} GB/s",
        ),
        ({"algorithms": '["NVLS"]'}, "no NVLS Simple for AllReduce: NCCL's own choice runs there"),
    ],
)
def test_each_rule_that_stands_in_for_a_time_is_told(keys: dict[str, str], rule: str) -> None:
    found = make_plan(one_config(**keys))
    assert [told for told in found["rules"] if rule in told]
    assert any(rule in line for line in plan_lines(found))


def test_an_adaptive_sweeps_hours_are_the_most_that_it_may_take() -> None:
    keys = {"groups": TWO_NODES, "sizes": '{ min = "1M", max = "1G" }', "runner": "{}"}
    several = '["Ring", "Tree", "NVLSTree"]'

    def adaptive(max_rounds: int) -> Plan:
        strategy = f'{{ kind = "adaptive", max_rounds = {max_rounds} }}'
        return make_plan(one_config(**keys, algorithms=several, strategy=strategy))

    one, two, eight = map(adaptive, (1, 2, 8))
    assert one["hours"] < two["hours"] < eight["hours"] < 8 * one["hours"]
    first, _, hours, *_ = plan_lines(eight)
    assert "adaptive, at most 8 rounds" in first
    assert hours.startswith(f"at most {eight['hours']:g} hours")
    strategy, budget = '{ kind = "adaptive", max_rounds = 4 }', "{ max_measurements = 7 }"
    assert plan(strategy=strategy, budget=budget)["measurements"] <= 7


@pytest.mark.parametrize(("keys", "said"), INPUTS["not_simulated"])
def test_sweep_outside_the_model_is_refused_before_it_runs(keys: dict[str, str], said: str) -> None:
    """The simulator's rows are in the goldens of sweeps."""
    made = sweep(**keys)
    with pytest.raises(InvalidSweep, match=said):
        SimulatorRunner(made.file).check(made.trials)
