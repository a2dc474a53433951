"""Runs a sweep: rounds of launches, each committed to the journal, and a Parquet part a round.

Launches run in random order, so that drift of the machine affects all configs alike. What becomes
of those that fail: docs/collect.md.
"""

import logging
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from dynamiccl.collect import schedule
from dynamiccl.collect.grid import LaunchProfile, Setting, Trial
from dynamiccl.collect.journal import Journal, Record, open_journal
from dynamiccl.collect.schedule import Launch, LaunchMode, Row, grouped, lost_row, trial_row
from dynamiccl.collect.strategies import Outcome, Strategy, outcome_of
from dynamiccl.collect.sweep import Sweep
from dynamiccl.datasets.schema import Status
from dynamiccl.errors import MachineError
from dynamiccl.nccl import ABSTAIN, Config

_log = logging.getLogger(__name__)

#: As `run --json` prints it.
Summary = dict[str, Any]


class Runner(Protocol):
    """Measures trials; a failed attempt is a row with status and reason, never missing."""

    #: On the command line; a sweep is resumed with the same one.
    name: str

    def check(self, trials: Sequence[Trial]) -> None:
        """Refuse what it cannot measure. Raises UserError and MachineError."""

    def launches(self, number: int, trials: Sequence[Trial]) -> Sequence[Launch]:
        """Lay out a round: a pure function of it and of what was learnt."""

    def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
        """Run one; `progress` gets the number of trials done since its last call."""

    def learn(self, facts: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Take in an earlier launch's facts (read-back, environment)."""
        return

    def environment(self) -> Row:
        """Environment columns, for attempts that start no process."""


class SweepProgress(Progress):
    """A progress bar on a terminal, silent elsewhere."""

    def __init__(
        self,
        name: str,
        console: Console | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(
            *("{task.description}", BarColumn(bar_width=None), MofNCompleteColumn()),
            *("{task.fields[failed]} failed", TimeRemainingColumn()),
            console=console,
            transient=True,
            disable=console is None or not console.is_terminal,
            expand=True,
        )
        self.stopping = stopping
        self._sweep = self.add_task(name, total=None, failed=0)

    def measured(self, trials: int) -> None:
        """Add trials of a running launch."""
        self.advance(self._sweep, trials)

    def committed(self, expected: int, outcomes: Sequence[Outcome]) -> None:
        """Show what has been committed, of so many as far as known."""
        failed = sum(outcome.failed for outcome in outcomes)
        # Gap fillers were not expected.
        done = min(len(outcomes), expected)
        self.update(self._sweep, total=expected, completed=done, failed=failed)


def run_sweep(
    sweep: Sweep,
    strategy: Strategy,
    runner: Runner,
    out: Path,
    *,
    resume: bool,
    progress: SweepProgress | None = None,
) -> Summary:
    """Measure what the strategy picks; a part after each round.

    The summary's `ended` is done, budget or interrupted. Raises UserError as `open_journal` does,
    and MachineError: the disk is full, or no launch could start.
    """
    runner.check(sweep.trials)
    out.mkdir(parents=True, exist_ok=True)
    with open_journal(sweep, out, runner.name, resume=resume) as journal:
        progress = progress or SweepProgress(sweep.file.name)
        summary = _Run(sweep, strategy, runner, journal, progress).go()
        if summary["ended"] != "interrupted":
            journal.complete(summary["ended"])
        return summary


class _Run:
    def __init__(
        self,
        sweep: Sweep,
        strategy: Strategy,
        runner: Runner,
        journal: Journal,
        progress: SweepProgress,
    ) -> None:
        self._sweep, self._strategy, self._runner = sweep, strategy, runner
        self._journal, self._progress = journal, progress
        # NCCL's default in the untouched environment, for every task.
        references = [
            replace(trial, setting=replace(trial.setting, profile=LaunchProfile()))
            for trial in sweep.trials
            if trial.config == ABSTAIN
        ]
        self._by_key = {trial.key: trial for trial in (*references, *sweep.trials)}
        budget = sweep.file.budget
        #: Measurements and seconds inside launches that are left, of all jobs.
        self._left = budget.max_measurements or sys.maxsize
        self._seconds_left = math.inf if budget.max_hours is None else budget.max_hours * 3600
        #: Launches that a config ended; of those that ended two the size from which on they are not
        #: tried: in published sweeps some hang only at large ones (LL from 128 KiB, sockets).
        self._ended: set[tuple[str, str]] = set()
        self._from: dict[tuple[Setting, Config], tuple[int, str]] = {}
        self._expected = strategy.expected_picks()
        self._outcomes: list[Outcome] = []
        self._statuses: Counter[str] = Counter()
        self._skipped, self._launched = len(journal.launches), 0
        self._began: dict[bool, Launch] = {}

    def go(self) -> Summary:
        for record in self._journal.launches.values():
            self._remember(record)
            key, status, reason = record.get("culprit", ("", "", ""))
            if key in self._by_key:  # what filled a gap is no trial of the sweep
                self._ends_twice(record["mode"], self._by_key[key], status, reason)
        self._progress.committed(self._expected, self._outcomes)
        ended, number = "done", 0
        while ended == "done" and (trials := self._trials_of(number)) is not None:
            try:
                ended = self._round(number, trials)
            except MachineError:
                self._journal.close_segment()
                raise
            self._journal.close_segment()
            number += ended == "done"
        return {
            "trials": len(self._sweep.trials),
            "rounds_done": number,
            "launches_run": self._launched,
            "launches_skipped": self._skipped,
            "rows_written": self._statuses.total(),
            "rows_by_status": dict(self._statuses),
            "ended": ended,
        }

    def _trials_of(self, number: int) -> Sequence[Trial] | None:
        rounds = self._journal.rounds
        if number == len(rounds):
            picks = self._strategy.next_picks(number, self._outcomes)
            if picks is None:
                return None
            self._journal.begin_round(picks)
        return [self._trial(entry) for entry in rounds[number]["trials"]]

    def _trial(self, entry: Sequence[Any]) -> Trial:
        key, repeat, probability = entry
        return replace(self._by_key[key], repeat=repeat, probability=probability)

    def _round(self, number: int, trials: Sequence[Trial]) -> str:
        waiting = self._lay_out(number, trials)
        #: In no journal: after a stop it runs again.
        aside: tuple[Launch, float] | None = None
        while waiting or aside:
            launch, is_probe = self._next(waiting, aside[0] if aside else None)
            if (why := self._reason_to_stop()) is not None:
                return why
            done, seconds = self._measure(launch)
            if done.began:
                self._began[done.is_scheduled] = done
                if aside:
                    waiting[:0] = self._commit(*aside)
                    aside = None
            elif done.never_began or is_probe:
                if aside and not self._progress.stopping():
                    raise MachineError(
                        f"{aside[0].id} did not start, twice: {aside[0].never_began}; no config is "
                        "marked as failed, and measurements are kept: fix it, and continue with "
                        "--resume"
                    )
                aside = aside or (done, seconds)
                continue
            if not is_probe:
                waiting[:0] = self._commit(done, seconds)
        return "done"

    def _reason_to_stop(self) -> str | None:
        if self._progress.stopping():
            return "interrupted"
        return "budget" if self._left <= 0 or self._seconds_left <= 0 else None

    def _lay_out(self, number: int, trials: Sequence[Trial]) -> list[Launch]:
        feasible = [trial for trial in trials if trial.infeasible is None]
        launches = list(self._runner.launches(number, feasible))
        random.Random(f"{self._sweep.file.name}:{number}").shuffle(launches)
        # Rows need what is read back.
        launches.sort(key=lambda launch: launch.mode is not LaunchMode.READ_BACK)
        infeasible = grouped((t for t in trials if t.infeasible), lambda trial: trial.setting)
        not_run = [
            Launch(f"{number}:{s.key}:infeasible", number, s, LaunchMode.SIMULATED, tuple(held))
            for s, held in infeasible.items()
        ]
        return [left for launch in (*not_run, *launches) for left in self._left_of(launch)]

    def _next(self, waiting: list[Launch], aside: Launch | None) -> tuple[Launch, bool]:
        """The next launch, and whether it is a probe: NCCL's own choice, without a row."""
        if aside is None:
            return waiting.pop(0), False
        alike = [launch for launch in waiting if launch.is_scheduled == aside.is_scheduled]
        if alike:
            other = min(alike, key=lambda launch: launch.setting == aside.setting)
            waiting.remove(other)
            return other, False
        known = self._began.get(aside.is_scheduled, aside)
        default = Trial(known.setting, known.trials[0].size_bytes, ABSTAIN)
        mode = LaunchMode.SWEEP if aside.is_scheduled else LaunchMode.REFERENCE
        return replace(known.again([default]), id=f"{aside.id}:probe", mode=mode), True

    def _left_of(self, launch: Launch) -> list[Launch]:
        record = self._journal.launches.get(launch.id)
        if record is None:
            return [launch]
        left = [self._trial(entry) for entry in record["left"]]
        return self._left_of(launch.again(left)) if left else []

    def _measure(self, launch: Launch) -> tuple[Launch, float]:
        kept: list[Trial] = []
        lost: list[tuple[Trial, tuple[Row, ...]]] = []
        for trial in launch.trials:
            reason = trial.infeasible or self._why_not_tried(trial)
            if reason is None:
                kept.append(trial)
            elif launch.mode is not LaunchMode.READ_BACK:
                # A read-back's row comes from the timed launch.
                status = Status.INFEASIBLE if trial.infeasible else Status.FAILED
                row = {**trial_row(self._sweep.file, launch, trial), **self._runner.environment()}
                lost.append((trial, (lost_row(row, status, reason),)))
        is_picked = launch.mode not in schedule.NOT_PICKED
        paid = kept
        if is_picked:
            most = self._left - sum(trial.infeasible is None for trial, _ in lost)
            paid = kept[: max(0, most)]
            while len(paid) > 1 and self._num_blocks(launch, paid) > most:
                paid.pop()
        done, began_s = launch, time.monotonic()
        if paid:
            self._launched += 1
            tell = self._progress.measured if is_picked else lambda _: None
            done = self._runner.run(replace(launch, trials=tuple(paid)), tell)
        left = (*done.left, *kept[len(paid) :])
        done = replace(done, measured=(*lost, *done.measured), left=left)
        return done, time.monotonic() - began_s

    def _num_blocks(self, launch: Launch, trials: Sequence[Trial]) -> int:
        if launch.mode is LaunchMode.SIMULATED:
            return len(trials)
        return len(schedule.deal(replace(launch, trials=tuple(trials))).blocks)

    def _commit(self, launch: Launch, seconds: float) -> list[Launch]:
        """Commit a launch; returns what goes on. A config that ended two launches gets a row."""
        if launch.culprit is not None:
            trial, row = launch.culprit
            is_second = self._ends_twice(launch.mode, trial, row["status"], row["reason"])
            what = "" if is_second else ", which runs once more"
            _log.warning("%s ended in %s (%s)%s", launch.id, trial.config.key, row["reason"], what)
            if is_second:
                left = tuple(one for one in launch.left if one is not trial)
                rows = () if launch.mode is LaunchMode.READ_BACK else ((trial, (row,)),)
                launch = replace(launch, left=left, measured=(*launch.measured, *rows))
        self._remember(self._journal.commit(launch, seconds))
        self._progress.committed(self._expected, self._outcomes)
        rows_of_all = (row for _, rows in launch.measured for row in rows)
        self._statuses.update(str(row.get("status", Status.OK.value)) for row in rows_of_all)
        return self._left_of(launch)

    def _remember(self, record: Record) -> None:
        if record["mode"] not in schedule.NOT_PICKED:
            number = record["round"]
            found = [outcome_of(key, number, rows) for key, _, rows in record["measured"]]
            self._outcomes += found
            self._left -= sum(not one.infeasible for one in found)
        self._seconds_left -= record["seconds"]
        if record["facts"]:
            self._runner.learn(record["facts"])

    def _ends_twice(self, mode: str, trial: Trial, status: str, reason: str) -> bool:
        """Count a launch that a trial ended; whether it need not run once more."""
        is_second = status == Status.INFEASIBLE.value or (mode, trial.key) in self._ended
        self._ended.add((mode, trial.key))
        config = (trial.setting, trial.config)
        if is_second and trial.size_bytes < self._from.get(config, (math.inf, ""))[0]:
            what = "hung" if status == Status.TIMED_OUT.value else "crashed"
            self._from[config] = (trial.size_bytes, f"{what} ({reason[:200]})")
        return is_second

    def _why_not_tried(self, trial: Trial) -> str | None:
        size_bytes, why = self._from.get((trial.setting, trial.config), (math.inf, ""))
        if trial.size_bytes < size_bytes:
            return None
        return f"not tried: {trial.config.key} {why} at {size_bytes} bytes"
