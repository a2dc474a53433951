"""Runs a sweep: rounds of launches, each launch committed to the journal, a Parquet part a round.

The *strategy* picks trials, round by round; the *runner* lays out the launches of a round and runs
them in random order, so that slow drift of the machine affects all configs and their default alike.
The measurements of a round have the same `run`: they are correlated, those of different rounds are
independent.

What goes wrong:

* A config that hangs or crashes runs once more, with what followed it, in a further launch. When it
  has ended two launches it is in quarantine: not tried from its size on.
* A launch that never began is set aside. The next one that begins says that the machine is well:
  then the configs of the first are failed. If that never begins either, nothing is marked and the
  sweep ends. Where no other launch is left, NCCL's own choice is the next one.
* `retry_failed` measures once more, in a round of its own at the end, all that failed.
"""

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from dynamiccl.collect.grid import LaunchProfile, Setting, Trial
from dynamiccl.collect.journal import Journal, Record, Shard, open_journal
from dynamiccl.collect.schedule import (
    NOT_PICKED,
    Launch,
    LaunchMode,
    Row,
    deal,
    grouped,
    lost_row,
    trial_row,
)
from dynamiccl.collect.strategies import Outcome, Strategy, outcome_of
from dynamiccl.collect.sweep import Sweep
from dynamiccl.datasets.schema import Status
from dynamiccl.errors import MachineError
from dynamiccl.nccl import ABSTAIN, Config

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Measures trials: a failed attempt is a row with a status and a reason, never missing."""

    @property
    def name(self) -> str:
        """The name on the command line; a sweep is resumed with the same runner only."""

    def check(self, trials: Sequence[Trial]) -> None:
        """Refuse a sweep that it cannot measure, before anything runs: UserError, MachineError."""

    def launches(self, number: int, trials: Sequence[Trial]) -> Sequence[Launch]:
        """The launches of round `number`: a pure function of it and of what was learnt."""

    def reason_to_skip(self, trial: Trial) -> str | None:  # noqa: ARG002
        """Why this trial need not be measured, or None when it must be, as here."""
        return None

    def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
        """Run one launch; `progress` gets the number of trials done since its last call."""

    def learn(self, facts: Mapping[str, Any]) -> None:
        """Take in the facts of an earlier launch of this sweep (read-back, environment)."""

    def environment(self) -> Row:
        """Environment columns known so far, for rows of attempts that start no process."""


class SweepProgress:
    """A progress bar on a terminal, silent elsewhere; a context manager."""

    def __init__(
        self,
        name: str,
        console: Console | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """The bar of sweep `name`; `stopping` tells whether to stop after the running launch."""
        self.stopping = stopping
        is_shown = console is not None and console.is_terminal
        self._bar = Progress(
            *("{task.description}", BarColumn(bar_width=None), MofNCompleteColumn()),
            *("{task.fields[failed]} failed", TimeRemainingColumn()),
            console=console,
            transient=True,
            disable=not is_shown,
            expand=True,
        )
        self._task = self._bar.add_task(name, total=None, failed=0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, trials: int) -> None:
        """Add trials that are done in a running launch."""
        self._bar.advance(self._task, trials)

    def update(self, expected: int, outcomes: Sequence[Outcome]) -> None:
        """Show what has been committed, of so many trials as far as known."""
        failed = sum(outcome.failed for outcome in outcomes)
        # What fills gaps of a launch was not expected.
        done = min(len(outcomes), expected)
        self._bar.update(self._task, total=expected, completed=done, failed=failed)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a sweep wrote, in numbers."""

    trials: int
    rounds_done: int
    launches_run: int
    launches_skipped: int
    rows_written: int
    rows_by_status: dict[str, int]
    #: Why the run ended: done, budget, interrupted.
    ended: str


def run_sweep(  # noqa: PLR0913 - the one place that puts a run together
    sweep: Sweep,
    strategy: Strategy,
    runner: Runner,
    out: Path,
    *,
    resume: bool,
    retry_failed: bool = False,
    take_over: bool = False,
    progress: SweepProgress | None = None,
    shard: Shard | None = None,
) -> RunSummary:
    """Measure what the strategy picks, and write a part after each round.

    Args:
        sweep: the grid.
        strategy: what picks from it.
        runner: what measures.
        out: data directory; made when missing.
        resume: go on with what is in `out`, instead of refusing to add to it.
        retry_failed: measure once more, at the end, what failed.
        take_over: from a run that may still live, where the file system knows no locks.
        progress: is told of what is done and asked whether to stop.
        shard: this process's share of the launches.

    Raises UserError as `open_journal` does, and MachineError: the disk is full, or a launch could
    not be started at all.
    """
    shard = shard or Shard()
    runner.check(sweep.trials)
    out.mkdir(parents=True, exist_ok=True)
    with open_journal(
        sweep, out, runner.name, shard=shard, resume=resume, take_over=take_over
    ) as journal:
        progress = progress or SweepProgress(sweep.file.name)
        summary = _Run(sweep, strategy, runner, journal, progress, shard).go(retry=retry_failed)
        if summary.ended in {"done", "budget"}:
            journal.complete(summary.ended)
        return summary


