"""Sweeps as batch jobs on a real Slurm: they queue themselves again, and are submitted once."""

import json
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
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


@dataclass
class Batch:
    """A sweep of the stand-in, submitted by the command line."""

    slurm: Slurm
    folder: Path
    plugin: Path
    env: dict[str, str] = field(default_factory=dict)

    def begin(self, header: str = "[]", *, cycles: int = 3, **keys: str) -> dict[str, Any]:
        launcher = f'kind = "sbatch", sbatch_header = {header}'
        (self.folder / "sweep.toml").write_text(
            small(self.plugin, launcher, cycles=str(cycles), **keys)
        )
        self.picks = SMALL_PICKS * cycles
        return self.run()

    def play(self, **values: str) -> None:
        """What the stand-in's processes find in their environment from now on."""
        lines = "".join(f"export {name}={value}\n" for name, value in values.items())
        (self.folder / "settings.new").write_text(lines)
        (self.folder / "settings.new").replace(self.folder / "settings")

    def start(self, *more: str) -> subprocess.Popen[str]:
        path = f"{self.slurm.clients}:{os.environ['PATH']}"
        return subprocess.Popen(
            command(self.folder, "--json", *more),
            env=self.slurm.environ({**environment(PATH=path), **self.env}),
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

    @property
    def journal(self) -> Path:
        return self.folder / "out" / ".journal" / "system=box" / "sweep=grid"

    def launches(self) -> int:
        return progress_on_disk(self.journal)[0]

    def owner(self) -> tuple[str, int] | None:
        """Job and attempt that the file says which stands for a lock."""
        with suppress(FileNotFoundError, json.JSONDecodeError):
            found = json.loads((self.journal / "owner").read_text())
            return str(found["job"]), int(found["restart"])
        return None

    def measured(self) -> None:
        """Wait for one more launch than there are now."""
        before = self.launches()
        wait_until(lambda: self.launches() > before, "a launch has ended", 120)

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

    def jobs(self) -> list[str]:
        """Numbers of the jobs that have begun, which their logs are named by."""
        return sorted(path.stem.removeprefix("grid-") for path in self.logs())

    def logs(self) -> list[Path]:
        return [*script_path(self.folder / "out", "grid").parent.glob("*.out")]

    def count(self, words: str) -> int:
        return sum(path.read_text().count(words) for path in self.logs())

    def facts(self, number: str) -> list[str]:
        return self.slurm.run(["scontrol", "show", "job", number]).stdout.split()

    def wait_for(self, number: str, fact: str) -> None:
        wait_until(lambda: fact in self.facts(number), f"{fact} of job {number}", 150)

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
    first = batch.begin('["--no-requeue"]')["job"]
    batch.measured()
    assert batch.run()["job"] == first
    batch.warn(first)
    wait_until(lambda: len(batch.jobs()) == 2, "its follower runs", 60)
    assert batch.complete()["job_id"].n_unique() == 2


def test_options_of_the_header_win_over_ours(batch: Batch) -> None:
    header = ["--begin=now+1hour", "-J mine", "--no-requeue", "--nodes=3", "-o /tmp/x-%j"]
    number = batch.begin(json.dumps(header))["job"]
    facts = batch.facts(number)
    for fact in ("JobName=mine", "Requeue=0", "NumNodes=3-3", f"StdOut=/tmp/x-{number}"):
        assert fact in facts
    assert "PENDING" in batch.run()["state"]


def test_after_a_dead_node_it_is_queued_again_to_the_end(batch: Batch) -> None:
    number = batch.begin()["job"]
    batch.measured()
    node = batch.slurm.run(["squeue", f"--jobs={number}", "-h", "-o", "%B"]).stdout.strip()
    batch.slurm.set_node(node, "down")  # it comes back by itself (ReturnToService=2)
    batch.wait_for(number, "Restarts=1")
    found = batch.complete()
    assert batch.jobs() == [number]
    assert batch.count("work is left: queueing job") == 0
    assert set(found["exclusive_node"]) == {False}  # it did not ask for --exclusive


@pytest.mark.soak
def test_time_limits_end_no_sweep(batch: Batch) -> None:
    # Slurm looks at limits every 30 s (slurmctld's PERIODIC_TIMEOUT).
    batch.play(FAKE_SECONDS_PER_ROW="2")
    number = batch.begin('["--time=1", "--signal=B:USR1@30"]', cycles=4)["job"]
    batch.wait_for(number, "Restarts=1")
    batch.complete()
    assert batch.jobs() == [number]


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
    number = batch.begin(cycles=8, budget="{ max_measurements = 30 }")["job"]
    batch.measured()
    assert batch.owner() == (number, 0)
    batch.warn(number)
    batch.wait_for(number, "Restarts=1")
    assert batch.count("work is left: queueing job") == 1
    batch.slurm.run(["scontrol", "update", f"JobId={number}", "Requeue=0"])
    batch.measured()
    assert batch.owner() == (number, 1)
    batch.warn(number)
    wait_until(lambda: len(batch.jobs()) == 2, "its follower runs", 60)
    follower = batch.jobs()[1]
    wait_until(lambda: batch.owner() == (follower, 0), "its follower holds the sweep", 60)
    batch.play()
    wait_until(batch.ended, "the budget is spent", 120)
    assert batch.run()["state"] == "budget"
    out = batch.folder / "out"
    timed = store.read(out).filter(pl.col("status") == "ok", pl.col("default_scope") == "profile")
    assert 0 < timed.height <= 2 * 30  # each measurement is two rows: in place and out of place
