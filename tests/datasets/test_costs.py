"""NCCL's own costs of a task, from what it logged of its cells."""

from pathlib import Path

import numpy as np
import polars as pl

from dynamiccl.datasets.features import COST_FEATURES, COST_KEY, NUM_CELLS, log_costs, read_costs
from dynamiccl.datasets.store import read
from dynamiccl.nccl import NUM_PROTOCOLS, Algorithm, Collective, Protocol
from dynamiccl.simulator.h100 import default_model
from dynamiccl.simulator.system import Call, Group
from tests.data_sets import SWEEP, make_data


def cell(algorithm: Algorithm, protocol: Protocol) -> int:
    return algorithm * NUM_PROTOCOLS + protocol


def test_costs_of_a_simulated_sweep_are_those_of_the_cost_model(data_dir: Path) -> None:
    tasks = read(data_dir).unique([*COST_KEY, "size_bytes"])
    found = log_costs(tasks, read_costs(data_dir))
    assert found.shape == (tasks.height, NUM_CELLS) == (30, len(COST_FEATURES))
    for row, told in zip(found, tasks.select("collective", "size_bytes").iter_rows(), strict=True):
        collective, size = Collective.parse(told[0]), told[1]
        wanted = default_model().cost_table(Call(Group(4, 8), collective, size)).ravel()
        assert ((row == 0.0) == (wanted < 0.0)).all()
        known = wanted > 0.0
        # The log has one decimal.
        assert np.allclose(np.exp(row[known]), wanted[known], rtol=0.01)


def test_a_group_that_logged_several_tables_has_none(tmp_path: Path) -> None:
    make_data(tmp_path, SWEEP)
    make_data(tmp_path, SWEEP.replace('name = "tiny"', 'name = "other"'))
    costs = read_costs(tmp_path)  # both sweeps logged the same
    assert costs.height > 0
    assert costs.unique([*COST_KEY, "algorithm", "protocol"]).height == costs.height
    from dynamiccl.datasets.store import part_paths, write_part

    table = read(tmp_path, "costs").with_columns(latency_us=pl.col("latency_us") + 1.0)
    write_part(tmp_path, _as_parts(table), kind="costs", provenance={})
    assert len(part_paths(tmp_path, "costs")) == 4
    assert read_costs(tmp_path).is_empty()


def _as_parts(table: pl.DataFrame) -> "object":
    from dynamiccl.datasets.schema import COSTS

    return table.to_arrow().cast(COSTS)


def test_a_data_set_without_costs_has_an_empty_table(tmp_path: Path) -> None:
    costs = read_costs(tmp_path)
    assert costs.is_empty()
    tasks = pl.DataFrame(
        {
            "system": ["x"],
            "nccl_version": [None],
            "num_nodes": [1],
            "ranks_per_node": [8],
            "launch_profile": ["default"],
            "collective": ["AllReduce"],
            "size_bytes": [1024],
        },
        schema_overrides={"nccl_version": pl.String},
    )
    assert (log_costs(tasks, costs) == 0.0).all()
    assert log_costs(tasks.clear(), costs).shape == (0, NUM_CELLS)
