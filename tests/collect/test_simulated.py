"""The simulator as a runner: rows as a real sweep writes them."""

from typing import Any, Final

import pytest

from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.sweep import Sweep, parse_sweep
from dynamiccl.errors import InvalidSweep
from dynamiccl.nccl import ABSTAIN, Collective
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.systems import SYSTEMS, find_system

MIB: Final = 1 << 20
GROUP: Final = Group(4, 8)
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
    trials = [trial for trial in made.trials if trial.infeasible is None]
    [launch] = runner.launches(0, trials)
    return {
        trial.config.key: dict(row)
        for trial, rows in runner.run(launch, lambda _: None).measured
        for row in rows
    }


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"groups": "[{ num_nodes = 3, ranks_per_node = 8 }]"},
            r"no group of 3x8; choose from 1x2, 1x3,",
        ),
        ({"collectives": '["AlltoAll"]'}, "no AlltoAll; choose from Broadcast, Reduce, AllGather"),
        (
            {"profiles": '[{ name = "shm", transport = "SHM" }]'},
            "knows no launch profiles of 'h100-ib': remove 'shm'",
        ),
        (
            {"interference": '[{ kind = "cpu", level = 0.5 }]'},
            "no interference cpu; choose from none, congestion",
        ),
        (
            {"nccl_version": '"2.29.2"'},
            "names NCCL 2.29.2, and the simulated system 'h100-ib' runs 2.27.5; write 2.27.5, ",
        ),
    ],
)
def test_sweep_outside_the_model_is_refused_before_it_runs(keys: dict[str, str], said: str) -> None:
    made = sweep(**keys)
    with pytest.raises(InvalidSweep, match=said):
        SimulatorRunner(made.file).check(made.trials)


def test_channels_and_chunk_change_the_time_and_are_read_back() -> None:
    rows = measured(sweep(num_channels="[0, 2, 16]", chunk_sizes='[0, "64K"]'))
    assert rows["Ring/Simple/2ch"]["time_us"] != rows["Ring/Simple/16ch"]["time_us"]
    assert rows["Ring/Simple/2ch"]["actual_num_channels"] == 2
    assert rows["Ring/Simple/65536B"]["time_us"] != rows["Ring/Simple"]["time_us"]


NODE = "[{ num_nodes = 1, ranks_per_node = 8 }]"
B300 = '{ system = "b300-nvlink", noise_sigma = 0, tail_probability = 0, drift_sigma = 0 }'


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_shipped_system_runs(name: str) -> None:
    group = find_system(name).groups()[-1]
    quiet = f'{{ system = "{name}", noise_sigma = 0, tail_probability = 0, drift_sigma = 0 }}'
    shape = f"[{{ num_nodes = {group.num_nodes}, ranks_per_node = {group.ranks_per_node} }}]"
    rows = measured(sweep(groups=shape, simulator=quiet))
    parts = find_system(name).parts(Call(group, AR, 8 * MIB), ABSTAIN)
    default = rows["ABSTAIN"]
    assert default["time_us"] == pytest.approx(parts.quiet_us)
    assert default["actual_num_channels"] == parts.num_channels
    assert default["nccl_version"] == str(find_system(name).nccl_version)
    assert "simulated" in default["system_description"]


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (
            '{ name = "big", env = { NCCL_BUFFSIZE = "8388608" } }',
            r"sets NCCL_BUFFSIZE, which .* not model",
        ),
        (
            '{ name = "odd", env = { NCCL_NTHREADS = "many" } }',
            r"profile 'odd': invalid literal for int\(\) with base 10: 'many'",
        ),
    ],
)
def test_a_profile_that_is_not_modelled_is_refused(profile: str, said: str) -> None:
    made = sweep(groups=NODE, simulator=B300, profiles=f"[{profile}]")
    with pytest.raises(InvalidSweep, match=said):
        SimulatorRunner(made.file).check(made.trials)
