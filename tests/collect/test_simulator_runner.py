"""The simulator as a runner: rows as a real sweep writes them."""

from typing import Any, Final

import pytest

from dynamiccl.collect.runner import Pick, Round
from dynamiccl.collect.simulator import h100
from dynamiccl.collect.simulator.runner import SimulatorRunner
from dynamiccl.collect.sweep.load import Sweep, parse_sweep
from dynamiccl.errors import InvalidSweep
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol

MIB: Final = 1 << 20
GROUP: Final = h100.Group(4, 8)
AR: Final = Collective.AllReduce


def sweep(**keys: str) -> Sweep:
    plain = {
        "name": '"grid"',
        "system": '"sim"',
        "collectives": '["AllReduce"]',
        "groups": "[{ num_nodes = 4, ranks_per_node = 8 }]",
        "sizes": '{ min = "8M", max = "8M" }',
        "simulator": "{ noise_sigma = 0, tail_probability = 0, drift_sigma = 0 }",
    }
    text = "\n".join(f"{key} = {value}" for key, value in (plain | keys).items())
    return parse_sweep(text, where="s.toml")


def measured(made: Sweep) -> dict[str, dict[str, Any]]:
    runner = SimulatorRunner(made.file)
    runner.check(made.trials)
    picks = tuple(Pick(trial) for trial in made.trials if trial.infeasible is None)
    [launch] = runner.launches(Round(0, picks))
    return {
        done.pick.trial.config.key: dict(row)
        for done in runner.run(launch, lambda _: None).measured
        for row in done.rows
    }


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"groups": "[{ num_nodes = 3, ranks_per_node = 8 }]"},
            r"no group of 3 nodes x 8 ranks; choose from 1x2, 1x3,",
        ),
        ({"collectives": '["AlltoAll"]'}, "no AlltoAll; choose from Broadcast, Reduce, AllGather"),
        (
            {"profiles": '[{ name = "shm", transport = "SHM" }]'},
            "knows no launch profiles: remove 'shm'",
        ),
        (
            {"interference": '[{ kind = "gemm", level = 0.5 }]'},
            "no interference 'gemm'; choose from none, congestion",
        ),
    ],
)
def test_sweep_outside_the_model_is_refused_before_it_runs(keys: dict[str, str], said: str) -> None:
    made = sweep(**keys)
    with pytest.raises(InvalidSweep, match=said):
        SimulatorRunner(made.file).check(made.trials)


def test_rows_say_that_they_are_simulated() -> None:
    rows = measured(sweep())
    assert {row["source"] for row in rows.values()} == {"simulator"}
    assert all("simulated" in row["system_description"] for row in rows.values())


def test_default_row_requests_nothing_and_says_what_ran() -> None:
    rows = measured(sweep())
    default = rows["ABSTAIN"]
    assert default["is_default"] is True
    assert default["requested_algorithm"] is default["requested_protocol"] is None
    ran = h100.default_config(GROUP, AR, 8 * MIB)
    assert (
        Config(
            Algorithm.parse(default["actual_algorithm"]), Protocol.parse(default["actual_protocol"])
        )
        == ran
    )
    assert default["time_us"] == rows[ran.key]["time_us"]


def test_row_holds_the_model_s_time_and_bandwidths() -> None:
    row = measured(sweep())["Tree/LL128"]
    time_us = 65.5 + 8 * MIB / (1000 * 98.6 * 0.9)
    assert row["time_us"] == pytest.approx(time_us, rel=1e-12)
    assert row["algbw_gbytes_per_s"] == pytest.approx(8 * MIB / time_us / 1000)
    assert row["busbw_gbytes_per_s"] == pytest.approx(8 * MIB / time_us / 1000 * 2 * 31 / 32)
    assert (row["num_ranks"], row["verified"], row["wrong_values"]) == (32, True, 0)


def test_what_the_group_has_not_is_a_row_with_the_reason() -> None:
    rows = measured(sweep())
    assert rows["NVLS/Simple"]["reason"] == "NCCL has no NVLS/Simple for this group"
    lost = [row for row in rows.values() if row.get("status") == "infeasible"]
    assert lost
    assert all("time_us" not in row and row["statistic"] == "none" for row in lost)


def test_channels_and_chunk_change_the_time_and_are_read_back() -> None:
    rows = measured(sweep(num_channels="[0, 2, 16]", chunk_sizes='[0, "64K"]'))
    assert rows["Ring/Simple/2ch"]["time_us"] != rows["Ring/Simple/16ch"]["time_us"]
    assert rows["Ring/Simple/2ch"]["actual_num_channels"] == 2
    assert rows["Ring/Simple/65536B"]["time_us"] != rows["Ring/Simple"]["time_us"]


def test_second_measurement_of_the_default_in_a_round_has_its_own_noise() -> None:
    noisy = sweep(simulator="{ noise_sigma = 0.1, drift_sigma = 0.1 }")
    runner = SimulatorRunner(noisy.file)
    default = next(trial for trial in noisy.trials if trial.config == ABSTAIN)
    [launch] = runner.launches(Round(0, (Pick(default, 0), Pick(default, 1))))
    first, second = (m.rows[0] for m in runner.run(launch, lambda _: None).measured)
    assert first["time_us"] != second["time_us"]
    assert (first["repeat"], second["repeat"]) == (0, 1)


def test_congested_rows_say_so() -> None:
    beside = '[{ kind = "congestion", level = 1.0 }]'
    row = measured(sweep(interference=beside))["Tree/LL128"]
    assert (row["interference_kind"], row["interference_level"]) == ("congestion", 1.0)
    assert row["time_us"] == pytest.approx(65.5 + 2 * 8 * MIB / (1000 * 98.6 * 0.9))
