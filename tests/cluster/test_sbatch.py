"""Sweeps as batch jobs on a real Slurm: they queue themselves again, and are submitted once."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.collect.batch import script_path
from dynamiccl.collect.journal import COMPLETE, progress_on_disk
from dynamiccl.datasets import store
from tests.cluster.slurm import Slurm, wait_until
from tests.cluster.test_sweeps import SMALL_PICKS, check_picks, command, environment, small

pytestmark = pytest.mark.cluster


class Batch:
    """A sweep of the stand-in, submitted by the command line."""

    def __init__(self, slurm: Slurm, folder: Path, plugin: Path) -> None:
        self.slurm, self.folder, self.plugin = slurm, folder, plugin
        self.env: dict[str, str] = {}
        self.journal = folder / "out" / ".journal" / "system=box" / "sweep=grid"

    def begin(self, header: str = "[]", *, cycles: int = 3, **keys: str) -> str:
        """Submit it; the job's number."""
        launcher = f'kind = "sbatch", sbatch_header = {header}'
        text = small(self.plugin, launcher, cycles=str(cycles), **keys)
        (self.folder / "sweep.toml").write_text(text)
        self.picks = SMALL_PICKS * cycles
        return str(self.run()["job"])

    def play(self, **values: str) -> None:
        """What the stand-in's processes find in their environment from now on."""
        lines = "".join(f"export {name}={value}\n" for name, value in values.items())
        (self.folder / "settings.new").write_text(lines)
        (self.folder / "settings.new").replace(self.folder / "settings")

    def run(self) -> dict[str, Any]:
        """The same command again; its JSON."""
        path = f"{self.slurm.clients}:{os.environ['PATH']}"
        env = self.slurm.environ({**environment(PATH=path), **self.env})
        argv = command(self.folder, "--json")
        return dict(json.loads(subprocess.check_output(argv, env=env, text=True, timeout=60)))

    def owner(self) -> tuple[str, int] | None:
        """Job and attempt that the file says which stands for a lock."""
        with suppress(FileNotFoundError, json.JSONDecodeError):
            found = json.loads((self.journal / "owner").read_text())
            return str(found["job"]), int(found["restart"])
        return None

    def measured(self) -> None:
        """Wait for one more launch than there are now."""
        before = progress_on_disk(self.journal)[0]
        wait_until(lambda: progress_on_disk(self.journal)[0] > before, "a launch has ended", 120)

    def ended(self) -> bool:
        """Whether the journal says how it ended, and no job is there any more."""
        alive = self.slurm.run(["squeue", "--noheader"]).stdout
        return not alive and (self.journal / COMPLETE).exists()

    def complete(self) -> pl.DataFrame:
        """Let it run to its end; what it measured."""
        self.play()
        wait_until(self.ended, "the sweep is done", 180)
        found = self.run()
        assert (found["job"], found["state"]) == (None, "done")
        assert found["trials_done"] == found["trials"]
        return check_picks(self.folder, self.picks)

    def logs(self) -> dict[str, str]:
        """What the jobs that have begun say, by their numbers."""
        found = script_path(self.folder / "out", "grid").parent.glob("*.out")
        return {path.stem.removeprefix("grid-"): path.read_text() for path in sorted(found)}

    def follower(self) -> str:
        """Wait for a second job, and return its number."""
        wait_until(lambda: len(self.logs()) == 2, "its follower runs", 60)
        return [*self.logs()][1]

    def facts(self, number: str) -> list[str]:
        return self.slurm.run(["scontrol", "show", "job", number]).stdout.split()

    def requeued(self, number: str) -> None:
        wait_until(lambda: "Restarts=1" in self.facts(number), f"{number} begins again", 150)

    def warn(self, number: str) -> None:
        """What --signal=B:USR1@120 sends two minutes before the limit."""
        self.slurm.run(["scancel", "--batch", "--signal=USR1", number])