class _Run:
    """The state of one run."""

    def __init__(
        self,
        sweep: Sweep,
        strategy: Strategy,
        runner: Runner,
        journal: Journal,
        progress: SweepProgress,
        shard: Shard,
    ) -> None:
        self._sweep, self._strategy, self._runner = sweep, strategy, runner
        self._journal, self._progress, self._shard = journal, progress, shard
        self._by_key = {trial.key: trial for trial in (*_references(sweep), *sweep.trials)}
        most, count = sweep.file.budget.max_measurements, shard.count
        #: What is left of the budget: the shard's part of the measurements, and all of the seconds
        #: inside launches, of all jobs of the sweep.
        self._left = math.inf if most is None else most // count + (shard.index < most % count)
        hours = sweep.file.budget.max_hours
        self._seconds_left = math.inf if hours is None else hours * 3600
        self._quarantine = _Quarantine()
        self._expected = strategy.expected_picks()
        self._outcomes: list[Outcome] = []
        self._statuses: Counter[str] = Counter()
        self._skipped = self._launched = 0
        self._may_retry = False
        #: The last launch that began, by whether the plugin applies the configs.
        self._began: dict[bool, Launch] = {}

    def go(self, *, retry: bool) -> RunSummary:
        """Run all rounds, those that the journal has and those that are left."""
        self._may_retry = retry
        for record in self._journal.launches.values():
            self._remember(record)
        self._progress.update(self._expected, self._outcomes)
        ended, number = "done", 0
        while ended == "done" and (trials := self._trials_of(number)) is not None:
            try:
                ended = self._round(number, trials)
            except MachineError:
                self._journal.close_segment()
                raise
            self._journal.close_segment()
            number += ended == "done"
        written, statuses = self._statuses.total(), dict(self._statuses)
        counts = (len(self._sweep.trials), number, self._launched, self._skipped)
        return RunSummary(*counts, written, statuses, ended)

    # --- Which trials ---

    def _trials_of(self, number: int) -> Sequence[Trial] | None:
        """The trials of a round: the journal's, the strategy's, or what failed; None at the end."""
        rounds = self._journal.rounds
        if number == len(rounds):
            history = self._history()
            own = sum("retry" not in record for record in rounds)
            picks = self._strategy.next_picks(own, history)
            if picks is not None:
                self._journal.begin_round(picks)
            elif self._may_retry and (failed := self._failed(history)):
                self._journal.begin_round(failed, is_retry=True)
                self._quarantine = _Quarantine()
                self._may_retry = False
        if number == len(rounds):
            return None
        return [self._trial(entry) for entry in rounds[number]["trials"]]

    def _trial(self, entry: Sequence[Any]) -> Trial:
        key, repeat, probability = entry
        return replace(self._by_key[key], repeat=repeat, probability=probability)

    def _history(self) -> list[Outcome]:
        """The outcomes so far by the strategy's own rounds: a retry belongs to the one before.

        A failure that a later round tried once more is left out.
        """
        rounds = self._journal.rounds
        own = list(accumulate(int("retry" not in record) for record in rounds))
        tried_in = {
            key: number
            for number, record in enumerate(rounds)
            if "retry" in record
            for key, *_ in record["trials"]
        }
        return [
            replace(outcome, round=own[outcome.round] - 1)
            for outcome in self._outcomes
            if not (outcome.failed and outcome.round < tried_in.get(outcome.trial_key, -1))
        ]

    def _failed(self, history: Sequence[Outcome]) -> list[Trial]:
        """Each trial that failed, as often as it did."""
        failed = Counter(outcome.trial_key for outcome in history if outcome.failed)
        return [
            replace(self._by_key[key], repeat=repeat)
            for key, count in failed.items()
            for repeat in range(count)
        ]

    # --- A round ---

    def _round(self, number: int, trials: Sequence[Trial]) -> str:
        """Run those launches of a round that are not done; returns "done", or why it stopped."""
        waiting = self._lay_out(number, trials)
        #: What never began, and its seconds. It is in no journal: after a stop it runs again.
        aside: tuple[Launch, float] | None = None
        while waiting or aside:
            launch, is_probe = self._next(waiting, aside[0] if aside else None)
            if record := self._journal.launches.get(launch.id):
                self._skipped += 1
                waiting[:0] = self._rest(launch, record)
                continue
            if (why := self._reason_to_stop()) != "done":
                return why
            done, seconds = self._measure(launch)
            if done.never_began or (is_probe and not done.began):
                aside = self._set_aside(aside, done, seconds)
                continue
            if done.began:
                self._began[done.is_scheduled] = done
            if aside and done.began and done.is_scheduled == aside[0].is_scheduled:
                waiting[:0] = self._rest(aside[0], self._commit(*aside))
                aside = None
            if not is_probe:
                waiting[:0] = self._rest(launch, self._commit(done, seconds))
        return "done"

    def _reason_to_stop(self) -> str:
        if self._progress.stopping():
            return "interrupted"
        return "budget" if self._left <= 0 or self._seconds_left <= 0 else "done"

    def _set_aside(
        self, aside: tuple[Launch, float] | None, launch: Launch, seconds: float
    ) -> tuple[Launch, float]:
        """What never began first; raises MachineError where another one does not either."""
        if aside is None or self._progress.stopping():
            return aside or (launch, seconds)
        raise MachineError(
            f"{aside[0].id} did not start, twice: {aside[0].never_began}; no config is marked as "
            "failed, and measurements are kept: fix it, and continue with --resume"
        )

    def _lay_out(self, number: int, trials: Sequence[Trial]) -> list[Launch]:
        """This shard's launches of a round, in an order seeded by the round."""
        feasible = [trial for trial in trials if trial.infeasible is None]
        launches = list(self._runner.launches(number, feasible))
        random.Random(f"{self._sweep.file.name}:{number}").shuffle(launches)
        # What must be known before rows are written comes first, whatever the order.
        launches.sort(key=lambda launch: launch.mode is not LaunchMode.READ_BACK)
        infeasible = grouped((t for t in trials if t.infeasible), lambda trial: trial.setting)
        not_run = [
            Launch(f"{number}:{s.key}:infeasible", number, s, LaunchMode.SIMULATED, tuple(held))
            for s, held in infeasible.items()
        ]
        return [one for one in (*not_run, *launches) if self._shard.holds(one.setting)]

    def _next(self, waiting: list[Launch], aside: Launch | None) -> tuple[Launch, bool]:
        """The next launch, and whether it is NCCL's own choice of which no row is kept.

        Where one never began: one of the same kind, of another setting if any is, which tells more.
        """
        if aside is None:
            return waiting.pop(0), False
        alike = [launch for launch in waiting if launch.is_scheduled == aside.is_scheduled]
        alike.sort(key=lambda launch: launch.setting == aside.setting)
        if alike:
            waiting.remove(alike[0])
            return alike[0], False
        known = self._began.get(aside.is_scheduled, aside)
        default = Trial(known.setting, known.trials[0].size_bytes, ABSTAIN)
        mode = LaunchMode.SWEEP if aside.is_scheduled else LaunchMode.REFERENCE
        return replace(known.again([default]), id=f"{aside.id}:probe", mode=mode), True

    def _rest(self, launch: Launch, record: Record) -> list[Launch]:
        """The launch that goes on with what another one left, if it left anything."""
        left = [self._trial(entry) for entry in record["left"]]
        return [launch.again(left)] if left else []

    # --- A launch ---

    def _measure(self, launch: Launch) -> tuple[Launch, float]:
        """Run a launch without the trials that are not tried; returns it and its seconds."""
        kept: list[Trial] = []
        lost: list[tuple[Trial, tuple[Row, ...]]] = []
        num_failed = 0
        for trial in launch.trials:
            skipped = trial.infeasible or self._runner.reason_to_skip(trial)
            reason = skipped or self._quarantine.reason(trial)
            if reason is None:
                kept.append(trial)
            elif launch.mode is not LaunchMode.READ_BACK:
                # Of a read-back the row comes from the launch that would have timed it.
                status = Status.INFEASIBLE if skipped else Status.FAILED
                row = {**trial_row(self._sweep.file, launch, trial), **self._runner.environment()}
                lost.append((trial, (lost_row(row, status, reason),)))
                num_failed += not skipped
        paid, is_picked = kept, launch.mode not in NOT_PICKED
        if is_picked and self._left < math.inf:
            most = int(self._left) - num_failed
            paid = kept[: max(0, most)]
            while len(paid) > 1 and self._num_blocks(launch, paid) > most:
                paid.pop()
        done, began_s = launch, time.monotonic()
        if paid:
            self._launched += 1
            # Of what nobody picked the bar expects nothing.
            advance = self._progress.advance if is_picked else lambda _: None
            done = self._runner.run(replace(launch, trials=tuple(paid)), advance)
        left = (*done.left, *kept[len(paid) :])
        done = replace(done, measured=(*lost, *done.measured), left=left)
        return done, time.monotonic() - began_s

    def _num_blocks(self, launch: Launch, trials: Sequence[Trial]) -> int:
        """What a launch of these trials measures, with what fills the gaps of its walk."""
        if launch.mode is LaunchMode.SIMULATED:
            return len(trials)
        most = self._sweep.file.runner.max_blocks
        return len(deal(replace(launch, trials=tuple(trials)), max_blocks=most).blocks)

    def _commit(self, launch: Launch, seconds: float) -> Record:
        """Write a launch that ended to the journal, and take in what it brought.

        A config that ended it has a row if it has ended one before.
        """
        if launch.culprit is not None:
            trial, row = launch.culprit
            is_second = self._quarantine.is_second(launch.mode, trial, row["status"])
            what = "" if is_second else ", which runs once more"
            _log.warning("%s ended in %s (%s)%s", launch.id, trial.config.key, row["reason"], what)
            if is_second:
                left = tuple(one for one in launch.left if one is not trial)
                rows = () if launch.mode is LaunchMode.READ_BACK else ((trial, (row,)),)
                launch = replace(launch, left=left, measured=(*launch.measured, *rows))
        record = self._journal.commit(launch, seconds)
        self._remember(record)
        self._progress.update(self._expected, self._outcomes)
        rows_of_all = (row for _, rows in launch.measured for row in rows)
        self._statuses.update(str(row.get("status", Status.OK.value)) for row in rows_of_all)
        return record

    def _remember(self, record: Record) -> None:
        """Take in a launch of the journal."""
        number = record["round"]
        if record["mode"] not in NOT_PICKED:
            found = [outcome_of(key, number, rows) for key, _, rows in record["measured"]]
            self._outcomes += found
            self._left -= sum(not one.infeasible for one in found)
        self._seconds_left -= record["seconds"]
        retries = (at for at, one in enumerate(self._journal.rounds) if "retry" in one)
        if "culprit" in record and number >= max(retries, default=0):
            key, status, reason = record["culprit"]
            if key in self._by_key:
                self._quarantine.add(record["mode"], self._by_key[key], status, reason)
        if record["facts"]:
            self._runner.learn(record["facts"])


