"""NCCL's own cost model: from the lines of its log, or from a description of the machine."""

from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from dynamiccl.collect.cli import app
from dynamiccl.collect.describe import other_lines
from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.collect.nccl_log import NcclLog
from dynamiccl.datasets import store
from dynamiccl.datasets.features import read_costs
from dynamiccl.datasets.store import read
from dynamiccl.errors import OutputError
from dynamiccl.nccl import Algorithm
from tests.data_sets import SWEEP, make_data

HEAD = "lab:1:1 [0] NCCL INFO "
#: NCCL 2.29.7, two ranks over sockets (shared/data/logs/ebpf_broadcast_default_v2.18): two blocks.
BLOCK = (
    "  Algorithm   |                            Tree                  |"
    "                            Ring                  |",
    "  Protocol    |             LL |          LL128 |         Simple |"
    "             LL |          LL128 |         Simple |",
    " Max NThreads |            512 |            640 |            512 |"
    "            512 |            640 |            256 |",
    "    Broadcast |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |"
    "     9.3/   1.2 |    18.0/   0.0 |    22.4/   2.4 |",
    "    AllReduce |    16.8/   0.5 |    31.0/   0.0 |    36.4/   1.9 |"
    "    16.6/   1.2 |    31.0/   0.0 |    36.4/   2.4 |",
)
PAT = (
    "  Algorithm   |                             PAT                  |",
    " Max NThreads |              0 |              0 |              0 |",
    "    AllGather |     0.0/   0.0 |     0.0/   0.0 |    17.6/   3.6 |",
)


ASKED = ("shapes", "--system", "lab", "--machine", "h100-ib", "--nccl", "2.27.5")


def taken(*lines: str) -> NcclLog:
    log = NcclLog()
    for line in lines:
        log.note(f"{HEAD}{line}")
    return log


def test_equal_tables_of_several_communicators_are_one_and_others_none() -> None:
    assert taken(*BLOCK, *PAT, *BLOCK, *PAT).cost_table() == taken(*BLOCK, *PAT).cost_table()
    other = tuple(line.replace("2.4 |", "2.5 |") for line in BLOCK)
    log = taken(*BLOCK, *other)
    assert len(log.costs) == 2
    assert log.cost_table() is None


def test_algorithm_of_a_later_release_leaves_the_others_as_they_are() -> None:
    named = BLOCK[0].replace("Tree", "Star")
    table = taken(*PAT, named, *BLOCK[1:]).cost_table()
    assert table is not None
    assert {algorithm for _, algorithm, _ in table} == {Algorithm.PAT, Algorithm.Ring}


def test_log_of_a_job_without_a_benchmark_gives_its_table(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    said = f"{HEAD}comm 0x1 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0\n"
    path.write_text(said + "".join(f"{HEAD}{line}\n" for line in BLOCK))
    import_files([path], tmp_path / "out", options=ImportOptions(system="lab", gpu="H100"))
    costs = store.read(tmp_path / "out", "costs")
    assert costs.height == 2 * 6
    facts = ("num_ranks", "num_nodes", "ranks_per_node", "gpu", "launch_profile")
    assert costs.select(facts).unique().rows() == [(16, 2, 8, "H100", "default")]
    assert other_lines(tmp_path / "out", ()) == ["lab: 12 cells of NCCL's own cost model"]
    path.write_text(said)
    with pytest.raises(OutputError, match="no row of nccl-tests"):
        import_files([path], tmp_path / "none", options=ImportOptions(system="lab"))


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