@pytest.fixture
def batch(slurm: Slurm, folder: Path, sweep_path: Path) -> Batch:
    """A launch of 4 to 8 rows takes some seconds at first, so that something can happen to it."""
    for program in (folder / "bin").iterdir():
        text = program.read_text().replace("exec ", f". {folder}/settings\nexec ", 1)
        program.write_text(text)
    made = Batch(slurm, folder, sweep_path)
    made.play(FAKE_SECONDS_PER_ROW="0.25")
    return made


def test_a_job_is_submitted_once_and_followed_where_it_may_not_be_requeued(batch: Batch) -> None:
    first = batch.begin('["--no-requeue"]')
    batch.measured()
    assert batch.run()["job"] == first
    batch.warn(first)
    batch.follower()
    assert batch.complete()["job_id"].n_unique() == 2


def test_options_of_the_header_win_over_ours(batch: Batch) -> None:
    header = ["--begin=now+1hour", "-J mine", "--no-requeue", "--nodes=3", "-o /tmp/x-%j"]
    number = batch.begin(json.dumps(header))
    facts = batch.facts(number)
    for fact in ("JobName=mine", "Requeue=0", "NumNodes=3-3", f"StdOut=/tmp/x-{number}"):
        assert fact in facts
    assert "PENDING" in batch.run()["state"]


def test_after_a_dead_node_it_is_queued_again_to_the_end(batch: Batch) -> None:
    number = batch.begin()
    batch.measured()
    node = batch.slurm.run(["squeue", f"--jobs={number}", "-h", "-o", "%B"]).stdout.strip()
    batch.slurm.set_node(node, "down")  # it comes back by itself (ReturnToService=2)
    batch.requeued(number)
    found = batch.complete()
    assert [*batch.logs()] == [number]
    assert "work is left: queueing job" not in batch.logs()[number]
    assert set(found["exclusive_node"]) == {False}  # it did not ask for --exclusive


@pytest.mark.soak
def test_time_limits_end_no_sweep(batch: Batch) -> None:
    # Slurm looks at limits every 30 s (slurmctld's PERIODIC_TIMEOUT).
    batch.play(FAKE_SECONDS_PER_ROW="2")
    number = batch.begin('["--time=1", "--signal=B:USR1@30"]', cycles=4)
    batch.requeued(number)
    batch.complete()
    assert [*batch.logs()] == [number]


def test_a_budget_is_spent_once_by_all_the_jobs_of_a_sweep_where_there_are_no_locks(
    batch: Batch, tmp_path: Path
) -> None:
    """What is preloaded makes flock fail in every process, as on Lustre without `-o flock`.

    The first job is requeued; then it may no longer be, and another follows. Each takes over from
    the one before, which Slurm says is over.
    """
    made, source = tmp_path / "no_locks.so", tmp_path / "no_locks.c"
    source.write_text(
        "#include <errno.h>\nint flock(int d, int o) { errno = ENOSYS; return -1; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    batch.env.update(LD_PRELOAD=str(made))
    number = batch.begin(cycles=8, budget="{ max_measurements = 30 }")
    batch.measured()
    assert batch.owner() == (number, 0)
    batch.warn(number)
    batch.requeued(number)
    assert batch.logs()[number].count("work is left: queueing job") == 1
    batch.slurm.run(["scontrol", "update", f"JobId={number}", "Requeue=0"])
    batch.measured()
    assert batch.owner() == (number, 1)
    batch.warn(number)
    follower = batch.follower()
    wait_until(lambda: batch.owner() == (follower, 0), "its follower holds the sweep", 60)
    batch.play()
    wait_until(batch.ended, "the budget is spent", 120)
    assert batch.run()["state"] == "budget"
    out = batch.folder / "out"
    timed = store.read(out).filter(pl.col("status") == "ok", pl.col("default_scope") == "profile")
    assert 0 < timed.height <= 2 * 30  # each measurement is two rows: in place and out of place
