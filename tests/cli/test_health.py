"""`dynamiccl-collect health` as a person and a Slurm prolog use it: table, JSON, exit code."""

import json
from pathlib import Path

import polars as pl

from dynamiccl.datasets import store
from tests.cli.conftest import Shell

RUN = ("health", "--run", "--runner", "simulator", "--nodes", "4", "--gpus", "4")


def test_healthy_cluster_is_exit_code_0_and_leaves_nothing(shell: Shell, tmp_path: Path) -> None:
    done = shell("dynamiccl-collect", *RUN)
    assert done.code == 0, done.err
    assert "nothing is slow" in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    assert not list(tmp_path.glob("dynamiccl-health-*"))


def test_slow_nic_is_exit_code_1_a_table_and_json(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "kept"
    slow = ("--slow", "nic:2:1:1.5", "--out", str(out))
    done = shell("dynamiccl-collect", *RUN, *slow, "--json")
    assert done.code == 1, done.err
    [finding] = json.loads(done.out)["findings"]
    assert (finding["kind"], finding["where"]) == ("nic", "node2 GPU 1")
    assert 0.4 < finding["slower"] < 0.55
    # What was found was measured a second time, and both are kept.
    frame = store.read(out)
    assert frame["sweep"].n_unique() == 2
    assert frame.filter(pl.col("comm_split").is_null()).is_empty()
    again = shell("dynamiccl-collect", "health", str(out))
    assert again.code == 1
    assert "node2 GPU 1" in again.out
    assert max(map(len, again.out.splitlines())) <= 100


def test_one_launch_says_that_it_was_one(shell: Shell) -> None:
    done = shell("dynamiccl-collect", *RUN, "--slow", "gpu:1:1:2", "--launches", "1")
    assert done.code == 1
    assert "until a second launch" in " ".join(done.out.split())
