"""Sweeps as batch jobs on a real Slurm: they queue themselves again, and are submitted once."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.collect.start import script_path
from dynamiccl.datasets import store
from tests.cluster.slurm import Slurm, wait_until
from tests.cluster.test_sweeps import check, command, environment, folder, write

pytestmark = pytest.mark.cluster
__all__ = ["folder"]

#: A launch of 5 to 21 rows takes some seconds, so that something can happen to it.
SLOW = {"FAKE_SECONDS_PER_ROW": "0.25"}
#: Nothing more shall happen to it.
FAST = {"FAKE_SECONDS_PER_ROW": "0"}


@dataclass
class Batch:
    """A sweep of the stand-in, submitted by the command line."""

    slurm: Slurm
    folder: Path
    plugin: Path
    env: dict[str, str] = field(default_factory=dict)

    def begin(self, *, cycles: int = 2, more: str = "") -> dict[str, Any]:
        write(self.folder, self.plugin, "sbatch", cycles=cycles, more=more)
        return self.run()

    def start(self, *more: str) -> subprocess.Popen[str]:
        path = f"{self.slurm.clients}:{os.environ['PATH']}"
        return subprocess.Popen(
            command(self.folder, "--json", *more),
            env=self.slurm.environ({**environment(PATH=path), **SLOW, **self.env}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *more: str, code: int = 0) -> dict[str, Any]:
        """The same command again; its JSON, or what it said."""
        with self.start(*more) as process:
            shown, said = process.communicate(timeout=60)
        assert process.returncode == code, said
        return dict(json.loads(shown)) if code == 0 else {"said": said}

    def wait(self, happened: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def has_happened() -> bool:
            time.sleep(1)  # the command takes as much of the machine as the job
            found.update(self.run())
            return happened(found)

        wait_until(has_happened, what, 180)
        return found

    def measured(self) -> dict[str, Any]:
        """Wait for one more launch than there are now."""
        before = self.run()["launches_done"]
        return self.wait(lambda s: s["launches_done"] > before, "a launch has ended")

    def complete(self, *, cycles: int = 2) -> pl.DataFrame:
        found = self.wait(lambda s: s["state"] == "done", "the sweep is done")
        assert (found["job"], found["trials_done"]) == (None, found["trials"])
        return check(self.folder, cycles=cycles)

    def numbers(self) -> list[str]:
        """Numbers of all jobs, by submission."""
        folder = script_path(self.folder / "out", "grid").with_suffix(".jobs")
        return [path.read_text().strip() for path in sorted(folder.iterdir())]

    def log(self) -> str:
        paths = sorted((self.folder / "out" / ".slurm").glob("*.out"))
        return "".join(path.read_text() for path in paths)

    def facts(self, number: str) -> list[str]:
        return self.slurm.run(["scontrol", "show", "job", number]).stdout.split()

    def warn(self, number: str) -> None:
        """What --signal=B:USR1@120 sends two minutes before the limit."""
        self.slurm.run(["scancel", "--batch", "--signal=USR1", number])


@pytest.fixture
def batch(slurm: Slurm, folder: Path, sweep_path: Path) -> Batch:
    return Batch(slurm, folder, sweep_path)


def test_elements_of_an_array_share_a_sweep_that_is_submitted_once(batch: Batch) -> None:
    write(batch.folder, batch.plugin, "sbatch", cycles=2, more="array = 2")
    calls = [batch.start() for _ in range(4)]
    shown = [call.communicate(timeout=60) for call in calls]
    told = [json.loads(out)["job"] for out, _ in shown if out]
    assert told
    assert all(out or "another call is submitting this sweep" in said for out, said in shown)
    (number,) = batch.numbers()
    assert set(told) == {number}
    assert batch.measured()["job"] == number
    found = batch.complete()
    assert found["job_id"].n_unique() == 2
    assert batch.numbers() == [number]
    names = {path.name for path in (batch.folder / "out" / ".slurm").glob("*.out")}
    assert names == {f"grid-{number}_{i}.out" for i in (0, 1)}


def test_options_of_the_header_win_over_ours(batch: Batch) -> None:
    header = ["--begin=now+1hour", "-J mine", "--no-requeue", "--nodes=3", "-o /tmp/x-%j"]
    number = batch.begin(more=f"sbatch_header = {json.dumps(header)}")["job"]
    facts = batch.facts(number)
    for fact in ("JobName=mine", "Requeue=0", "NumNodes=3-3", f"StdOut=/tmp/x-{number}"):
        assert fact in facts
    assert "PENDING" in batch.run()["state"]


def test_before_its_time_limit_it_queues_itself_again_to_the_end(batch: Batch) -> None:
    number = batch.begin()["job"]
    for restarts in ("Restarts=1", "Restarts=2"):
        batch.measured()
        batch.warn(number)
        wait_until(lambda fact=restarts: fact in batch.facts(number), "it waits", 60)  # type: ignore[misc]
    batch.complete()
    assert batch.numbers() == [number]
    assert batch.log().count("work is left: queueing job") == 2


def test_where_it_may_not_be_requeued_another_job_follows(batch: Batch) -> None:
    first = batch.begin(more='array = 2\nsbatch_header = ["--no-requeue"]')["job"]
    batch.measured()
    batch.warn(f"{first}_1")
    wait_until(lambda: len(batch.numbers()[0].split()) == 2, "its follower is submitted", 60)
    batch.complete()
    (numbers,) = batch.numbers()
    follower = numbers.split()[1]
    names = {path.name for path in (batch.folder / "out" / ".slurm").glob("*.out")}
    assert names == {f"grid-{first}_0.out", f"grid-{first}_1.out", f"grid-{follower}_1.out"}


def test_a_job_that_measured_nothing_ends(batch: Batch) -> None:
    batch.env = {**FAST, "FAKE_INIT_FAILS": "1"}
    number = batch.begin()["job"]
    wait_until(lambda: batch.slurm.state(number) == "FAILED", "it failed", 60)
    assert "Restarts=0" in batch.facts(number)
    assert "FAKE_INIT_FAILS" in batch.log()
    assert "no job of it waits or runs" in batch.run(code=2)["said"]
    batch.env = FAST
    again = batch.run("--resume")["job"]
    assert again != number
    assert batch.numbers() == [number, again]
    batch.complete()


def test_scancel_ends_it_cleanly_and_it_is_not_queued_again(batch: Batch) -> None:
    number = batch.begin()["job"]
    batch.measured()
    batch.slurm.run(["scancel", number])
    wait_until(lambda: batch.slurm.state(number) == "CANCELLED", "cancelled", 60)
    assert "SIGTERM: stopping after the running trial" in batch.log()
    assert "go on with --resume" in batch.run(code=2)["said"]
    batch.env = FAST
    batch.run("--resume")
    batch.complete()


def test_slurm_runs_it_again_after_a_dead_node(batch: Batch) -> None:
    number = batch.begin()["job"]
    batch.measured()
    node = batch.slurm.run(["squeue", f"--jobs={number}", "-h", "-o", "%B"]).stdout.strip()
    batch.slurm.set_node(node, "down")  # it comes back by itself (ReturnToService=2)
    batch.complete()
    assert batch.numbers() == [number]


@pytest.mark.soak
def test_time_limits_end_no_sweep(batch: Batch) -> None:
    # Slurm looks at limits every 30 s (slurmctld's PERIODIC_TIMEOUT).
    batch.env["FAKE_SECONDS_PER_ROW"] = "0.4"
    number = batch.begin(cycles=1, more='sbatch_header = ["--time=1", "--signal=B:USR1@30"]')["job"]
    batch.complete(cycles=1)
    assert "Restarts=0" not in batch.facts(number)
    assert batch.numbers() == [number]


#: It notes which job asked, and in which attempt.
NO_LOCKS = """
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
int flock(int descriptor, int operation) {
  const char* job = getenv("SLURM_JOB_ID");
  const char* restart = getenv("SLURM_RESTART_COUNT");
  FILE* file = fopen(getenv("NO_LOCKS_LOG"), "a");
  if (file != NULL && job != NULL) fprintf(file, "%s.%s\\n", job, restart ? restart : "0");
  if (file != NULL) fclose(file);
  errno = ENOSYS;
  return -1;
}
"""


@pytest.mark.parametrize("header", ["--requeue", "--no-requeue"])
def test_a_budget_is_spent_once_by_all_the_jobs_of_a_sweep_where_there_are_no_locks(
    header: str, batch: Batch, tmp_path: Path
) -> None:
    """What is preloaded makes flock fail in every process, as on Lustre without `-o flock`.

    Each job takes over from the one before, which Slurm says is over.
    """
    (tmp_path / "no_locks.c").write_text(NO_LOCKS)
    made, asked = tmp_path / "no_locks.so", tmp_path / "asked"
    source = str(tmp_path / "no_locks.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), source], check=True)
    batch.env.update(LD_PRELOAD=str(made), NO_LOCKS_LOG=str(asked), FAKE_SECONDS_PER_ROW="0.15")
    more = f'sbatch_header = ["{header}"]\n[budget]\nmax_measurements = 70'
    batch.begin(cycles=4, more=more)
    for count in (1, 2):
        batch.warn(batch.measured()["job"])
        wait_until(lambda n=count: batch.log().count("work is left") == n, "it stops", 60)  # type: ignore[misc]
    batch.wait(lambda s: s["state"] == "budget", "the budget is spent")
    assert len(set(asked.read_text().split())) == 3
    out = batch.folder / "out"
    timed = store.read(out).filter(pl.col("status") == "ok", pl.col("default_scope") == "profile")
    assert 0 < timed.height <= 2 * 70  # each measurement is two rows: in place and out of place
