"""Open MPI for real: on this machine alone, and inside an allocation."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from dynamiccl.collect.launchers import LauncherSettings, Ranks, command
from tests.cluster.payloads import HANG, MEET, REPORT, meetings, python, reports, stall
from tests.cluster.slurm import Slurm, wait_until
from tests.cluster.test_steps import HARD
from tests.collect.live_processes import Limits, run_to_end

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed"),
]

LIMITS = Limits(startup_s=30, stall_s=30)
#: More ranks than this machine has cores.
LOCAL = LauncherSettings(kind="mpirun", extra_args=("--oversubscribe",))


@pytest.mark.parametrize("marker", ["hangs-here", "killed-here"])
def test_ranks_that_hang_leave_no_process(marker: str) -> None:
    ranks = Ranks(python(HANG, marker), ranks_per_node=4)
    if marker == "hangs-here":
        done = stall(command(ranks, LOCAL), 4)
        assert "".join(done.lines).count("row") == 4
    else:  # without grace mpirun has no time to end its ranks, which are in groups of their own
        done = run_to_end(command(ranks, LOCAL), Limits(30, 0.3, 0.0))
    assert done.returncode is None
    left = subprocess.run(["pgrep", "-f", marker], capture_output=True, check=False)
    assert left.returncode != 0


def inside(slurm: Slurm, made: Sequence[str], nodes: int) -> list[str]:
    salloc = ("salloc", "--quiet", f"-N{nodes}", "--ntasks-per-node=2")
    variables = [f"{name}={value}" for name, value in slurm.variables.items()]
    return slurm.wrap(["env", *variables, *salloc, *made])


def test_ranks_meet_across_the_nodes_of_an_allocation(slurm: Slurm) -> None:
    interface = "eth0" if slurm.namespaces else "lo"
    settings = LauncherSettings(
        kind="mpirun", extra_args=("--mca", "btl_tcp_if_include", interface)
    )
    ranks = Ranks(python(MEET), {"OMPI_MCA_btl": "self,tcp"}, num_nodes=2, ranks_per_node=2)
    done = run_to_end(inside(slurm, command(ranks, settings), 2), LIMITS)
    assert meetings(done) == [f"rank {i} of 4" for i in range(4)]


def test_variables_reach_the_other_nodes_of_an_allocation_unchanged(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_TUNER_PLUGIN", "theirs")
    gone = "NCCL_TUNER_PLUGIN"
    ranks = Ranks(python(REPORT, gone, *HARD), HARD, 2, 2, unset=(gone,))
    made = inside(slurm, command(ranks, LauncherSettings(kind="mpirun")), 2)
    found = reports(run_to_end(made, LIMITS))
    assert [report["rank"] for report in found] == [0, 1, 2, 3]
    assert all(report["env"] == {gone: None, **HARD} for report in found)
    if slurm.namespaces:
        assert [report["host"] for report in found] == ["n1", "n1", "n2", "n2"]


#: Runs one mpirun beside another inside one allocation, as a sampler beside a benchmark.
BESIDE = """
from dynamiccl.collect.launchers import LauncherSettings, Ranks, command
from dynamiccl.collect.nodes import Nodes
from tests.cluster.payloads import HANG, python
from tests.collect.live_processes import Limits, run_to_end
settings = LauncherSettings(kind="mpirun")
nodes = Nodes(settings)
full = Ranks(("echo", "ran"), num_nodes=2, ranks_per_node=2)
said = []
with nodes.start(python(HANG, "beside-mpirun"), 2, said.append) as sampler:
    sampler.wait_for(lambda: sum("row" in line for line in said) >= 2, 60)
    done = run_to_end(command(full, settings), Limits(20, 20))
    print(sampler.process.poll() is None, done.returncode, "".join(done.lines).count("ran"))
    if done.returncode:
        print(*done.lines)
"""


def test_one_mpirun_runs_beside_another_in_an_allocation(slurm: Slurm) -> None:
    # A folder of its own: daemons of an earlier mpirun may still be removing the one of all.
    scratch = slurm.root / "beside"
    scratch.mkdir(exist_ok=True)
    driver = ("env", f"PYTHONPATH={Path.cwd()}", f"TMPDIR={scratch}", *python(BESIDE))
    done = run_to_end(inside(slurm, driver, 2), LIMITS)
    assert done.lines == ["True 0 4"]
    wait_until(lambda: not slurm.processes_with("beside-mpirun"), "samplers gone", 10)
