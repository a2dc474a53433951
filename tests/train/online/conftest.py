"""A quiet sweep of the system in which actors train, and small networks and players for it."""

from pathlib import Path

import pytest

from dynamiccl.collect.simulated import simulate
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.online import network_of, orders_of
from dynamiccl.train.online.a3c import ActorCritic, Player
from dynamiccl.train.recipe import Recipe

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
PLACE = "b300-nvlink:decode:busy-host"
SMALL = (
    f"places={PLACE}",
    *("actors=2", "jobs=2", "num_steps=3", "episode_rounds=4", "hidden_sizes=16"),
    *("steps=8", "steps_per_epoch=4"),
)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online") / "data"
    simulate(SWEEP, folder)
    return folder


@pytest.fixture(scope="session")
def loaded(data: Path) -> TrainingData:
    return load_data(data, 0, with_costs=True)


def small_network(loaded: TrainingData, recipe: Recipe) -> ActorCritic:
    return network_of(loaded, recipe, uses_cost=True)


def small_player(loaded: TrainingData, recipe: Recipe) -> Player:
    return orders_of(loaded, recipe, 0)[0].player(recipe.state_units)
