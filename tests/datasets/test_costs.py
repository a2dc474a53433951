"""NCCL's own costs of a task, from what it logged of its cells."""

from pathlib import Path

import numpy as np
import polars as pl

from dynamiccl.datasets.features import COST_FEATURES, COST_KEY, NUM_CELLS, log_costs, read_costs
from dynamiccl.datasets.schema import COSTS
from dynamiccl.datasets.store import read, write_part
from dynamiccl.nccl import Collective
from dynamiccl.simulator.h100 import default_model
from dynamiccl.simulator.system import Call, Group
from tests.data_sets import SWEEP, make_data
from tests.rows import default, frame


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
    table = read(tmp_path, "costs").with_columns(latency_us=pl.col("latency_us") + 1.0)
    write_part(tmp_path, table.to_arrow().cast(COSTS), kind="costs", provenance={})
    assert read_costs(tmp_path).is_empty()


def test_a_data_set_without_costs_has_an_empty_table(tmp_path: Path) -> None:
    costs = read_costs(tmp_path)
    assert costs.is_empty()
    tasks = frame(default(nccl_version=None))
    assert (log_costs(tasks, costs) == 0.0).all()
    assert log_costs(tasks.clear(), costs).shape == (0, NUM_CELLS)
