"""Decision tables of two recipes, from a simulated sweep to the artifact, as their user goes.

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
cycles = 1
[simulator]
seed = 3
"""
_NETWORK: Final = (
    *("steps=600", "steps_per_epoch=150", "hidden_sizes=32", "num_members=2"),
    *("unanimous=false", "abstain_margins=0.02"),
)
RECIPES: Final[dict[str, tuple[str, ...]]] = {
    "gaussian-process": ("alpha=0.02",),
    "ddqn-dueling": _NETWORK,
}


def run(program: str, *words: object, directory: Path) -> Any:
    """The document that a command prints."""
    done = dynamiccl(program, *words, "--json", directory=directory)
    assert done.code == 0, done.err
    return done.json


def simulate(directory: Path, sweep: str) -> None:
    """Run a sweep in the simulator; its rows are in `data`, and an empty store beside it.

    It must be of one cycle: each makes a part, named by a hash of its content, time stamps
    included. Rows are read in the order of these names, and a fit goes by it.
    """
    new_store(directory)
    (directory / "sweep.toml").write_text(sweep)
    words = ("run", "sweep.toml", "--runner", "simulator", "--out", "data")
    assert run("collect", *words, directory=directory)["rounds_done"] == 1


def make_tables(recipe: str, directory: Path) -> Any:
    """The config of each size bin, None for NCCL's own choice; table by table, by collective."""
    torch.set_num_threads(1)
    simulate(directory, SWEEP)
    settings = [word for each in RECIPES[recipe] for word in ("--set", each)]
    how = ("--data", "data", "--recipe", recipe, *settings, "--seed", 7)
    fitted = run("train", "fit", *how, directory=directory)
    run("deploy", "export", fitted["run_id"], "--out", "artifact", directory=directory)
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
