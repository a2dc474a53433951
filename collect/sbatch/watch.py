"""Submits a batch job, watches it, and submits it again while work is left.

A time limit, a preemption or a dead node ends a job; what it measured is on disk, and the next job
continues from there. It stops only when an attempt made no progress.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dynamiccl.collect.processes.interrupt import Interrupt
from dynamiccl.collect.sbatch.script import BatchJob, batch_script
from dynamiccl.errors import MachineError
from dynamiccl.slurm import Element, Pace, Queue, summarise

_log = logging.getLogger(__name__)

#: Lines of a job's log that an error quotes.
_TAIL_LINES: Final = 5
_TAIL_BYTES: Final = 8192


class Outcome(StrEnum):
    """Why watching ended."""

    COMPLETE = "complete"
    #: The job goes on without us.
    DETACHED = "detached"


@dataclass(frozen=True, slots=True)
class Work:
    """The progress of the job's work, as seen from outside."""

    is_complete: Callable[[], bool]
    #: Grows whenever something was done, e.g. the number of committed launches.
    progress: Callable[[], int]
    #: Called at every look at the queue, e.g. to show how far the work is.
    on_look: Callable[[], None] = lambda: None


def run_as_batch(
    job: BatchJob, work: Work, queue: Queue, interrupt: Interrupt, pace: Pace | None = None
) -> Outcome:
    """Run a sweep as a batch job until its work is complete.

    A job of an earlier call that still waits or runs is watched on, not submitted twice.

    Args:
        job: what to submit.
        work: whether it is done, and how far it is.
        queue: where to submit it.
        interrupt: the first signal detaches from the job, a second Ctrl-C right after cancels it.
        pace: how often to look.

    Raises:
        InvalidSweep: a header line that sbatch cannot take.
        MachineError: the job is refused, cancelled by somebody, or gets nothing done.
        KeyboardInterrupt: the job was cancelled by a second Ctrl-C.
    """
    pace = pace or Pace()
    job.folder.mkdir(parents=True, exist_ok=True)
    job.script.write_text(batch_script(job), encoding="utf-8")
    number = _still_there(job, queue)
    while number is not None or not work.is_complete():
        before = work.progress()
        if number is None:
            number = queue.submit(job.script)
            _remember(job, number)
            _log.info("job %s submitted (%s)", number, job.script)
        watcher = _Watcher(number, queue, interrupt, pace)
        if not watcher.watch(work.on_look):
            _detach(number, queue, interrupt, pace)
            return Outcome.DETACHED
        _judge(job, work, watcher, before, pace)
        number = None
    return Outcome.COMPLETE


class _Watcher:
    """Watches one job until it ends."""

    def __init__(self, number: str, queue: Queue, interrupt: Interrupt, pace: Pace) -> None:
        self.number = number
        self.last: tuple[Element, ...] = ()
        self._queue = queue
        self._interrupt = interrupt
        self._pace = pace

    def watch(self, on_look: Callable[[], None]) -> bool:
        """Wait until no array element is alive (True), or a signal asks to detach (False)."""
        wait_s = self._pace.shortest_s
        shown = ""
        while True:
            if self._interrupt.requested:
                return False
            found = self._look()
            self.last = found or self.last
            on_look()
            summary = summarise(found)
            if summary != shown:
                _log.info("job %s: %s", self.number, summary)
                shown, wait_s = summary, self._pace.shortest_s
            if all(element.ended for element in found):
                return True
            _sleep(wait_s, self._interrupt)
            wait_s = min(1.5 * wait_s, self._pace.longest_s)

    def _look(self) -> tuple[Element, ...]:
        deadline = time.monotonic() + self._pace.patience_s
        while True:
            try:
                return self._queue.elements(self.number)
            except MachineError as error:
                if time.monotonic() >= deadline or self._interrupt.requested:
                    raise
                _log.warning("%s; asking again", error)
                _sleep(self._pace.longest_s, self._interrupt)


def _judge(job: BatchJob, work: Work, watcher: _Watcher, before: int, pace: Pace) -> None:
    """Return when the attempt made progress and another one may follow.

    Raises:
        MachineError: it made no progress, or somebody cancelled it.
    """
    deadline = time.monotonic() + pace.settle_s
    while not work.is_complete():
        done = work.progress() - before
        cancelled = any(element.state == "CANCELLED" for element in watcher.last)
        if done > 0 and not cancelled:
            _log.info("job %s ended with work left: submitting it again", watcher.number)
            return
        if time.monotonic() >= deadline:
            what = "was cancelled" if cancelled else "ended and got nothing done"
            raise MachineError(
                f"job {watcher.number} {what}: {summarise(watcher.last)}; its log ends: "
                f"{_tail(job, watcher)}; correct what it says, then go on with --resume"
            )
        time.sleep(min(pace.shortest_s, pace.settle_s))


def _detach(number: str, queue: Queue, interrupt: Interrupt, pace: Pace) -> None:
    _log.warning(
        "leaving job %s to itself (Ctrl-C within %g s cancels it); look at it with "
        "`squeue --jobs=%s`, watch it again with the same command and --resume",
        number,
        pace.detach_s,
        number,
    )
    deadline = time.monotonic() + pace.detach_s
    while time.monotonic() < deadline:
        if interrupt.forced:
            queue.cancel(number)
            _log.warning("job %s cancelled", number)
            raise KeyboardInterrupt
        time.sleep(0.05)


def _still_there(job: BatchJob, queue: Queue) -> str | None:
    """Id of a job that an earlier call submitted and that has not ended, or None."""
    if not job.number_file.exists():
        return None
    number = job.number_file.read_text(encoding="utf-8").strip()
    # Another cluster, or the same one years later, may know another job by this number.
    alive = [e for e in queue.elements(number) if e.script == str(job.script) and not e.ended]
    if not alive:
        return None
    _log.info("job %s of an earlier call is still there: watching it", number)
    return number


def _remember(job: BatchJob, number: str) -> None:
    draft = job.number_file.with_suffix(".job.new")
    draft.write_text(f"{number}\n", encoding="utf-8")
    draft.replace(job.number_file)


def _tail(job: BatchJob, watcher: _Watcher) -> str:
    """The last lines of the job's log; in an array, of the element that wrote last."""
    logs = [
        *job.folder.glob(f"{job.word}-{watcher.number}.out"),
        *job.folder.glob(f"{job.word}-{watcher.number}_*.out"),
    ]
    if not logs:
        return f"(no log in {job.folder})"
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    with newest.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{' | '.join(lines[-_TAIL_LINES:]) or 'nothing'} ({newest})"


def _sleep(seconds: float, interrupt: Interrupt) -> None:
    deadline = time.monotonic() + seconds
    while not interrupt.requested and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(0.1, left))
