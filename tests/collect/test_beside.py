"""Our program for both sides of an overlap: real, on gloo, with products on the CPU.

Its figures say nothing of GPUs: that they fit each other is what is tested. Through the runner the
stand-in's NCCL is asked whenever gloo is called (tests/fakes/nccl_tests/beside.py).
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.collect.launch import read_rows
from dynamiccl.collect.nccl_tests import ImportOptions, read_file
from dynamiccl.collect.output import FileReport
from dynamiccl.collect.sweep import Sweep
from dynamiccl.errors import DynamicclError, MachineError, OutputError
from tests.collect.benchmark.stand_in import ROOT, Lab, sweep, wanted

torch = pytest.importorskip("torch", reason="torch is not installed: nothing was checked")

PROGRAM: Final = (sys.executable, "-m", "dynamiccl.collect.beside")
MPIRUN: Final = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")
LIMIT_S: Final = 240


def beside(
    folder: Path, name: str, *more: str, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the program with two ranks on two sizes, started by itself or by a launcher."""
    options = ["--cpu", "--edge", "96", "--meet", str(folder / "meet"), "-b", "16384"]
    options += ["-e", "65536"]
    options += ["-f", "4", "-g", "1" if launcher else "2", "-n", "3", "-w", "1", "-c", "1", *more]
    return subprocess.run(
        [*launcher, *PROGRAM, name, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "places", "launcher"),
    [("reduce_scatter_perf", [False, True], ()), ("all_reduce_perf", [True], MPIRUN)],
)
def test_both_sides_of_each_half_are_measured(
    name: str, places: list[bool], launcher: Sequence[str], tmp_path: Path
) -> None:
    if launcher and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    done = beside(tmp_path, name, "-N", "2", "-d", "bfloat16", launcher=launcher)
    assert done.returncode == 0, done.stderr
    sizes = (16384, 65536)
    blocks, told = read_rows(done.stdout.splitlines(), tmp_path / "none", sizes=sizes)
    assert told == {}  # no GPU, no NCCL
    assert [[row["in_place"] for row in block] for block in blocks] == [places] * 4
    found = [row for block in blocks for row in block]
    assert [row["size_bytes"] for row in found[:: len(places)]] == [*sizes, *sizes]
    for row in found:
        busbw = row["size_bytes"] / row["time_us"] / 1e3 * (0.5 if len(places) > 1 else 1.0)
        assert row["busbw_gbytes_per_s"] == pytest.approx(busbw, rel=1e-4)
        assert (row["source"], row["status"]) == ("beside", "ok")
        assert row["compute_alone_tflops"] > 0
        assert row["compute_beside_tflops"] > 0
        # The stretch is one of whole products, and longer than the calls.
        assert row["compute_period_us"] >= row["time_us"]
        assert row["compute_loss_us"] < row["compute_period_us"]
        assert row["compute_aa_difference"] >= 0
        # Not known on a CPU.
        assert row.keys().isdisjoint({"resident_share", "sm_clock_mhz", "wrong_values"})
    # Nothing is imported from it as calls that ran alone.
    log = tmp_path / "beside.log"
    log.write_text(done.stdout)
    report = FileReport(str(log), "nccl-tests-text")
    with pytest.raises(OutputError, match=r"ran beside matrix products .*dynamiccl-collect run"):
        list(read_file(log, "x", ImportOptions(), report))


