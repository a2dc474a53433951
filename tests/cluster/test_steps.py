"""What our command lines do on a real Slurm and under a real Open MPI, inside an allocation."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.launchers import LauncherSettings, Ranks, command
from tests.cluster.slurm import CPUS, NODES, Slurm, wait_until
from tests.collect.live_processes import Finished, Limits, run_to_end

pytestmark = pytest.mark.cluster

LIMITS = Limits(startup_s=30, stall_s=30)
NEEDS_MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
KINDS = pytest.mark.parametrize("kind", ["srun", pytest.param("mpirun", marks=NEEDS_MPI)])
#: What breaks one way of handing over variables or another.
HARD = {
    "HARD_COMMAS": "allreduce:ring,tree;allgather:^nvls",
    "HARD_SPACES": "  two  words ",
    "HARD_QUOTES": 'it\'s "quoted" \\ $HOME `x` & | * = %n',
    "HARD_UNICODE": "größe",
    "HARD_EMPTY": "",
}
GONE = "NCCL_TUNER_PLUGIN"
#: Says on one line where and who a rank is, and what it finds under the variables that it is told.
REPORT = """
import json, os, socket, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("SLURM_PROCID"))
found = {name: os.environ.get(name) for name in sys.argv[1:]}
print(json.dumps({"host": socket.gethostname(), "rank": int(rank), "env": found}), flush=True)
"""
#: Meets all others by Open MPI's library. A barrier behind it opens TCP connections from both sides
#: at once, in which Open MPI 4.1.4 now and then crashes.
MEET = """
import ctypes
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
assert mpi.MPI_Init(None, None) == 0
rank, size = ctypes.c_int(), ctypes.c_int()
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Comm_size(world, ctypes.byref(size))
print(f"rank {rank.value} of {size.value}")
assert mpi.MPI_Finalize() == 0
"""
#: One row, then nothing for ever, whatever it is told; the words after it mark its processes.
HANG = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("row", flush=True)
time.sleep(600)
"""


