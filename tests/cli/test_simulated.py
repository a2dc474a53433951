"""The commands of the simulated world, as people type them."""

from pathlib import Path

import polars as pl

from dynamiccl.datasets.store import read
from tests.cli.conftest import Shell, refused


def test_the_command_writes_what_the_plugin_would_record(shell: Shell, tmp_path: Path) -> None:
    done = shell(
        "dynamiccl-collect",
        *("jobs", "--out", str(tmp_path), "--workload", "moe", "--jobs", "2", "--calls", "300"),
        *("--explore", "0.5", "--name", "logged", "--json"),
    )
    assert done.json["calls"] == 600
    calls = read(tmp_path, "calls")
    assert calls.height == 600
    assert set(calls["run"]) == {"logged-0", "logged-1"}
    # One communicator a group shape, each in its own order.
    assert calls["comm"].n_unique() == 3
    assert calls.group_by("run", "sequence").len()["len"].max() == 1
    strayed = calls.filter("decided")["actual_algorithm"].drop_nulls()
    assert 0.2 < len(strayed) / 600 < 0.6
    assert calls["time_us"].min() > 0  # type: ignore[operator]
    assert calls.filter(pl.col("num_nodes") == 1)["num_ranks"].unique().to_list() == [8]


def test_a_workload_that_a_system_cannot_run_is_refused_with_the_fix(
    shell: Shell, tmp_path: Path
) -> None:
    done = shell("dynamiccl-collect", "jobs", "--out", str(tmp_path), "--nodes", "3")
    line = refused(done, 2)
    assert "has no group of 3 nodes x 8 ranks" in line
    assert "--nodes" in line
    assert not list(tmp_path.iterdir())
