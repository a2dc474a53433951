"""Simulated jobs, whose truth is known: what is told of the trace against the table, played."""

from pathlib import Path

import numpy as np
import pytest
from bench_job import play, table_of

from dynamiccl.datasets.store import read
from dynamiccl.evaluate.job import TABLE, Verdict, answer
from dynamiccl.evaluate.job_calls import Measured, job_of
from dynamiccl.simulator.record_jobs import all_configs
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WORKLOADS
from dynamiccl.simulator.world import World
from tests.data_sets import make_data, sweep_text
from tests.once import once

SWEEP = sweep_text(
    system='"h100-ib-simulated"',
    collectives='["AllReduce"]',
    sizes='{ min = "64K", max = "64M" }',
    cycles=5,
    seed="5\nnoise_sigma = 0.02",
)


@pytest.fixture(name="known", scope="session")
def known_fixture(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    made = once(tmp_path_factory, "job-sweep", lambda folder: make_data(folder / "store", SWEEP))
    return Measured(read(Path(made) / "store"), None, None)


@pytest.mark.parametrize(
    ("name", "scenario", "verdict"),
    [
        ("decode", "quiet", "gain"),
        ("decode", "shared-node", "gain"),
        ("lora", "quiet", "nothing"),
        ("ddp", "quiet", "nothing"),
    ],
)
def test_truth_is_in_interval(name: str, scenario: str, verdict: Verdict, known: Measured) -> None:
    system = find_system("h100-ib")
    workload = WORKLOADS[name](Group(4, 8))
    around = find_scenario(scenario).model_copy(update={"first_use_us": 0.0})
    world = World(system, workload, all_configs(system, workload), around)
    own = play(world, np.zeros(len(world.keys), dtype=np.int64), 7, 600)
    found = answer(job_of(own.calls, own.steps, 8), known)
    played = play(world, table_of(found, world), 7, 600)
    arm = found.arms[TABLE]
    assert found.told["verdict"] == verdict
    assert arm.step is not None
    truths = (
        (arm.communication, 1.0 - played.communication_us / own.communication_us),
        (arm.step, 1.0 - played.job_us / own.job_us),
    )
    for told, truth in truths:
        assert told.low - 1e-9 <= truth <= told.high + 1e-9
