"""Real nccl-tests, real NCCL, our plugin and the whole of collect, on one GPU.

    NCCL_TESTS_DIR=nccl-tests/build pytest -m gpu tests/gpu/test_nccl_tests.py

It needs a GPU, nccl-tests built with MPI=1 and Open MPI's mpirun. Its 2 and 3 ranks share the GPU:
each has an NCCL_HOSTID of its own, so NCCL takes each for a node and connects them through sockets
on the loopback. That is good for seeing what runs, and says nothing about times. The Parquet is
left in out/gpu/ (a small one, to be shipped as a sample with its origin).

`NCCL_TESTS_STAND_IN=1` runs the same with the stand-in, to check this file itself without a GPU.
"""

import shutil
from pathlib import Path

import polars as pl
import pytest

from tests.gpu.ranks import STAND_IN, collected, shared

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "gpu"
SWEEP = """
name = "ranks-{ranks}"
system = "one-gpu"
collectives = ["AllReduce", "AllGather", "Broadcast"]
groups = [{{ num_nodes = {ranks}, ranks_per_node = 1, num_hosts = 1 }}]
sizes = {{ min = "4K", max = "4M", factor = 8 }}
algorithms = ["Ring", "Tree"]
protocols = ["LL", "Simple"]
num_channels = [0, 1, 2]
cycles = 2
iterations = 5
small_iterations = 5
warmup_iterations = 2

[runner]
plugin = "{plugin}"
stall_timeout_s = 120

[launcher]
kind = "mpirun"
{launcher}
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_sweep_in_one_process_is_played_and_read_back(
    ranks: int, tmp_path: Path, binaries: Path, sweep_path: Path
) -> None:
    launcher = shared(NCCL_TESTS_DEVICE="0")
    text = SWEEP.format(ranks=ranks, plugin=sweep_path, launcher=launcher)
    found = collected(tmp_path, text, 1500, "--nccl-tests-dir", str(binaries))
    timed = found.filter(pl.col("status") == "ok")
    forced = timed.filter(~pl.col("is_default"))
    assert forced.height > 0
    assert forced["verified"].all()
    assert (forced["requested_algorithm"] == forced["actual_algorithm"]).all()
    assert (forced["requested_protocol"] == forced["actual_protocol"]).all()
    asked = forced.drop_nulls("requested_num_channels")
    assert (asked["actual_num_channels"] <= asked["requested_num_channels"]).all()
    assert (timed["wrong_values"].fill_null(0) == 0).all()
    scopes = timed.filter("is_default").group_by("default_scope").len()
    assert set(scopes["default_scope"]) == {"untouched", "profile"}
    failed = found.filter(pl.col("status").is_in(["failed", "timed_out", "wrong_values"]))
    assert failed.is_empty(), failed.select("launch", "trial", "reason").rows()
    kept = OUT / f"ranks-{ranks}"
    shutil.rmtree(kept, ignore_errors=True)
    if not STAND_IN:
        shutil.copytree(tmp_path / "data", kept, ignore=shutil.ignore_patterns(".journal"))
