"""Decision tables of four recipes, from a simulated sweep to the artifact, as their user goes.

Fits are short, at fixed seeds and on one thread. Machines differ in the last bits, and what a
network learns with them: one cell in a hundred may be another.
"""

from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from dynamiccl.nccl import Collective, Config
from dynamiccl.serve.table import DecisionTable
from tests.golden.command import dynamiccl
from tests.golden.golden import Golden, same_share
from tests.stores import new_store

SWEEP: Final = """
name = "tables"
system = "sim-4x8"
collectives = ["AllReduce", "AllGather"]
algorithms = ["Ring", "Tree", "NVLSTree"]
num_channels = [0, 4, 16]
groups = [{ num_nodes = 2, ranks_per_node = 8 }, { num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "64K", max = "1G", steps_per_octave = 2 }
nccl_version = "2.27.5"
cycles = 2
[simulator]
seed = 3
"""
_NETWORK: Final = (
    *("steps=600", "steps_per_epoch=150", "hidden_sizes=32", "num_members=2"),
    *("caution=margin", "unanimous=false", "abstain_margins=0.02"),
)
RECIPES: Final[dict[str, tuple[str, ...]]] = {
    "gaussian-process": ("alpha=0.02",),
    "ddqn-dueling": _NETWORK,
    "ddqn-actions": _NETWORK,
    "cql": _NETWORK,
}


def make_tables(recipe: str, directory: Path) -> Any:
    """The config of each size bin, None for NCCL's own choice; table by table, by collective."""
    torch.set_num_threads(1)
    new_store(directory)
    (directory / "sweep.toml").write_text(SWEEP)
    settings = [word for each in RECIPES[recipe] for word in ("--set", each)]
    for program, *words in (
        ("collect", "run", "sweep.toml", "--runner", "simulator", "--out", "data", "--json"),
        ("train", "fit", "--data", "data", "--recipe", recipe, *settings, "--seed", 7, "--json"),
    ):
        done = dynamiccl(program, *words, directory=directory)
        assert done.code == 0, done.err
    run = done.json["run_id"]
    done = dynamiccl("deploy", "export", run, "--out", "artifact", directory=directory)
    assert done.code == 0, done.err
    paths = sorted(p for p in (directory / "artifact" / "tables").rglob("*") if p.is_file())
    return [
        decision(table.at(collective, index))
        for table in map(DecisionTable.read, paths)
        for collective in (Collective.AllReduce, Collective.AllGather)
        for index in range(table.first_bin, table.first_bin + table.num_bins)
    ]


def decision(config: Config | None) -> str | None:
    return None if config is None else config.key


GOLDENS: Final = tuple(
    Golden(f"tables-{recipe}", partial(make_tables, recipe), same_share(0.99)) for recipe in RECIPES
)
