"""Batch jobs on a real Slurm: time limits, cancelling, dead nodes, requeues, arrays."""

import logging
import os
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dynamiccl.collect.processes.interrupt import Interrupt
from dynamiccl.collect.sbatch import BatchJob, Outcome, Work, run_as_batch
from dynamiccl.errors import MachineError
from dynamiccl.slurm import Pace, SlurmQueue
from tests.cluster.slurm import Slurm, wait_until

pytestmark = pytest.mark.cluster

PACE = Pace(shortest_s=0.2, longest_s=0.4, settle_s=0.5, detach_s=0.5)
SWEEP = Path(__file__).with_name("fake_sweep.py")


@dataclass
class Batch:
    """A batch job that is watched by a thread, so that the test can do something to it."""

    slurm: Slurm
    job: BatchJob
    units: int
    interrupt: Interrupt = field(default_factory=Interrupt)
    outcome: Outcome | None = None
    error: BaseException | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def finish(self, seconds: float = 60.0) -> None:
        assert self._thread is not None
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the watcher did not end"

    def complete(self) -> None:
        self.finish()
        if self.error is not None:
            raise self.error
        assert self.outcome == Outcome.COMPLETE
        assert self.done() == self.units

    def done(self) -> int:
        return len(list(self.job.out.glob("unit-*")))

    def number(self) -> str:
        return self.job.number_file.read_text(encoding="utf-8").strip()

    def first_node(self) -> str:
        argv = ["squeue", f"--jobs={self.number()}", "--noheader", "--format=%B"]
        return self.slurm.run(argv).stdout.strip()

    def workers(self) -> list[str]:
        """Numbers of the jobs that did the units."""
        paths = self.job.out.glob("unit-*")
        return sorted({path.read_text(encoding="utf-8").strip() for path in paths}, key=int)

    def log(self, number: str) -> str:
        texts = [p.read_text(encoding="utf-8") for p in self.job.folder.glob(f"*-{number}*.out")]
        return "".join(texts)

    def wait_for_unit(self, count: int = 1) -> None:
        wait_until(lambda: self.done() >= count or self.error is not None, f"{count} units done")

    def _watch(self) -> None:
        work = Work(lambda: self.done() == self.units, self.done)
        try:
            self.outcome = run_as_batch(self.job, work, SlurmQueue(""), self.interrupt, PACE)
        except BaseException as error:  # for the test to look at
            self.error = error


