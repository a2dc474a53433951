"""The hours of a plan: by hand from the simulator's times, and what takes them."""

import pytest

from dynamiccl.collect.planning.plan import Plan, make_plan
from dynamiccl.collect.planning.processes import START_S, START_S_PER_RANK
from dynamiccl.collect.planning.show import plan_lines
from dynamiccl.collect.planning.times import GBYTES_PER_S, LATENCY_US, CallTimes
from dynamiccl.collect.sweep.load import Sweep
from dynamiccl.collect.sweep.trial import Setting
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.parts import QUIET as UNDISTURBED
from dynamiccl.simulator.system import UNTOUCHED, Call
from dynamiccl.simulator.systems import find_system
from tests.collect.benchmark.sweeps import sweep

MIB = 1 << 20
TWO_NODES = "[{ num_nodes = 2, ranks_per_node = 8 }]"
RING = Config(Algorithm.Ring, Protocol.Simple, 2)


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


def setting_of(made: Sweep) -> Setting:
    return made.trials[0].setting


def words(plan: Plan) -> list[str]:
    return [part.what for part in plan.dominates]


def test_hours_are_starts_and_the_simulators_times_of_every_call() -> None:
    made = one_config()
    found = make_plan(made)
    call = Call(Group(2, 8), setting_of(made).collective, 1 << 30)
    h100 = find_system("h100-ib")
    default_s, ring_s = (
        h100.parts(call, config, UNTOUCHED).time_us(UNDISTURBED) / 1e6 for config in (ABSTAIN, RING)
    )
    # One process plays the config, and NCCL's own choice twice; another one the latter alone.
    assert (found.launches_timed, found.launches_reference, found.measurements) == (1, 1, 3)
    start_s = START_S + 16 * START_S_PER_RANK
    # Two halves of a synchronising, five timed and a checked call; a warm-up of two calls.
    seconds = 2 * (start_s + 2 * default_s) + 2 * 7 * (2 * default_s + ring_s + 2 * default_s)
    assert found.hours == pytest.approx(seconds / 3600, rel=0.01)
    assert found.gpu_hours == pytest.approx(16 * found.hours, rel=0.01)


def test_one_channel_of_a_large_message_is_what_takes_the_time() -> None:
    found = make_plan(one_config(num_channels="[1]", sizes='{ min = "8G", max = "8G" }'))
    assert words(found)[1] == "1 or 2 channels, 1 GiB and above"
    bounded = make_plan(
        one_config(
            num_channels="[0, 1]",
            sizes='{ min = "8G", max = "8G" }',
            runner="{ read_back = false }",
        )
    )
    assert "1 or 2 channels, 1 GiB and above" not in words(bounded)
    [reason] = bounded.needless
    assert "(runner.slow_max)" in reason


def test_a_slower_machine_takes_longer() -> None:
    h100, roce = (
        make_plan(one_config(simulator=f'{{ system = "{name}" }}'))
        for name in ("h100-ib", "rtx5090-sockets")
    )
    assert (h100.model, roce.model) == ("h100-ib", "rtx5090-sockets")
    assert roce.hours > 2 * h100.hours


def test_channels_that_run_alike_are_planned_once() -> None:
    made = one_config(num_channels="[32, 64]", runner='{ slow_max = "1T" }')
    found = make_plan(made)
    assert found.needless == {
        "NCCL runs as many channels as for another count, which is measured": 1
    }


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (
            {"groups": "[{ num_nodes = 64, ranks_per_node = 8 }]"},
            "no group of 64 x 8: the times of",
        ),
        (
            {"collectives": '["AlltoAll"]'},
            f"no AlltoAll: {LATENCY_US:g} us and {GBYTES_PER_S:g} GB/s",
        ),
        ({"algorithms": '["NVLS"]'}, "no NVLS Simple for AllReduce: NCCL's own choice runs there"),
        (
            {"profiles": '[{ name = "sock", env = { NCCL_NET = "Socket" } }]'},
            "does not model the profile 'sock'",
        ),
    ],
)
def test_each_rule_that_stands_in_for_a_time_is_told(keys: dict[str, str], rule: str) -> None:
    found = make_plan(one_config(**keys))
    assert [told for told in found.rules if rule in told]
    assert any(rule in line for line in plan_lines(found))


def test_what_no_model_knows_has_a_latency_and_a_bandwidth() -> None:
    made = one_config(collectives='["AlltoAll"]')
    times = CallTimes("h100-ib").of(setting_of(made))
    assert times.call_us(10 * MIB, ABSTAIN) == LATENCY_US + 10 * MIB / (1000 * GBYTES_PER_S)


def test_an_adaptive_sweeps_hours_are_the_most_that_it_may_take() -> None:
    keys = {"groups": TWO_NODES, "sizes": '{ min = "1M", max = "1G" }', "runner": "{}"}
    several = '["Ring", "Tree", "NVLSTree"]'

    def adaptive(max_rounds: int) -> Plan:
        strategy = f'{{ kind = "adaptive", max_rounds = {max_rounds} }}'
        return make_plan(one_config(**keys, algorithms=several, strategy=strategy))

    one, two, eight = map(adaptive, (1, 2, 8))
    assert one.hours < two.hours < eight.hours < 8 * one.hours
    assert any(line.startswith(f"at most {eight.hours:g} hours") for line in plan_lines(eight))
