"""`dynamiccl-collect shapes`: NCCL's costs of a shape, from a description of the machine."""

from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from dynamiccl.collect.cli import app
from dynamiccl.datasets.costs import read_costs
from dynamiccl.datasets.store import read
from tests.data_sets import SWEEP, make_data

ASKED = ("shapes", "--system", "lab", "--machine", "h100-ib", "--nccl", "2.27.5")


def test_costs_of_shapes_are_added_and_marked(tmp_path: Path) -> None:
    groups = ["--group", "16x8", "--group", "2x4"]
    done = CliRunner().invoke(app, [*ASKED, *groups, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    costs = read(tmp_path, "costs")
    assert set(costs["sweep"]) == {"modelled"}
    assert set(costs["source_file"]) == {"modelled: h100-ib"}
    assert set(costs.select("num_nodes", "num_ranks").iter_rows()) == {(16, 128), (2, 8)}
    assert set(costs["collective"]) >= {"AllReduce", "Broadcast"}


def test_what_nccl_logged_comes_before_what_a_model_says(tmp_path: Path) -> None:
    make_data(tmp_path, SWEEP)
    logged = read_costs(tmp_path)
    asked = list(ASKED)
    asked[2] = "sim-4x8"
    other = ["--group", "4x8", "--group", "2x8"]
    assert CliRunner().invoke(app, [*asked, *other, "--out", str(tmp_path)]).exit_code == 0
    both = read_costs(tmp_path)
    assert both.filter(num_nodes=4).equals(logged)
    assert both.filter(num_nodes=2).height > 0
    assert read(tmp_path, "costs").filter(pl.col("sweep") == "modelled", num_nodes=4).height > 0


@pytest.mark.parametrize("group", ["16", "x8", "0x8", "1x1", "ax8"])
def test_what_is_no_group_is_told(group: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*ASKED, "--group", group, "--out", str(tmp_path)])
    assert done.exit_code != 0
    assert not list(tmp_path.rglob("*.parquet"))
