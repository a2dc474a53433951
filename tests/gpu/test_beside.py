"""Both sides of an overlap under real NCCL, torch's own: a sweep of channels beside products.

    pytest -s -m gpu tests/gpu/test_beside.py

It needs GPUs, a CUDA build of torch with NCCL 2.24 or later, a compiler and Open MPI's mpirun. With
several GPUs each rank has its own, and what it prints is a measurement; on one GPU two ranks share
it through sockets on the loopback, in slices of time: then only what runs is seen, and no time
means anything. Rows and pictures are left in out/gpu/beside.
"""

import shutil
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect.describe import both_sides, plot_systems
from tests.gpu.ranks import collected, shared, skip_without_nccl

pytestmark = pytest.mark.gpu

OUT = Path(__file__).resolve().parents[2] / "out" / "gpu" / "beside"
SWEEP = """
name = "beside"
system = "gpus"
collectives = ["AllReduce", "AllGather"]
groups = [{group}]
sizes = {{ list = ["1M", "16M"] }}
algorithms = ["Ring"]
protocols = ["Simple"]
num_channels = [1, 2, 4, 8]
cycles = 2
iterations = 10
warmup_iterations = 2
interference = [{{ kind = "{kind}", level = 2048 }}, {{ kind = "{kind}", level = 4096 }}]

[runner]
plugin = "{plugin}"

[launcher]
kind = "mpirun"
{launcher}
"""


def test_persistent_products_are_those_of_cublas() -> None:
    skip_without_nccl((2, 24))
    import torch

    from dynamiccl.collect.persistent import multiply

    for edge in (100, 4096):
        a, b = torch.randn(2, edge, edge, device="cuda", dtype=torch.bfloat16)
        product = torch.full_like(a, torch.nan)
        programs = torch.cuda.get_device_properties(a.device).multi_processor_count
        multiply(a, b, product, programs)
        # One rounding each to the 8 bits of a bfloat16.
        torch.testing.assert_close(product, a @ b, rtol=2**-7, atol=0.1)


@pytest.mark.parametrize("kind", ["matmul", "persistent-matmul"])
def test_both_sides_are_measured_under_nccl(kind: str, tmp_path: Path, sweep_path: Path) -> None:
    skip_without_nccl((2, 24))
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    import torch

    gpus, launcher = torch.cuda.device_count(), ""
    group = f"{{ num_nodes = 1, ranks_per_node = {gpus} }}"
    if gpus == 1:
        group = "{ num_nodes = 2, ranks_per_node = 1, num_hosts = 1 }"
        launcher = shared()
    sweep = SWEEP.format(kind=kind, group=group, plugin=sweep_path, launcher=launcher)
    found = collected(tmp_path, sweep, 1500)
    out = OUT / kind
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(tmp_path / "data", out, ignore=shutil.ignore_patterns(".journal"))
    failed = found.filter(~pl.col("status").is_in(["ok", "infeasible"]))
    assert failed.is_empty(), failed.select("launch", "trial", "reason").rows()
    timed = found.filter(pl.col("status") == "ok")
    forced = timed.filter(~pl.col("is_default"))
    assert forced["verified"].all()
    assert (forced["actual_num_channels"] <= forced["requested_num_channels"]).all()
    for name in ("compute_alone_tflops", "compute_beside_tflops", "compute_loss_us"):
        assert timed[name].null_count() == 0
    # The calls lie inside the stretch; NCCL's release is that of torch.
    assert timed["resident_share"].is_between(0.0, 1.0).all()
    assert timed["nccl_version"].null_count() == 0
    columns = ("collective", "size_bytes", "interference_level", "requested_num_channels")
    with pl.Config(tbl_rows=-1, tbl_cols=-1):
        print(both_sides(timed).select(*columns, "time_us", "compute_loss_us", "on_front"))
    print(f"{gpus} GPUs; drawn: {plot_systems(timed, out)}")
