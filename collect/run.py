"""Runs a sweep: rounds of launches, each launch committed to the journal, a Parquet part a round.

The strategy picks trials, round by round; the runner lays out the launches of a round and runs them
in random order, so that slow drift of the machine affects all configs and their default alike. The
measurements of a round have the same `run`: they are correlated, those of different rounds are
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamiccl.collect.grid import LaunchProfile, Setting, Trial
from dynamiccl.collect.journal import Journal, Record, Shard, counts_as_picked, open_journal
from dynamiccl.collect.progress import SweepProgress
from dynamiccl.collect.runner import Launch, LaunchMode, Row, Runner, lost_row, trial_row
from dynamiccl.collect.strategies import Outcome, Strategy, outcome_of
from dynamiccl.collect.sweep import BudgetSettings, Sweep
from dynamiccl.datasets.schema import Status
from dynamiccl.errors import MachineError
from dynamiccl.nccl import ABSTAIN, Config

_log = logging.getLogger(__name__)


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

    Raises:
        UserError: the sweep is in `out` already and `resume` is False, or with other trials, or
            another run of it lives.
        MachineError: the disk is full, or a launch could not be started at all.
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
        self._sweep = sweep
        self._strategy = strategy
        self._runner = runner
        self._journal = journal
        self._progress = progress
        self._shard = shard
        self._by_key = {trial.key: trial for trial in (*_references(sweep), *sweep.trials)}
        self._budget = _Budget(sweep.file.budget, shard)
        self._quarantine = _Quarantine()
        self._outcomes: list[Outcome] = []
        self._statuses: Counter[str] = Counter()
        self._skipped = self._launched = 0
        self._may_retry = False
        #: By whether the plugin applies the configs: a launch that never began with the seconds
        #: that it took, and the last one that did begin.
        self._set_aside: dict[bool, tuple[Launch, float]] = {}
        self._began: dict[bool, Launch] = {}

    def go(self, *, retry: bool) -> RunSummary:
        """Run all rounds, those that the journal has and those that are left."""
        self._may_retry = retry
        for record in self._journal.launches.values():
            self._remember(record)
        self._progress.expect(self._strategy.expected_picks())
        self._progress.advance(len(self._outcomes))
        ended, number = "done", 0
        while ended == "done" and (trials := self._trials_of(number)) is not None:
            try:
                ended = self._round(number, trials)
            except MachineError:
                self._journal.close_segment()
                raise
            self._journal.close_segment()
            number += ended == "done"
        return RunSummary(
            len(self._sweep.trials),
            number,
            self._launched,
            self._skipped,
            self._statuses.total(),
            dict(self._statuses),
            ended,
        )

    # --- Which trials ---

    def _trials_of(self, number: int) -> Sequence[Trial] | None:
        """The trials of a round: the journal's, the strategy's, or what failed; None at the end."""
        rounds = self._journal.rounds
        if number == len(rounds):
            picks = self._ask_strategy()
            if picks is not None:
                self._journal.begin_round(picks)
            elif self._may_retry and (failed := self._failed()):
                self._journal.begin_round(failed, is_retry=True)
                self._quarantine = _Quarantine()
                self._may_retry = False
        if number == len(rounds):
            return None
        return [self._trial(entry) for entry in rounds[number]["trials"]]

    def _trial(self, entry: Sequence[Any]) -> Trial:
        key, repeat, probability = entry
        return replace(self._by_key[key], repeat=repeat, probability=probability)

    def _ask_strategy(self) -> Sequence[Trial] | None:
        """What the strategy picks next.

        It counts its own rounds alone; what a retry brought belongs to the round before it.
        """
        retries = [at for at, record in enumerate(self._journal.rounds) if "retry" in record]
        history = [
            replace(outcome, round=outcome.round - sum(at <= outcome.round for at in retries))
            for outcome in self._that_count()
        ]
        return self._strategy.next_picks(len(self._journal.rounds) - len(retries), history)

    def _failed(self) -> list[Trial]:
        """Each trial that failed, as often as it did."""
        failed = Counter(outcome.trial_key for outcome in self._that_count() if outcome.failed)
        return [
            replace(self._by_key[key], repeat=repeat)
            for key, count in failed.items()
            for repeat in range(count)
        ]

    def _that_count(self) -> list[Outcome]:
        """The outcomes so far, without failures that a later round tried once more."""
        tried_in = {
            key: number
            for number, record in enumerate(self._journal.rounds)
            if "retry" in record
            for key, *_ in record["trials"]
        }
        return [
            outcome
            for outcome in self._outcomes
            if not (outcome.failed and outcome.round < tried_in.get(outcome.trial_key, -1))
        ]

    # --- A round ---

    def _round(self, number: int, trials: Sequence[Trial]) -> str:
        """Run those launches of a round that are not done; returns "done", or why it stopped."""
        waiting = self._lay_out(number, trials)
        while waiting or self._set_aside:
            launch = self._next(waiting) if waiting else None
            record = self._journal.launches.get(launch.id) if launch else None
            if launch is not None and record is not None:
                self._skipped += 1
            elif (why := self._reason_to_stop()) != "done":
                return why  # what is set aside is in no journal, and runs again
            elif launch is None:
                waiting += self._try_nccls_choice()
                continue
            else:
                done, seconds = self._measure(launch)
                if done.never_began:
                    self._put_aside(done, seconds)
                    continue
                waiting[:0] = self._fail_set_aside(done) if done.began else ()
                record = self._commit(done, seconds)
            waiting[:0] = self._rest(launch, record)
        return "done"

    def _reason_to_stop(self) -> str:
        if self._progress.stopping():
            return "interrupted"
        return "budget" if self._budget.is_spent else "done"

    def _lay_out(self, number: int, trials: Sequence[Trial]) -> list[Launch]:
        """This shard's launches of a round, in an order seeded by the round."""
        feasible = [trial for trial in trials if trial.infeasible is None]
        launches = list(self._runner.launches(number, feasible))
        random.Random(f"{self._sweep.file.name}:{number}").shuffle(launches)
        # What must be known before rows are written comes first, whatever the order.
        launches.sort(key=lambda launch: launch.mode is not LaunchMode.READ_BACK)
        infeasible: dict[Setting, list[Trial]] = {}
        for trial in trials:
            if trial.infeasible is not None:
                infeasible.setdefault(trial.setting, []).append(trial)
        not_run = [
            Launch(
                f"{number}:{setting.key}:infeasible",
                number,
                setting,
                LaunchMode.SIMULATED,
                tuple(of_setting),
            )
            for setting, of_setting in infeasible.items()
        ]
        return [one for one in (*not_run, *launches) if self._shard.holds(one.setting)]

    def _next(self, waiting: list[Launch]) -> Launch:
        """The next launch, of another setting than what never began if any is: it tells more."""
        aside = {launch.setting for launch, _ in self._set_aside.values()}
        others = (at for at, launch in enumerate(waiting) if launch.setting not in aside)
        return waiting.pop(next(others, 0))

    def _rest(self, launch: Launch, record: Record) -> list[Launch]:
        """The launch that goes on with what another one left, if it left anything."""
        left = [self._trial(entry) for entry in record["left"]]
        return [launch.again(left)] if left else []

    # --- A launch ---

    def _measure(self, launch: Launch) -> tuple[Launch, float]:
        """Run a launch without the trials that are not tried; returns it and its seconds."""
        kept: list[Trial] = []
        lost: list[tuple[Trial, tuple[Row, ...]]] = []
        num_tried = 0
        for trial in launch.trials:
            skipped = trial.infeasible or self._runner.reason_to_skip(trial)
            reason = skipped or self._quarantine.reason(trial)
            if reason is None:
                kept.append(trial)
            elif launch.mode is not LaunchMode.READ_BACK:
                # Of a read-back the row comes from the launch that would have timed it.
                status = Status.INFEASIBLE if skipped else Status.FAILED
                row = trial_row(self._sweep.file, launch, trial)
                row |= dict(self._runner.environment())
                lost.append((trial, (lost_row(row, status, reason),)))
                num_tried += not skipped
        self._progress.advance(len(lost))
        paid = self._paid(launch, kept, num_tried)
        done, began_s = launch, time.monotonic()
        if paid:
            self._launched += 1
            # Nobody picked the reference default, nor what fills gaps: the bar expects neither.
            expected = 0 if launch.mode is LaunchMode.REFERENCE else len(paid)

            def advance(trials: int) -> None:
                nonlocal expected
                told = min(trials, expected)
                expected -= told
                self._progress.advance(told)

            done = self._runner.run(replace(launch, trials=tuple(paid)), advance)
        left = (*done.left, *kept[len(paid) :])
        done = replace(done, measured=(*lost, *done.measured), left=left)
        return done, time.monotonic() - began_s

    def _paid(self, launch: Launch, trials: Sequence[Trial], num_tried: int) -> Sequence[Trial]:
        """The trials of a launch that the budget pays for, beside `num_tried` others."""
        if launch.mode in {LaunchMode.REFERENCE, LaunchMode.READ_BACK}:
            return trials
        left = self._budget.left - num_tried
        # A single trial needs nothing that fills gaps.
        allowed = int(max(0, min(left, len(trials))))
        while allowed > 1 and (
            self._runner.measurements(replace(launch, trials=tuple(trials[:allowed]))) > left
        ):
            allowed -= 1
        return trials[:allowed]

    def _commit(self, launch: Launch, seconds: float) -> Record:
        """Write a launch that ended to the journal, and take in what it brought."""
        launch = self._with_culprit(launch)
        record = self._journal.commit(launch, seconds)
        for outcome in self._remember(record):
            if outcome.trial_key in self._by_key:
                self._progress.outcome(self._by_key[outcome.trial_key], outcome)
        rows = (row for _, rows in launch.measured for row in rows)
        self._statuses.update(str(row.get("status", Status.OK.value)) for row in rows)
        return record

    def _remember(self, record: Record) -> list[Outcome]:
        """Take in a launch of the journal; returns the outcomes of what was picked."""
        number, outcomes = record["round"], []
        if counts_as_picked(record):
            outcomes = [outcome_of(key, number, rows) for key, _, rows in record["measured"]]
            self._outcomes += outcomes
        self._budget.add(sum(not one.infeasible for one in outcomes), record["seconds"])
        retries = (at for at, one in enumerate(self._journal.rounds) if "retry" in one)
        if "culprit" in record and number >= max(retries, default=0):
            key, status, reason = record["culprit"]
            if key in self._by_key:
                self._quarantine.add(record["mode"], self._by_key[key], status, reason)
        if record["facts"]:
            self._runner.learn(record["facts"])
        return outcomes

    # --- What hung, crashed, or never began ---

    def _with_culprit(self, launch: Launch) -> Launch:
        """A launch that a config ended: a row of that config, if it has ended one before."""
        if launch.culprit is None:
            return launch
        trial, row = launch.culprit
        said = (launch.id, trial.config.key, row["reason"])
        if not self._quarantine.is_second(launch.mode, trial, row["status"]):
            _log.warning("%s ended in %s (%s), which runs once more", *said)
            return launch
        _log.warning("%s ended in %s once more (%s)", *said)
        left = tuple(one for one in launch.left if one is not trial)
        if launch.mode is LaunchMode.READ_BACK:
            return replace(launch, left=left)
        return replace(launch, left=left, measured=(*launch.measured, (trial, (row,))))

    def _put_aside(self, launch: Launch, seconds: float) -> None:
        """Keep a launch that never began; raises MachineError for the second one in a row."""
        if launch.is_scheduled in self._set_aside:
            raise _never_began(launch)
        self._set_aside[launch.is_scheduled] = launch, seconds

    def _fail_set_aside(self, began: Launch) -> list[Launch]:
        """Mark the configs of what never began as failed, since another launch has begun."""
        self._began[began.is_scheduled] = began
        if began.is_scheduled not in self._set_aside:
            return []
        failed, seconds = self._set_aside.pop(began.is_scheduled)
        return self._rest(failed, self._commit(failed, seconds))

    def _try_nccls_choice(self) -> list[Launch]:
        """Let NCCL's own choice run where no other launch is left, and no row of it be kept."""
        failed, _ = next(iter(self._set_aside.values()))
        known = self._began.get(failed.is_scheduled, failed)
        default = Trial(known.setting, known.trials[0].size_bytes, ABSTAIN)
        mode = LaunchMode.SWEEP if failed.is_scheduled else LaunchMode.REFERENCE
        asked = replace(known.again([default]), mode=mode)
        done = self._runner.run(asked, lambda _: None)
        if done.began:
            return self._fail_set_aside(done)
        if self._progress.stopping():
            return []
        raise _never_began(failed)


def _never_began(launch: Launch) -> MachineError:
    return MachineError(
        f"{launch.id} did not start, twice: {launch.never_began}; no config is marked as failed, "
        "and measurements are kept: fix it, and continue with --resume"
    )


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


class _Budget:
    """The budget of one shard of a sweep, added up over all of its jobs."""

    def __init__(self, settings: BudgetSettings, shard: Shard) -> None:
        """An equal part of the measurements, and all of the seconds inside launches."""
        most, count = settings.max_measurements, shard.count
        of_shard = math.inf if most is None else most // count + (shard.index < most % count)
        #: Measurements that are left.
        self.left = of_shard
        self._seconds_left = settings.max_seconds

    def add(self, measured: int, seconds: float) -> None:
        """Count what a launch took."""
        self.left -= measured
        self._seconds_left -= seconds

    @property
    def is_spent(self) -> bool:
        """Whether no further launch may begin."""
        return self.left <= 0 or self._seconds_left <= 0


def _references(sweep: Sweep) -> Iterator[Trial]:
    """NCCL's default in the untouched environment, for every task of the sweep."""
    for trial in sweep.trials:
        if trial.config == ABSTAIN:
            yield replace(trial, setting=replace(trial.setting, profile=LaunchProfile()))
