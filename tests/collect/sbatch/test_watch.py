"""Watching, judging, submitting again, on a queue that is played (tests/cluster: a real one)."""

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dynamiccl.collect.processes.interrupt import Interrupt
from dynamiccl.collect.sbatch import BatchJob, Outcome, Work, run_as_batch
from dynamiccl.errors import MachineError
from dynamiccl.slurm import Element, Pace, summarise

PACE = Pace(shortest_s=0.001, longest_s=0.001, settle_s=0.02, detach_s=0.05, patience_s=0.2)
#: What a look at the queue finds: (state, reason) of each element, or no answer.
Look = Sequence[tuple[str, str]] | MachineError
RUNS: Look = [("RUNNING", "None")]


@dataclass
class Played:
    """A queue whose answers are written down; `then` happens when a job's last answer is given."""

    script: Path
    jobs: list[list[Look]]
    then: Callable[[], None] = lambda: None
    submitted: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def submit(self, script: Path) -> str:
        assert script.read_text(encoding="utf-8").startswith("#!/bin/bash\n")
        self.submitted.append(str(10 + len(self.submitted)))
        return self.submitted[-1]

    def elements(self, job: str) -> tuple[Element, ...]:
        looks = self.jobs[int(job) - 10]
        if len(looks) == 1:
            self.then()
        look = looks.pop(0) if len(looks) > 1 else looks[0]
        if isinstance(look, MachineError):
            raise look
        return tuple(
            Element(f"{job}_{i}" if len(look) > 1 else job, state, reason, "n1", str(self.script))
            for i, (state, reason) in enumerate(look)
        )

    def cancel(self, job: str) -> None:
        self.cancelled.append(job)


@dataclass
class Desk:
    """A job, its queue, and how much of its work is done."""

    job: BatchJob
    queue: Played
    done: int = 0
    total: int = 2
    interrupt: Interrupt = field(default_factory=Interrupt)
    looks: int = 0

    def run(self) -> Outcome:
        work = Work(lambda: self.done >= self.total, lambda: self.done, self.look)
        return run_as_batch(self.job, work, self.queue, self.interrupt, PACE)

    def look(self) -> None:
        self.looks += 1

    def advance(self) -> None:
        self.done += 1


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    job = BatchJob("s", tmp_path, ("true",), num_nodes=1, ranks_per_node=1)
    made = Desk(job, Played(job.script, [[RUNS, [("COMPLETED", "None")]]]))
    made.queue.then = made.advance
    return made


def ends(state: str, reason: str = "None") -> list[Look]:
    return [RUNS, [(state, reason)]]


def test_nothing_is_submitted_when_nothing_is_left(desk: Desk) -> None:
    desk.done = 2
    assert desk.run() == Outcome.COMPLETE
    assert desk.queue.submitted == []


@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED", "NODE_FAIL", "FAILED", "COMPLETED"])
def test_it_goes_on_as_long_as_something_gets_done(desk: Desk, state: str) -> None:
    desk.total = 3
    desk.queue.jobs = [ends(state), ends(state), ends("COMPLETED")]
    assert desk.run() == Outcome.COMPLETE
    assert desk.queue.submitted == ["10", "11", "12"]


def test_an_attempt_without_progress_is_an_error_that_quotes_the_log(desk: Desk) -> None:
    desk.queue.jobs = [ends("FAILED", "NonZeroExitCode")]
    desk.queue.then = lambda: None
    desk.job.folder.mkdir()
    log = desk.job.folder / "s-10.out"
    log.write_text("\n".join(f"line {i}" for i in range(9)), encoding="utf-8")
    with pytest.raises(MachineError) as error:
        desk.run()
    assert str(error.value) == (
        "job 10 ended and got nothing done: FAILED (NonZeroExitCode); its log ends: "
        f"line 4 | line 5 | line 6 | line 7 | line 8 ({log}); correct what it says, then go on "
        "with --resume"
    )


def test_a_job_that_left_no_log_is_an_error_that_says_so(desk: Desk) -> None:
    desk.queue.jobs = [ends("BOOT_FAIL")]
    desk.queue.then = lambda: None
    with pytest.raises(MachineError, match=r"BOOT_FAIL; its log ends: \(no log in .*\.slurm\)"):
        desk.run()


