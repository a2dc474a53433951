"""Whole sweeps through real Slurm and real Open MPI: the stand-in, the plugin, the command line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.datasets import store
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator import h100
from tests.cluster.slurm import Slurm, wait_until
from tests.fakes.nccl_tests.install import install_stand_in

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
SWEEP = """
name = "grid"
system = "four-nodes"
collectives = ["AllReduce", "AllGather"]
groups = [{{ num_nodes = 2, ranks_per_node = 2 }}]
sizes = {{ min = "1M", max = "16M", factor = 4 }}
algorithms = ["Ring", "NVLSTree"]
protocols = ["LL128", "Simple"]
num_channels = [0, 4]
cycles = {cycles}
iterations = 5
warmup_iterations = 1
[runner]
plugin = "{plugin}"
startup_timeout_s = 60
[launcher]
kind = "{launcher}"
{more}
"""
#: Measurements of a cycle: 3 sizes x 2 collectives x (the default twice, Ring x 2 protocols with
#: and without a number of channels, the reference default twice). The simulated machine has no
#: NVLSTree with two ranks on a node.
PICKS = 3 * 2 * (2 + 4 + 2)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    install_stand_in(tmp_path / "bin")
    yield tmp_path
    shutil.rmtree(tmp_path / "out" / ".journal", ignore_errors=True)


def write(folder: Path, plugin: Path, launcher: str, *, cycles: int = 1, more: str = "") -> Path:
    path = folder / "sweep.toml"
    path.write_text(SWEEP.format(plugin=plugin, launcher=launcher, cycles=cycles, more=more))
    return path


def command(folder: Path, *more: str) -> list[str]:
    head = [sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run", str(folder / "sweep.toml")]
    return [*head, "--out", str(folder / "out"), "--nccl-tests-dir", str(folder / "bin"), *more]


def environment(**more: str) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def check(folder: Path, *, cycles: int = 1) -> pl.DataFrame:
    """Every pick is there once, verified, and its time is that of the simulated machine."""
    found = store.read(folder / "out")
    timed = found.filter(pl.col("status") == "ok")
    key = ["trial", "run", "repeat", "default_scope"]
    assert timed.select(key).unique().height == timed.height
    assert timed.filter(pl.col("repeat") < 2).height == 2 * PICKS * cycles
    lost = found.filter(pl.col("reason") == "NCCL's cost table has no such cell here")
    assert lost.height == cycles * 3 * 2
    forced = timed.filter(~pl.col("is_default"))
    assert forced["verified"].all()
    assert (forced["requested_algorithm"] == forced["actual_algorithm"]).all()
    assert (forced["requested_protocol"] == forced["actual_protocol"]).all()
    assert timed.select("num_nodes", "ranks_per_node", "num_ranks").unique().rows() == [(2, 2, 4)]
    group = h100.Group(2, 2)
    close = [
        0.9 < row["time_us"] / true_us(group, row) < 1.15 for row in forced.iter_rows(named=True)
    ]
    assert sum(close) > 0.9 * len(close)
    return found


def true_us(group: h100.Group, row: dict[str, object]) -> float:
    return h100.true_us(
        group,
        Collective.parse(str(row["collective"])),
        Algorithm.parse(str(row["actual_algorithm"])),
        Protocol.parse(str(row["actual_protocol"])),
        int(str(row["size_bytes"])),
        num_channels=row["requested_num_channels"],  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_sweep_inside_an_allocation(
    launcher: str, slurm: Slurm, folder: Path, sweep_path: Path
) -> None:
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    if launcher == "mpirun" and not slurm.namespaces:
        pytest.skip("mpirun needs nodes with names of their own: no network namespaces here")
    more = 'extra_args = ["--mca", "btl_tcp_if_include", "eth0", "--oversubscribe"]'
    write(folder, sweep_path, launcher, more=more if launcher == "mpirun" else "")
    salloc = ["salloc", "-N2", "--ntasks-per-node=2", "--exclusive"]
    slurm.run([*salloc, *command(folder)], environment(), timeout_s=120)
    found = check(folder)
    assert set(found["exclusive_node"].drop_nulls()) == {True}


def test_shared_nodes_are_flagged(slurm: Slurm, folder: Path, sweep_path: Path) -> None:
    write(folder, sweep_path, "srun")
    salloc = ["salloc", "-N2", "--ntasks-per-node=2"]
    slurm.run([*salloc, *command(folder)], environment(), timeout_s=120)
    assert set(check(folder)["exclusive_node"].drop_nulls()) == {False}


def test_mpirun_on_this_machine(folder: Path, sweep_path: Path) -> None:
    """Two ranks a process apart on one host; without Slurm, as on a workstation."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    path = write(folder, sweep_path, "mpirun", more='extra_args = ["--oversubscribe"]')
    path.write_text(path.read_text().replace("num_nodes = 2", "num_nodes = 1"))
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "OMPI_", "PMIX_"))}
    done = subprocess.run(
        command(folder),
        env={**kept, **environment()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = store.read(folder / "out").filter(pl.col("status") == "ok")
    assert found.select("num_nodes", "ranks_per_node").unique().rows() == [(1, 2)]
    assert found.filter(~pl.col("is_default"))["verified"].all()


def test_batch_array_shares_the_sweep_and_ends_when_it_is_done(
    slurm: Slurm, folder: Path, sweep_path: Path
) -> None:
    write(folder, sweep_path, "sbatch", cycles=2, more="array = 2")
    path = f"{slurm.clients}:{os.environ['PATH']}"
    done = subprocess.run(
        command(folder, "--json"),
        env=slurm.environ(environment(PATH=path)),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"ended": "done"' in done.stdout
    check(folder, cycles=2)
    again = subprocess.run(
        command(folder),
        env=slurm.environ(environment(PATH=path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 2
    assert "go on with --resume" in again.stderr


# That a signal before the limit has it submitted again, the test of budgets shows too.
@pytest.mark.parametrize("accident", ["node", pytest.param("limit", marks=pytest.mark.soak)])
def test_batch_sweep_survives_a_dead_node_and_a_time_limit(
    accident: str, slurm: Slurm, folder: Path, sweep_path: Path
) -> None:
    write(folder, sweep_path, "sbatch", cycles=2)
    path = f"{slurm.clients}:{os.environ['PATH']}"
    env = environment(PATH=path, FAKE_SECONDS_PER_ROW="0.05")
    with subprocess.Popen(
        command(folder), env=slurm.environ(env), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            journal = folder / "out" / ".journal"
            wait_until(lambda: any(journal.rglob("segment-*")), "a launch is committed", 60)
            number = next((folder / "out" / ".slurm").glob("*.job")).read_text().strip()
            if accident == "node":
                node = slurm.run(["squeue", f"--jobs={number}", "-h", "-o", "%B"]).stdout.strip()
                slurm.set_node(node, "down")  # it comes back by itself (ReturnToService=2)
            else:
                # What --signal=B:USR1@120 sends two minutes before the limit.
                slurm.run(["scancel", "--batch", "--signal=USR1", number])
            _, said = process.communicate(timeout=180)
        finally:
            process.kill()
    assert process.returncode == 0, said
    check(folder, cycles=2)


#: What stands where a benchmark did: it dies on one node of two, as long as that one is broken.
#: Ranks on the other node wait for those that died, as in MPI_Init, until srun ends them.
BROKEN_NODE = """#!/bin/sh
if [ "${{SLURM_STEP_NUM_TASKS:-1}}" -gt 1 ] && [ -e "{folder}/broken" ]; then
  [ "$SLURM_NODEID" = 1 ] || exec sleep 60
  echo "NVML: Driver/library version mismatch" >&2
  exit 3
fi
exec "{folder}/good/${{0##*/}}" "$@"
"""


def test_a_node_whose_launches_always_die_ends_the_sweep_until_it_is_mended(
    slurm: Slurm, folder: Path, sweep_path: Path
) -> None:
    """Each config was blamed, and `--resume` had nothing left to measure."""
    shutil.copytree(folder / "bin", folder / "good", symlinks=True)
    for program in (folder / "bin").glob("*_perf"):
        program.unlink()
        program.write_text(BROKEN_NODE.format(folder=folder))
        program.chmod(0o755)
    (folder / "broken").touch()
    path = write(folder, sweep_path, "srun")
    path.write_text(path.read_text().replace("[runner]", "[runner]\nretry_after_s = 0.1"))
    salloc = ["salloc", "-N2", "--ntasks-per-node=2", "--exclusive"]
    done = slurm.run([*salloc, *command(folder)], environment(), timeout_s=120, check=False)
    assert done.returncode == 4, done.stderr
    assert "NVML: Driver/library version mismatch" in done.stderr, done.stderr
    (folder / "broken").unlink()
    slurm.run([*salloc, *command(folder, "--resume")], environment(), timeout_s=120)
    assert "failed" not in check(folder)["status"].to_list()


#: It notes which job asked.
NO_LOCKS = """
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
int flock(int descriptor, int operation) {
  const char* job = getenv("SLURM_JOB_ID");
  FILE* file = fopen(getenv("NO_LOCKS_LOG"), "a");
  if (file != NULL) { fprintf(file, "%s\\n", job != NULL ? job : "-"); fclose(file); }
  errno = ENOSYS;
  return -1;
}
"""


@pytest.fixture
def no_locks(tmp_path: Path) -> Path:
    """What is preloaded makes flock fail in every process, as on Lustre without `-o flock`."""
    (tmp_path / "no_locks.c").write_text(NO_LOCKS)
    made = tmp_path / "no_locks.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(made), str(tmp_path / "no_locks.c")], check=True
    )
    return made


def measuring_job(out: Path) -> str | None:
    """The job that the sweep's submit names, once a launch was committed since."""
    told = next((out / ".slurm").glob("*.job"), None)
    if told is None:
        return None
    began = told.stat().st_mtime
    commits = (out / ".journal").rglob("segment-*")
    return told.read_text().strip() if any(c.stat().st_mtime > began for c in commits) else None


def test_a_budget_is_spent_once_by_all_the_jobs_of_a_sweep_where_there_are_no_locks(
    slurm: Slurm, folder: Path, sweep_path: Path, no_locks: Path
) -> None:
    """It began anew with each job, and a job that ended by it was submitted again for ever.

    Each job gives back the journal, which the next one takes.
    """
    write(folder, sweep_path, "sbatch", cycles=4, more="[budget]\nmax_measurements = 70")
    path = f"{slurm.clients}:{os.environ['PATH']}"
    env = slurm.environ(
        environment(
            PATH=path,
            FAKE_SECONDS_PER_ROW="0.02",
            LD_PRELOAD=str(no_locks),
            NO_LOCKS_LOG=str(folder / "asked"),
        )
    )
    out = folder / "out"
    with subprocess.Popen(
        command(folder, "--json"),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            jobs: list[str | None] = [None]
            for _ in range(2):
                wait_until(lambda: measuring_job(out) not in jobs, "rows of a new job", 60)
                jobs.append(measuring_job(out))
                slurm.run(["scancel", "--batch", "--signal=USR1", str(jobs[-1])])
            shown, said = process.communicate(timeout=180)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert '"ended": "budget"' in shown
    assert said.count("submitting it again") == 2
    assert len(set((folder / "asked").read_text().split()) - {"-"}) == 3  # each job
    timed = store.read(out).filter(pl.col("status") == "ok", pl.col("default_scope") == "profile")
    assert 0 < timed.height <= 2 * 70  # each measurement is two rows: in place and out of place
