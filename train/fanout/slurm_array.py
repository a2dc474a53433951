"""Runs trials as a Slurm array: one element a trial, one CPU each.

An element that is preempted or loses its node is queued again by Slurm (`--requeue`) and its trial
goes on from its last epoch. Whether a trial is done, the tracking store says; the queue says only
that nothing more will come.
"""

import logging
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.errors import MachineError, UserError
from dynamiccl.slurm import Element, bare_option, elements, option_name, quoted, submit, summarise
from dynamiccl.train import tracking
from dynamiccl.train.fanout.backend import TrialResult, trial_arguments
from dynamiccl.train.study import trial_summary
from dynamiccl.train.worker import ONE_THREAD, reason

_log = logging.getLogger(__name__)

#: Tag of the parent run: the array that was submitted last.
_JOB_TAG: Final = "slurm_job"
_SCRIPT_NAME: Final = "trials.sbatch"
_JOB_NAME: Final = "dynamiccl-study"
_FIX: Final = "correct what --sbatch-option gives, then go on with --resume"
#: Seconds between two looks right after a change, and at most; a controller is shared by everybody.
_SHORTEST_S: Final = 1.0
_LONGEST_S: Final = 15.0
#: Seconds: a shared file system may show a node's last files late.
_SETTLE_S: Final = 15.0
#: Seconds that a controller may be away, e.g. for a restart.
_PATIENCE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class SlurmArray:
    """A backend on Slurm, by its commands on PATH."""

    #: Elements that run at a time; None: as many as Slurm lets.
    jobs: int | None = None
    #: The user's options of sbatch, one each, e.g. "--time=02:00:00"; they replace ours.
    options: tuple[str, ...] = ()
    #: Scripts and logs go to `root`/study id, on a file system that all nodes share.
    root: Path = Path("dynamiccl-slurm")

    def __post_init__(self) -> None:
        """Raise UserError for a line that is no sbatch option, or sets an array."""
        for line in self.options:
            if option_name(_dashed(line)) is None:
                raise UserError(
                    f"--sbatch-option {line} is no option of sbatch; write one at a time, like "
                    "--sbatch-option=--time=02:00:00"
                )
            if option_name(_dashed(line)) == "array":
                raise UserError(
                    f"--sbatch-option {line}: the array is the study's; --jobs N lets N of its "
                    "elements run at a time"
                )

    def run(self, run_id: str, numbers: Sequence[int], tracking_uri: str) -> Iterator[TrialResult]:
        """Submit an array and follow it to its end; one that is still there is followed first.

        Interrupted, it leaves the array to itself, and says how to come back to it.

        Raises:
            MachineError: sbatch refuses the script, or the controller stays silent.
        """
        run = tracking.reopen_run(tracking_uri, run_id)
        job = run.tag(_JOB_TAG)
        there = set(numbers) & set(self._alive(job, run_id))
        if there:
            _log.info("job %s of an earlier call is still there: following it", job)
            yield from self._follow(job, run_id, there, tracking_uri)
        rest = [number for number in numbers if number not in there]
        if not rest:
            return
        script = self.write_script(run_id, rest, tracking_uri)
        job = submit(script, fix=_FIX)
        run.set_tags({_JOB_TAG: job})
        _log.info("job %s submitted (%s)", job, script)
        yield from self._follow(job, run_id, set(rest), tracking_uri)

    def write_script(self, run_id: str, numbers: Sequence[int], tracking_uri: str) -> Path:
        """Write the batch script for these trials; returns its path."""
        folder = self._folder(run_id)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _SCRIPT_NAME
        text = array_script(run_id, numbers, tracking_uri, folder, self)
        path.write_text(text, encoding="utf-8")
        return path

    def _folder(self, run_id: str) -> Path:
        return self.root.absolute() / run_id

    def _alive(self, job: str, run_id: str) -> Iterator[int]:
        """Trials of a job that have not ended."""
        for element in elements(job) if job else ():
            # Another cluster, or the same one years later, may know another job by this number.
            ours = element.script.endswith(f"/{run_id}/{_SCRIPT_NAME}")
            if ours and not element.ended:
                yield _trial_of(element)

    def _follow(
        self, job: str, run_id: str, waiting: set[int], tracking_uri: str
    ) -> Iterator[TrialResult]:
        wait_s, shown = _SHORTEST_S, ""
        try:
            while True:
                found = {_trial_of(e): e for e in _look(job)}
                over = {n for n in waiting if n not in found or found[n].ended}
                yield from self._outcomes(
                    job, run_id, {n: found.get(n) for n in over}, tracking_uri
                )
                waiting = waiting - over
                if not waiting:
                    return
                summary = summarise(tuple(found.values()))
                if summary != shown:
                    _log.info("job %s: %s", job, summary)
                    shown, wait_s = summary, _SHORTEST_S
                time.sleep(wait_s)
                wait_s = min(1.5 * wait_s, _LONGEST_S)
        except KeyboardInterrupt:
            _log.warning(
                "leaving job %s to itself: follow it again with --resume %s --slurm, end it with "
                "`scancel %s`",
                job,
                run_id,
                job,
            )
            raise

    def _outcomes(
        self, job: str, run_id: str, over: dict[int, Element | None], tracking_uri: str
    ) -> Iterator[TrialResult]:
        """Outcomes of ended elements, from the tracking store."""
        deadline = time.monotonic() + _SETTLE_S
        left = dict(over)
        while left:
            for number in sorted(left):
                summary = trial_summary(run_id, number, tracking_uri)
                if summary is not None:
                    del left[number]
                    yield TrialResult(number, summary.validation_regret, "")
            # One that Slurm saw succeed has written its summary: it is on its way to us.
            late = any(e is None or e.state == "COMPLETED" for e in left.values())
            if not late or time.monotonic() >= deadline:
                break
            time.sleep(_SHORTEST_S)
        for number, element in sorted(left.items()):
            yield TrialResult(number, None, self._error(job, run_id, number, element))

    def _error(self, job: str, run_id: str, number: int, element: Element | None) -> str:
        log = self._folder(run_id) / f"{job}_{number}.out"
        state = "gone from the queue" if element is None else element.text
        try:
            said = log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return f"job {job}_{number} {state}; no log at {log}"
        return f"{reason(said) or 'no output'} (job {job}_{number} {state}; {log})"