def test_a_cancelled_job_is_not_submitted_again_whatever_it_did(desk: Desk) -> None:
    desk.queue.jobs = [[[("RUNNING", "None"), ("RUNNING", "None")], [("CANCELLED", "None")]]]
    with pytest.raises(MachineError, match="job 10 was cancelled: CANCELLED"):
        desk.run()
    assert desk.queue.submitted == ["10"]


def test_work_that_appears_late_on_the_file_system_is_waited_for(desk: Desk) -> None:
    desk.queue.then = lambda: None
    looks = iter([0, 0, 0])

    def is_complete() -> bool:
        return desk.queue.submitted != [] and next(looks, None) is None

    work = Work(is_complete, lambda: 0)
    assert run_as_batch(desk.job, work, desk.queue, desk.interrupt, PACE) == Outcome.COMPLETE


def test_a_job_that_the_queue_has_forgotten_has_ended(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    desk.queue.jobs = [[RUNS, []], ends("COMPLETED")]
    assert desk.run() == Outcome.COMPLETE
    assert "job 10: gone from the queue" in [r.getMessage() for r in caplog.records]


def test_a_controller_may_be_away_for_a_while(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    silence = MachineError("squeue says nothing about job 10")
    desk.total = 1
    desk.queue.jobs = [[RUNS, silence, silence, RUNS, [("COMPLETED", "None")]]]
    assert desk.run() == Outcome.COMPLETE
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "squeue says nothing about job 10; asking again"
    ] * 2


def test_a_controller_that_stays_away_is_an_error(desk: Desk) -> None:
    desk.queue.jobs = [[RUNS, MachineError("squeue says nothing about job 10")]]
    with pytest.raises(MachineError, match="says nothing about job 10"):
        desk.run()


def test_only_changes_are_shown(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waits: Look = [("PENDING", "Resources")]
    desk.total = 1
    desk.queue.jobs = [
        [waits, waits, [("PENDING", "Priority")], RUNS, RUNS, [("COMPLETED", "None")]]
    ]
    desk.run()
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("job 10: ")]
    words = ["PENDING (Resources)", "PENDING (Priority)", "RUNNING on n1", "COMPLETED"]
    assert said == [f"job 10: {word}" for word in words]
    assert desk.looks == 6


def test_elements_in_one_state_are_counted() -> None:
    states = [("RUNNING", "n1"), ("PENDING", ""), ("PENDING", ""), ("FAILED", "n2")]
    made = tuple(
        Element(f"1_{i}", state, "Resources" if state == "PENDING" else "None", nodes, "s")
        for i, (state, nodes) in enumerate(states)
    )
    assert summarise(made) == "1 FAILED, 2 PENDING (Resources), 1 RUNNING on n1"


def test_the_first_signal_leaves_the_job_alone_and_a_second_call_finds_it(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.total = 1
    desk.queue.jobs = [[RUNS, RUNS, RUNS, [("COMPLETED", "None")]]]
    desk.interrupt.requested = True
    assert desk.run() == Outcome.DETACHED
    assert "`squeue --jobs=10`, watch it again with the same command and --resume" in caplog.text
    desk.interrupt = Interrupt()
    assert desk.run() == Outcome.COMPLETE
    assert (desk.queue.submitted, desk.queue.cancelled) == (["10"], [])


def test_a_second_ctrl_c_cancels_the_job(desk: Desk) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with desk.interrupt:
        desk.queue.then = twice
        desk.queue.jobs = [[RUNS]]
        with pytest.raises(KeyboardInterrupt):
            desk.run()
    assert desk.queue.cancelled == ["10"]


def test_another_job_with_the_number_of_ours_is_not_ours(desk: Desk) -> None:
    desk.job.folder.mkdir()
    desk.job.number_file.write_text("10\n", encoding="utf-8")
    desk.queue.script = Path("/somebody/elses.sbatch")
    desk.queue.jobs = [[RUNS, RUNS, [("COMPLETED", "None")]]]
    desk.total = 1
    assert desk.run() == Outcome.COMPLETE
    assert desk.queue.submitted == ["10"]
