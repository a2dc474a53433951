"""A sweep with and without a disturbance beside it: trained on, and no quiet figure moves."""

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.cells import quiet
from dynamiccl.datasets.features import CONTEXT_COLUMN
from dynamiccl.datasets.store import measurements_table, read, write_part
from dynamiccl.evaluate.report import make_report
from dynamiccl.train.data import load_data
from tests.data_sets import make_data

SWEEP = """
name = "disturbed"
system = "sim-4x8"
collectives = ["AllReduce"]
algorithms = ["Ring", "Tree"]
groups = [{ num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "64K", max = "256M" }
nccl_version = "2.27.5"
cycles = 2
[[interference]]
kind = "none"
[[interference]]
kind = "congestion"
level = 1.0
[simulator]
seed = 3
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("both") / "store", SWEEP)


@pytest.fixture(scope="module")
def alone(both: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quiet rows of the same sweep."""
    out = tmp_path_factory.mktemp("alone") / "store"
    write_part(out, measurements_table(quiet(read(both)).to_dicts()), provenance={})
    shutil.copytree(both / "costs", out / "costs")
    return out


def test_a_policy_learns_from_what_was_disturbed_and_is_validated_as_without_it(
    both: Path, alone: Path
) -> None:
    data, without = load_data(both, 0), load_data(alone, 0)
    disturbed = data.frame.height - without.frame.height
    assert (data.left_out, without.left_out) == ({"beside congestion": disturbed}, {})
    steps = data.training.steps
    rows = np.arange(len(steps))
    levels = steps.observe(rows, rows)[0].context[:, CONTEXT_COLUMN["interference"]]
    assert 0 < data.training.counts["interfered_used"] == int((levels > 0.0).sum())
    # The simulator halves the network: large messages take almost twice the time.
    assert 0.5 < levels.max() < 1.1
    np.testing.assert_array_equal(data.validation.times_us, without.validation.times_us)
    np.testing.assert_array_equal(data.observations.context, without.observations.context)


def test_no_quiet_figure_of_the_report_moves(both: Path, alone: Path, tmp_path: Path) -> None:
    first, second = (
        make_report(data, [], tmp_path / data.parent.name).told for data in (both, alone)
    )
    assert first["systems"] == second["systems"]
    assert first["rows_left_out"].keys() == {"beside congestion"}
    assert pl.Series(read(both)["interference_kind"]).n_unique() == 2
