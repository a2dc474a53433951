"""A quiet sweep of the system in which actors train."""

from pathlib import Path

import pytest

from dynamiccl.collect.simulated import simulate
from dynamiccl.train.data import TrainingData, load_data

SWEEP = """
name = "quiet"
system = "b300-nvlink"
collectives = ["AllReduce"]
groups = [{ num_nodes = 1, ranks_per_node = 8 }]
sizes = { min = "64K", max = "64M" }
cycles = 2
[simulator]
system = "b300-nvlink"
seed = 0
"""


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online") / "data"
    simulate(SWEEP, folder)
    return folder


@pytest.fixture(scope="module")
def loaded(data: Path) -> TrainingData:
    return load_data(data, 0, with_costs=True)