@pytest.fixture
def batch(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """Six units of 0.3 s on two nodes, in a folder with a name that needs quotes."""
    out = tmp_path / "my data, 100%"
    out.mkdir()
    monkeypatch.setenv("PATH", f"{slurm.clients}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    return Batch(slurm, made_job(out), units=6)


def made_job(out: Path, units: int = 6, seconds: float = 0.3) -> BatchJob:
    command = (sys.executable, str(SWEEP), str(out), str(units), str(seconds))
    return BatchJob("my sweep", out, command, num_nodes=2, ranks_per_node=2)


def test_a_job_does_its_work(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    batch.start()
    batch.wait_for_unit()
    shown = batch.slurm.run(["scontrol", "show", "job", batch.number()]).stdout.split()
    batch.complete()
    for fact in ("JobName=my-sweep", "NumNodes=2", "NumTasks=4", "Requeue=1"):
        assert fact in shown
    assert batch.log(batch.number()) == "start 2 nodes\nend\n"
    said = [record.getMessage() for record in caplog.records]
    assert f"job {batch.number()}: COMPLETED" in said
    assert [line for line in said if f"job {batch.number()}: RUNNING on " in line]


def test_the_elements_of_an_array_share_the_work(batch: Batch) -> None:
    batch.job = replace(batch.job, array=2, num_nodes=1)
    batch.start()
    batch.complete()
    assert len(batch.workers()) == 2
    for shard in (0, 1):
        halves = {(batch.job.out / f"unit-{i}").read_text() for i in range(shard, 6, 2)}
        assert len(halves) == 1
    names = sorted(path.name for path in batch.job.folder.glob("*.out"))
    assert names == [f"my-sweep-{batch.number()}_{i}.out" for i in (0, 1)]


def test_what_is_sent_before_the_time_limit_ends_it_cleanly_and_it_goes_on(batch: Batch) -> None:
    batch.start()
    batch.wait_for_unit()
    first = batch.number()
    batch.slurm.run(["scancel", "--signal=USR1", "--batch", first])
    batch.complete()
    assert "clean stop after SIGUSR1" in batch.log(first)
    assert batch.workers() == [first, batch.number()]


def test_scancel_ends_it_cleanly_and_it_is_not_submitted_again(batch: Batch) -> None:
    batch.start()
    batch.wait_for_unit()
    batch.slurm.run(["scancel", batch.number()])
    batch.finish()
    assert isinstance(batch.error, MachineError)
    message = str(batch.error)
    assert message.startswith(f"job {batch.number()} was cancelled: CANCELLED")
    assert "clean stop after SIGTERM" in message
    assert 1 <= batch.done() < batch.units


def test_a_dead_node_is_noticed_and_the_job_submitted_again(batch: Batch) -> None:
    batch.job = replace(batch.job, header=("--no-requeue",))
    batch.start()
    batch.wait_for_unit()
    first = batch.number()
    batch.slurm.set_node(batch.first_node(), "down")
    batch.complete()
    assert batch.slurm.state(first) == "NODE_FAIL"
    assert batch.workers() == [first, batch.number()]


def test_a_requeued_job_keeps_its_number_and_its_watcher(
    batch: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    batch.start()
    batch.wait_for_unit()
    number = batch.number()
    batch.slurm.set_node(batch.first_node(), "down")
    batch.complete()
    assert batch.workers() == [number]
    assert batch.log(number).count("start 2 nodes\n") == 2
    assert f"job {number}: PENDING (BeginTime)" in [r.getMessage() for r in caplog.records]


def test_a_job_that_gets_nothing_done_stops_it_with_its_last_words(batch: Batch) -> None:
    script = "echo first; echo 'no NVLink here' >&2; exit 3"
    batch.job = replace(batch.job, command=("sh", "-c", script))
    batch.start()
    batch.finish()
    assert isinstance(batch.error, MachineError)
    message = str(batch.error)
    assert message.startswith(
        f"job {batch.number()} ended and got nothing done: FAILED (NonZeroExitCode)"
    )
    assert f"first | no NVLink here ({batch.job.folder}/my-sweep-{batch.number()}.out)" in message


def test_a_refused_job_says_why(batch: Batch) -> None:
    batch.job = replace(batch.job, header=("--partition=nowhere",))
    batch.start()
    batch.finish()
    assert isinstance(batch.error, MachineError)
    assert "invalid partition" in str(batch.error)


def test_a_job_that_was_left_is_found_again(batch: Batch) -> None:
    batch.start()
    batch.wait_for_unit()
    batch.interrupt.requested = True
    batch.finish()
    assert batch.outcome == Outcome.DETACHED
    assert batch.slurm.state(batch.number()) == "RUNNING"
    again = Batch(batch.slurm, batch.job, batch.units)
    again.start()
    again.complete()
    assert again.workers() == [batch.number()]


def test_a_second_ctrl_c_cancels_the_job(batch: Batch) -> None:
    batch.start()
    batch.wait_for_unit()
    batch.interrupt.requested = batch.interrupt.forced = True
    batch.finish()
    assert isinstance(batch.error, KeyboardInterrupt)
    wait_until(lambda: batch.slurm.state(batch.number()) == "CANCELLED", "cancelled")


@pytest.mark.soak
def test_a_time_limit_ends_a_job_and_the_next_one_goes_on(batch: Batch, tmp_path: Path) -> None:
    # Slurm looks at limits every 30 s (slurmctld's PERIODIC_TIMEOUT), hence both cases at once.
    warned = replace(batch, units=350)
    header = ("--time=1", "--signal=B:USR1@60")
    warned.job = replace(made_job(batch.job.out, 350, 0.1), header=header)
    hung = replace(batch, interrupt=Interrupt())
    out = tmp_path / "hung"
    out.mkdir()
    hung.job = replace(made_job(out), command=("env", "HANG_AT=3", *made_job(out).command))
    warned.start()
    hung.start()
    hung.wait_for_unit(3)
    killed = hung.number()
    batch.slurm.run(["scontrol", "update", f"jobid={killed}", "endtime=now"])
    warned.complete()
    hung.complete()
    # On a slow machine the second one is warned too.
    *warned_ones, last = warned.workers()
    assert warned_ones
    assert all("clean stop after SIGUSR1" in warned.log(number) for number in warned_ones)
    assert warned.log(last) == "start 2 nodes\nend\n"
    assert batch.slurm.state(killed) == "TIMEOUT"
    assert hung.workers() == [killed, hung.number()]
