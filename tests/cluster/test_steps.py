"""Steps on a real Slurm: what our srun and mpirun command lines do."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dynamiccl.collect.launchers import LauncherSettings, Ranks, command, end_session, start_session
from tests.cluster.payloads import CHATTER, HANG, MEET, REPORT, meetings, python, reports, stall
from tests.cluster.slurm import CPUS, NODES, Slurm, wait_until
from tests.collect.live_processes import Limits, run_to_end

pytestmark = pytest.mark.cluster

LIMITS = Limits(startup_s=30, stall_s=30)
SRUN = LauncherSettings(kind="srun")
#: What breaks one way of handing over variables or another.
HARD = {
    "HARD_COMMAS": "allreduce:ring,tree;allgather:^nvls",
    "HARD_SPACES": "  two  words ",
    "HARD_QUOTES": 'it\'s "quoted" \\ $HOME `x` & | * = %n',
    "HARD_UNICODE": "größe",
    "HARD_EMPTY": "",
}


class Allocation:
    """Nodes that are ours, as inside a batch job."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        granted = slurm.run(["salloc", "--no-shell", f"-N{NODES}", f"-n{NODES * CPUS}"]).stderr
        self.job = granted.split("job allocation ")[-1].split()[0]

    def inside(self, made: Sequence[str]) -> list[str]:
        where = {**self._slurm.variables, "SLURM_JOB_ID": self.job}
        variables = [f"{name}={value}" for name, value in where.items()]
        return self._slurm.wrap(["env", *variables, *made])


@pytest.fixture(scope="module")
def allocation(running_slurm: Slurm) -> Iterator[Allocation]:
    """One for all tests: a step that ends, however it does, leaves it usable."""
    yield Allocation(running_slurm)
    running_slurm.clear()


@pytest.fixture
def slurm(running_slurm: Slurm) -> Slurm:
    """The cluster with the allocation in it."""
    return running_slurm


def test_variables_arrive_unchanged_on_every_rank_node_by_node(
    slurm: Slurm, allocation: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_TUNER_PLUGIN", "theirs")
    # As in a job that was submitted with --export=NONE.
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    gone = "NCCL_TUNER_PLUGIN"
    ranks = Ranks(python(REPORT, gone, *HARD), HARD, NODES, 2, unset=(gone,))
    found = reports(run_to_end(allocation.inside(command(ranks, SRUN)), LIMITS))
    assert [report["rank"] for report in found] == list(range(2 * NODES))
    assert all(report["env"] == {gone: None, **HARD} for report in found)
    if slurm.namespaces:  # else all nodes have one hostname
        assert [report["host"] for report in found] == [n for n in slurm.nodes for _ in "ab"]


def test_a_stalled_step_leaves_no_process_and_the_allocation_usable(
    slurm: Slurm, allocation: Allocation
) -> None:
    ranks = Ranks(python(HANG, "stalls-here"), num_nodes=NODES, ranks_per_node=2)
    done = stall(allocation.inside(command(ranks, SRUN)), 2 * NODES)
    assert done.returncode is None
    assert done.lines.count("row") == 2 * NODES
    wait_until(lambda: not slurm.processes_with("stalls-here"), "all ranks gone", 10)
    again = Ranks(python(REPORT), num_nodes=NODES, ranks_per_node=CPUS)
    assert len(reports(run_to_end(allocation.inside(command(again, SRUN)), LIMITS))) == 16


def test_lines_of_several_ranks_arrive_whole(allocation: Allocation) -> None:
    ranks = Ranks(python(CHATTER), num_nodes=NODES, ranks_per_node=2)
    done = run_to_end(allocation.inside(command(ranks, SRUN)), LIMITS)
    whole = [line for line in done.lines if re.fullmatch(r"<\d:\d+:x{150}>", line)]
    assert len(whole) == len(done.lines) == 2 * NODES * 300


def test_a_rank_that_dies_ends_the_step(slurm: Slurm, allocation: Allocation) -> None:
    code = "import os, time\nif os.environ['SLURM_PROCID'] == '1': os._exit(5)\ntime.sleep(600)"
    ranks = Ranks(python(code, "dies-here"), num_nodes=2, ranks_per_node=1)
    done = run_to_end(allocation.inside(command(ranks, SRUN)), LIMITS)
    assert done.returncode is not None
    assert done.returncode != 0
    wait_until(lambda: not slurm.processes_with("dies-here"), "all ranks gone", 10)


def test_a_sampler_runs_beside_a_step_that_fills_the_nodes(
    slurm: Slurm, allocation: Allocation, tmp_path: Path
) -> None:
    sampler = Ranks(python(HANG, "samples-here"), num_nodes=NODES, overlap=True)
    made = allocation.inside(command(sampler, SRUN))
    full = Ranks(python(REPORT), num_nodes=NODES, ranks_per_node=CPUS)
    log = tmp_path / "samples"
    with log.open("wb") as file:
        leader = start_session(made, file)
    try:
        wait_until(lambda: log.read_text(encoding="utf-8").count("row\n") == NODES, "samplers up")
        done = run_to_end(allocation.inside(command(full, SRUN)), LIMITS)
        assert len(reports(done)) == NODES * CPUS
        assert leader.poll() is None
    finally:
        end_session(leader, 5.0)
    wait_until(lambda: not slurm.processes_with("samples-here"), "samplers gone", 10)


def test_ranks_meet_by_pmix_under_srun(allocation: Allocation) -> None:
    made = LauncherSettings(kind="srun", extra_args=("--mpi=pmix",))
    ranks = Ranks(python(MEET), {"OMPI_MCA_btl": "self,tcp"}, num_nodes=2, ranks_per_node=2)
    done = run_to_end(allocation.inside(command(ranks, made)), LIMITS)
    if any("can not load PMIx library" in line for line in done.lines):
        pytest.skip("Slurm finds no libpmix.so (Debian: apt-get install libpmix-dev)")
    assert meetings(done) == [f"rank {i} of 4" for i in range(4)]