def _look(job: str) -> tuple[Element, ...]:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return elements(job)
        except MachineError as error:
            if time.monotonic() >= deadline:
                raise
            _log.warning("%s; asking again", error)
            time.sleep(_LONGEST_S)


def array_script(
    run_id: str, numbers: Sequence[int], tracking_uri: str, folder: Path, array: SlurmArray
) -> str:
    """The text of the batch script (pure)."""
    lines = [_dashed(line) for line in array.options]
    given = {option_name(line) for line in lines}
    throttle = f"%{array.jobs}" if array.jobs else ""
    # sbatch reads a percent sign in a file name as a pattern.
    output = quoted(f"{folder}/".replace("%", "%%") + "%A_%a.out")
    ours = {
        "job-name": "=" + _JOB_NAME,
        "ntasks": "=1",
        "cpus-per-task": "=1",
        "output": "=" + output,
        # A requeued element keeps its number, and its log goes on.
        "open-mode": "=append",
        "requeue": "",
        "array": f"={_ranges(numbers)}{throttle}",
    }
    arguments = trial_arguments(run_id, "$SLURM_ARRAY_TASK_ID", tracking_uri)
    words = [
        f'"{word}"' if word.startswith("$") else shlex.quote(word)
        for word in (sys.executable, *arguments)
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}{value}" for name, value in ours.items() if name not in given),
            *(f"#SBATCH {line}" for line in lines),
            "",
            "# Written by dynamiccl-train. A trial goes on where it stopped, so it may run again.",
            *(f"export {name}={value}" for name, value in ONE_THREAD.items()),
            f"exec {' '.join(words)}",
            "",
        ]
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as an sbatch array range.

    >>> _ranges([5, 0, 1, 2])
    '0-2,5'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _trial_of(element: Element) -> int:
    """The trial number of an array element with id JOB_TRIAL."""
    return int(element.id.rpartition("_")[2])


def _dashed(line: str) -> str:
    """An sbatch option with its dashes, which may be left out."""
    bare = bare_option(line)
    return bare if bare.startswith("-") else f"--{bare}"