def test_products_enclose_the_work() -> None:
    from dynamiccl.collect.beside import Products

    products = Products(64, torch.device("cpu"))
    moments: list[float] = []

    def work() -> None:
        moments.append(time.perf_counter())
        time.sleep(0.01)
        moments.append(time.perf_counter())

    marks = products.during(work)
    assert marks == sorted(marks)
    assert marks[1] <= moments[0]
    assert marks[-2] >= moments[1] or marks[-1] >= moments[1]
    per_product = (marks[-1] - marks[0]) / (len(marks) - 1)
    assert products.rate(marks) == pytest.approx(2e-12 * 64**3 / per_product)
    assert products.alone() > 0

    # Failures of either side are told.
    with pytest.raises(ZeroDivisionError):
        products.during(lambda: 1 / 0)
    products._product = partial(torch.mm, torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(RuntimeError):
        products.during(lambda: None)


def test_without_a_gpu_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamiccl.collect import beside as program

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = ["reduce_perf", "--edge", "96", "--meet", str(tmp_path / "meet")]
    monkeypatch.setattr(sys, "argv", ["beside", *options])
    with pytest.raises(MachineError, match="no CUDA device on"):
        program.main()


def beside_products(**keys: str) -> Sweep:
    """Two ranks, two sizes, NCCL's own choice and two configs, beside products of edge 96."""
    fake = ROOT / "tests" / "fakes" / "nccl_tests" / "beside.py"
    prefix = ("env", f"PYTHONPATH={ROOT}", sys.executable, str(fake))
    return sweep(
        **{
            "groups": "[{ num_nodes = 1, ranks_per_node = 2 }]",
            "sizes": '{ list = ["64K", "256K"] }',
            "algorithms": '["Ring"]',
            "num_channels": "[2]",
            "cycles": "1",
            "iterations": "3",
            "small_iterations": "3",
            "interference": '[{ kind = "matmul", level = 96 }]',
            "launcher": f"{{ prefix = [{', '.join(map(repr, prefix))}] }}",
            **keys,
        }
    )


def test_sweep_has_both_sides_of_each_config(lab: Lab) -> None:
    assert lab.run(beside_products())["ended"] == "done"
    found = lab.rows
    # Of each size two configs, and NCCL's own twice in the plugin's process and twice without it.
    told = ("status", "source", "interference_kind", "interference_level")
    assert found.select(told).unique().rows() == [("ok", "beside", "matmul", 96.0)]
    forced = wanted(found)
    assert forced.height == 2 * 2
    assert forced["verified"].all()
    assert (forced["requested_protocol"] == forced["actual_protocol"]).all()
    assert set(forced["actual_num_channels"]) == {2}
    assert set(found.filter("is_default")["default_scope"]) == {"untouched", "profile"}
    for name in ("compute_alone_tflops", "compute_beside_tflops", "compute_loss_us"):
        assert found[name].null_count() == 0
    for name in ("resident_share", "throttled", "nccl_tests_version"):
        assert found[name].null_count() == found.height


def test_what_pytorch_does_not_run_is_refused(tmp_path: Path) -> None:
    split = '[{ num_nodes = 2, ranks_per_node = 2, split = "MOD 2" }]'
    for key, value, said in (
        ("collectives", '["AlltoAll"]', r"give AlltoAll:1x2\+matmul96 a sweep"),
        ("datatypes", '["f8e4m3"]', "nor f8; give AllReduce:1x2:f8e4m3"),
        ("groups", split, "one communicator"),
    ):
        made = beside_products(algorithms="[]", launcher='{ kind = "mpirun" }', **{key: value})
        with pytest.raises(DynamicclError, match=said):
            Lab(tmp_path, None).check(made)
    for kind, level in product(("matmul", "persistent-matmul"), ("0.5", "8", "4096.5", "1e6")):
        with pytest.raises(DynamicclError, match=f"the level of '{kind}' is the matrices' edge"):
            beside_products(interference=f'[{{ kind = "{kind}", level = {level} }}]')


@pytest.mark.parametrize(("kind", "lacks"), [("matmul", "torch"), ("persistent-matmul", "triton")])
def test_package_that_is_not_there_is_told(
    kind: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f'[{{ kind = "none" }}, {{ kind = "{kind}", level = 96 }}]'
    monkeypatch.setattr(
        "dynamiccl.collect.launch.find_spec", lambda name: None if name == lacks else name
    )

    def check(launcher: str) -> None:
        made = sweep(algorithms="[]", interference=table, launcher=launcher)
        Lab(tmp_path, None).check(made)

    with pytest.raises(MachineError, match=rf"'{kind}' runs {lacks}, .*install '\.\[train\]'"):
        check('{ kind = "local" }')
    # The image has its own.
    mount = f'"{tmp_path}:{tmp_path}"'
    check(f'{{ container = {{ runtime = "apptainer", image = "i.sif", mounts = [{mount}] }} }}')