class _Quarantine:
    """Configs that are not tried, from the size on at which they ended two launches.

    Published sweeps saw configs that run at small sizes and hang at large ones (LL from 128 KiB
    over sockets), so smaller sizes stay in. What a node or a cable did once is forgiven.
    """

    def __init__(self) -> None:
        self._ended: set[tuple[str, str]] = set()
        self._from: dict[tuple[Setting, Config], tuple[int, str]] = {}

    def is_second(self, mode: str, trial: Trial, status: str) -> bool:
        """Whether a trial that ended a launch need not run once more."""
        return status == Status.INFEASIBLE.value or (mode, trial.key) in self._ended

    def add(self, mode: str, trial: Trial, status: str, reason: str) -> None:
        """Count a launch that a trial ended, by the mode of the launch."""
        key = (trial.setting, trial.config)
        size_bytes, _ = self._from.get(key, (math.inf, ""))
        if self.is_second(mode, trial, status) and trial.size_bytes < size_bytes:
            what = "hung" if status == Status.TIMED_OUT.value else "crashed"
            self._from[key] = (trial.size_bytes, f"{what} ({reason[:200]})")
        self._ended.add((mode, trial.key))

    def reason(self, trial: Trial) -> str | None:
        """Why `trial` is not tried, or None."""
        size_bytes, why = self._from.get((trial.setting, trial.config), (math.inf, ""))
        if trial.size_bytes < size_bytes:
            return None
        return f"not tried: {trial.config.key} {why} at {size_bytes} bytes"


def _references(sweep: Sweep) -> Iterator[Trial]:
    """NCCL's default in the untouched environment, for every task of the sweep."""
    for trial in sweep.trials:
        if trial.config == ABSTAIN:
            yield replace(trial, setting=replace(trial.setting, profile=LaunchProfile()))
