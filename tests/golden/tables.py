"""Decision tables of two recipes, from a simulated sweep to the artifact, as their user goes.

Fits are short, at fixed seeds and on one thread. And the bytes of a table, which plugins read.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any, Final

from dynamiccl.nccl import VALID_PROTOCOLS, Collective, Config
from dynamiccl.serve.table import DecisionTable
from tests.data_sets import sweep_text
from tests.golden.command import dynamiccl
from tests.golden.golden import Golden
from tests.stores import new_store

#: Of one cycle: each makes a part, named by a hash of its content, time stamps included. Rows are
#: read in the order of these names, and a fit goes by it.
SWEEP: Final = sweep_text(
    name='"tables"',
    algorithms='["Ring", "Tree", "NVLSTree"]\nnum_channels = [0, 4, 16]',
    groups="[{ num_nodes = 2, ranks_per_node = 8 }, { num_nodes = 4, ranks_per_node = 8 }]",
    sizes='{ min = "64K", max = "1G", steps_per_octave = 2 }',
    cycles=1,
)
_NETWORK: Final = (
    *("steps=600", "steps_per_epoch=150", "hidden_sizes=32", "num_members=2"),
    *("unanimous=false", "abstain_margins=0.02"),
)
RECIPES: Final[dict[str, tuple[str, ...]]] = {
    "gaussian-process": ("alpha=0.02",),
    "ddqn-dueling": _NETWORK,
}


def _make(recipe: str, directory: Path) -> Any:
    """The config of each size bin, None for NCCL's own choice; table by table, by collective."""
    new_store(directory)
    (directory / "sweep.toml").write_text(SWEEP)

    def run(program: str, *words: object) -> Any:
        code, said = dynamiccl(program, *words, "--json", directory=directory)
        assert code == 0, words
        return said

    run("collect", "run", "sweep.toml", "--runner", "simulator", "--out", "data")
    settings = [word for each in RECIPES[recipe] for word in ("--set", each)]
    fit = ("fit", "--data", "data", "--recipe", recipe, *settings, "--seed", 7)
    run("deploy", "export", run("train", *fit)["run_id"], "--out", "artifact")
    paths = sorted((directory / "artifact" / "tables").rglob("*.*"))
    return [
        config and config.key
        for table in map(DecisionTable.read, paths)
        for collective in (Collective.AllReduce, Collective.AllGather)
        for index in range(table.first_bin, table.first_bin + table.num_bins)
        for config in [table.at(collective, index)]
    ]


def _bytes(_: Path) -> str:
    """Each Config that NCCL has, and None, at 40 sizes."""
    rows = []
    for each in (collective for collective in Collective if collective.tunable):
        cells = [
            (a, p) for a, protocols in VALID_PROTOCOLS[each].items() for p in sorted(protocols)
        ]
        configs = [None, *(Config(*cell, 1 + number) for number, cell in enumerate(cells))]
        rows.append([configs[index % len(configs)] for index in range(40)])
    table = DecisionTable.from_configs(rows, num_nodes=2, num_ranks=16, first_bin=20)
    return hashlib.sha256(table.to_bytes()).hexdigest()


GOLDENS: Final = (
    Golden("tables-bytes", _bytes),
    *(Golden(f"tables-{name}", partial(_make, name), decisions=True) for name in RECIPES),
)
