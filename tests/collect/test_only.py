"""`only` in a sweep file: single tasks of the grid, under NCCL's default and one config each."""

import pytest

from dynamiccl.collect.sweep import parse_sweep, sweep_text
from dynamiccl.errors import InvalidSweep
from tests.collect.test_sweep import HEAD

ONLY = """
[[only]]
collective = "AllReduce"
num_nodes = 4
ranks_per_node = 8
sizes = ["1M", "2M"]
algorithm = "Ring"
protocol = "LL"
"""


def test_only_leaves_single_tasks_under_the_default_and_one_config() -> None:
    sweep = parse_sweep(HEAD + ONLY, where="sweep.toml")
    keys = [trial.key for trial in sweep.trials]
    assert keys == [
        f"AllReduce:4x8:{size}:{config}"
        for size in (1 << 20, 2 << 20)
        for config in ("ABSTAIN", "Ring/LL")
    ]
    assert parse_sweep(sweep_text(sweep.file), where="again").trials == sweep.trials


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"AllReduce"\nnum', '"AllGather"\nnum', "only.0: the grid has no collective AllGather"),
        ('"1M", "2M"', '"3M"', "only.0: the grid has no size 3145728"),
        ("num_nodes = 4", "num_nodes = 5", "only.0: the grid has no group 5x8"),
        ('"Ring"', '"Rung"', "unknown algorithm 'Rung' in sweep.toml: only.0"),
        ("num_nodes = 4", "nodes = 4", "only.0.nodes: Extra inputs"),
    ],
)
def test_only_names_what_the_grid_lacks(old: str, new: str, said: str) -> None:
    with pytest.raises(InvalidSweep) as caught:
        parse_sweep(HEAD + ONLY.replace(old, new), where="sweep.toml")
    assert said in str(caught.value)
