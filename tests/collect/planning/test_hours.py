"""The hours of a plan: by hand from the simulator's times, and what takes them."""

from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from dynamiccl.collect.planning.adaptive import ADAPTIVE, play, with_strategy
from dynamiccl.collect.planning.plan import Plan, make_plan
from dynamiccl.collect.planning.processes import START_S, START_S_PER_RANK
from dynamiccl.collect.planning.show import plan_lines
from dynamiccl.collect.planning.times import GBYTES_PER_S, LATENCY_US, CallTimes
from dynamiccl.collect.runs.carry_out import RunOptions, carry_out
from dynamiccl.collect.sweep.load import Sweep
from dynamiccl.collect.sweep.trial import Setting
from dynamiccl.datasets import store
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
    assert not times.is_modelled
    assert times.call_us(10 * MIB, ABSTAIN) == LATENCY_US + 10 * MIB / (1000 * GBYTES_PER_S)


def test_an_adaptive_sweep_is_played_as_the_simulator_runs_it(tmp_path: Path) -> None:
    made = with_strategy(
        sweep(
            groups=TWO_NODES,
            algorithms='["Ring", "Tree", "NVLSTree"]',
            simulator="{ noise_sigma = 0, tail_probability = 0, drift_sigma = 0 }",
        ),
        ADAPTIVE,
    )
    played = play(made, CallTimes("h100-ib"))
    path = tmp_path / "sweep.toml"
    path.write_text("")
    order = RunOptions(sweep_file=path, out=tmp_path / "out", runner="simulator")
    ran = carry_out(made, order, console=Console(quiet=True))
    rows = store.read(tmp_path / "out")
    assert rows["round"].n_unique() == played.rounds == ran.rounds_done
    assert rows.filter(pl.col("status") == "ok").height == played.measurements
    plan = make_plan(made, played=played)
    assert plan.hours == pytest.approx(played.cost.total_s / 3600, rel=0.01)
    assert "the hours are of a run in the simulator" in "\n".join(plan_lines(plan))


def test_of_many_settings_three_are_played_and_the_rest_goes_by_its_share() -> None:
    one = sweep(groups=TWO_NODES, sizes='{ min = "1M", max = "2M" }')
    four = sweep(
        groups=TWO_NODES,
        sizes='{ min = "1M", max = "2M" }',
        collectives='["AllReduce", "AllGather", "ReduceScatter", "Broadcast"]',
    )
    times = CallTimes("h100-ib")
    alone, many = (play(with_strategy(made, ADAPTIVE), times) for made in (one, four))
    assert (alone.settings, alone.settings_played) == (1, 1)
    assert (many.settings, many.settings_played) == (4, 3)
    assert 3 * alone.cost.total_s < many.cost.total_s < 6 * alone.cost.total_s