def python(source: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", source, *arguments)


def inside(slurm: Slurm, argv: Sequence[str], nodes: int = 2) -> list[str]:
    salloc = ("salloc", "--quiet", f"-N{nodes}", "--ntasks-per-node=2")
    variables = [f"{name}={value}" for name, value in slurm.variables.items()]
    return slurm.wrap(["env", *variables, *salloc, *argv])


def stall(argv: Sequence[str], rows: int) -> Finished:
    """Run what prints so many rows and then hangs; a second after the last it counts as hung."""
    left = rows

    def take(text: str, _: float) -> bool:
        nonlocal left
        left -= text.count("row")
        return left <= 0

    return run_to_end(argv, Limits(60, 1), take)


def reports(done: Finished) -> list[dict[str, Any]]:
    """The output of REPORT's ranks, by rank; mpirun may put two on one line."""
    assert done.returncode == 0, done.lines
    decoder, text, found = json.JSONDecoder(), "\n".join(done.lines).strip(), []
    while text:
        report, end = decoder.raw_decode(text)
        found.append(report)
        text = text[end:].strip()
    return sorted(found, key=lambda report: int(report["rank"]))


@KINDS
def test_variables_arrive_whole(kind: Any, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GONE, "theirs")
    if kind == "srun":  # as in a job that was submitted with --export=NONE
        monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    ranks = Ranks(python(REPORT, GONE, *HARD), HARD, 2, 2, unset=(GONE,))
    argv = inside(slurm, command(ranks, LauncherSettings(kind=kind)))
    found = reports(run_to_end(argv, LIMITS))
    assert [report["rank"] for report in found] == [0, 1, 2, 3]
    assert all(report["env"] == {GONE: None, **HARD} for report in found)
    assert [report["host"] for report in found] == ["n1", "n1", "n2", "n2"]


def test_a_stalled_step_leaves_no_process_and_the_allocation_usable(slurm: Slurm) -> None:
    granted = slurm.run(["salloc", "--no-shell", f"-N{NODES}", f"-n{NODES * CPUS}"]).stderr
    job = granted.split("job allocation ")[-1].split()[0]
    variables = [f"{name}={value}" for name, value in slurm.variables.items()]

    def step(source: str, marker: str, on_each: int) -> list[str]:
        ranks = Ranks(python(source, marker), num_nodes=NODES, ranks_per_node=on_each)
        argv = command(ranks, LauncherSettings(kind="srun"))
        return slurm.wrap(["env", *variables, f"SLURM_JOB_ID={job}", *argv])

    done = stall(step(HANG, "stalls-here", 2), 2 * NODES)
    assert done.returncode is None
    assert done.lines.count("row") == 2 * NODES
    wait_until(lambda: not slurm.processes_with("stalls-here"), "all ranks gone", 10)
    assert len(reports(run_to_end(step(REPORT, "HOME", CPUS), LIMITS))) == NODES * CPUS


@NEEDS_MPI
@pytest.mark.parametrize("marker", ["hangs-here", "killed-here"])
def test_ranks_of_mpirun_that_hang_leave_no_process(marker: str) -> None:
    # More ranks than this machine has cores.
    local = LauncherSettings(kind="mpirun", extra_args=("--oversubscribe",))
    argv = command(Ranks(python(HANG, marker), ranks_per_node=4), local)
    if marker == "hangs-here":
        done = stall(argv, 4)
        assert "".join(done.lines).count("row") == 4
    else:  # without grace mpirun has no time to end its ranks, which are in groups of their own
        done = run_to_end(argv, Limits(30, 0.3, 0.0))
    assert done.returncode is None
    left = subprocess.run(["pgrep", "-f", marker], capture_output=True, check=False)
    assert left.returncode != 0


@NEEDS_MPI
def test_ranks_meet_by_pmix_under_srun(slurm: Slurm) -> None:
    made = LauncherSettings(kind="srun", extra_args=("--mpi=pmix",))
    ranks = Ranks(python(MEET), {"OMPI_MCA_btl": "self,tcp"}, num_nodes=2, ranks_per_node=2)
    done = run_to_end(inside(slurm, command(ranks, made)), LIMITS)
    if any("can not load PMIx library" in line for line in done.lines):
        pytest.skip("Slurm finds no libpmix.so (Debian: apt-get install libpmix-dev)")
    assert done.returncode == 0, done.lines
    met = re.findall(r"rank \d+ of \d+", "\n".join(done.lines))
    assert sorted(met) == [f"rank {i} of 4" for i in range(4)]


def test_a_rank_that_dies_ends_the_step(slurm: Slurm) -> None:
    code = "import os, time\nif os.environ['SLURM_PROCID'] == '1': os._exit(5)\ntime.sleep(600)"
    ranks = Ranks(python(code, "dies-here"), num_nodes=2, ranks_per_node=1)
    done = run_to_end(inside(slurm, command(ranks, LauncherSettings(kind="srun"))), LIMITS)
    assert done.returncode not in {None, 0}
    wait_until(lambda: not slurm.processes_with("dies-here"), "all ranks gone", 10)


#: Runs one launch beside another inside one allocation, as a sampler beside a benchmark.
BESIDE = """
import sys
from dynamiccl.collect.launchers import LauncherSettings, Ranks, command
from dynamiccl.collect.nodes import Nodes
from tests.cluster.test_steps import HANG, python
from tests.collect.live_processes import Limits, run_to_end
settings = LauncherSettings(kind=sys.argv[1])
full = Ranks(("echo", "ran"), num_nodes=2, ranks_per_node=2)
said = []
with Nodes(settings).start(python(HANG, "samples-here"), 2, said.append) as sampler:
    sampler.wait_for(lambda: sum("row" in line for line in said) >= 2, 60)
    done = run_to_end(command(full, settings), Limits(20, 20))
    print(sampler.process.poll() is None, done.returncode, "".join(done.lines).count("ran"))
    if done.returncode:
        print(*done.lines)
"""


@KINDS
def test_a_sampler_runs_beside_a_launch_that_fills_the_nodes(kind: str, slurm: Slurm) -> None:
    # A folder of its own: daemons of an earlier mpirun may still be removing the one of all.
    scratch = slurm.root / "beside"
    scratch.mkdir(exist_ok=True)
    driver = ("env", f"PYTHONPATH={Path.cwd()}", f"TMPDIR={scratch}", *python(BESIDE, kind))
    done = run_to_end(inside(slurm, driver), LIMITS)
    assert done.lines == ["True 0 4"]
    wait_until(lambda: not slurm.processes_with("samples-here"), "samplers gone", 10)
