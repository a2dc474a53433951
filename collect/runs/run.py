"""Runs a sweep: rounds of launches, each launch committed to the journal, a Parquet part a round.

The strategy picks trials, round by round; the runner lays out the launches of a round and runs them
in random order, so that slow drift of the machine affects all configs and their default alike. The
measurements of a round have the same `run`: they are correlated, those of different rounds are
independent.
"""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dynamiccl.collect.outcomes import Outcome, decode_outcomes, encode_outcomes
from dynamiccl.collect.runner import Launch, LaunchMode, LaunchResult, Measured, Pick, Round, Runner
from dynamiccl.collect.runs.budget import Budget
from dynamiccl.collect.runs.choices import choices_path, write_choices
from dynamiccl.collect.runs.journal import Journal, Record, Sealing
from dynamiccl.collect.runs.parts import PartWriter
from dynamiccl.collect.runs.quarantine import Quarantine
from dynamiccl.collect.runs.retry import (
    last_retry,
    retry_record,
    that_count,
    without_retries,
)
from dynamiccl.collect.runs.watcher import AtMost, Silent, Watcher
from dynamiccl.collect.strategies import choose
from dynamiccl.collect.strategies.strategy import Strategy
from dynamiccl.collect.sweep.load import Sweep
from dynamiccl.collect.sweep.trial import LaunchProfile, Setting, Trial
from dynamiccl.collect.trial_rows import lost_row, pick_row
from dynamiccl.datasets.schema import Status
from dynamiccl.datasets.store import sweep_folder, sweep_parts
from dynamiccl.errors import MachineError, UserError
from dynamiccl.nccl import ABSTAIN, Config

_JOURNAL: Final = ".journal"
#: Changes when a release lays out a round's launches in another way (2: small messages apart).
_LAYOUT: Final = "2"


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


@dataclass(frozen=True, slots=True)
class Shard:
    """The launches of one process: those whose setting's hash modulo `count` is `index`."""

    index: int = 0
    count: int = 1

    def holds(self, launch: Launch) -> bool:
        """Whether this shard runs a launch; by the hash of its setting, so that a resume agrees."""
        digest = hashlib.sha256(launch.setting.key.encode()).digest()
        return int.from_bytes(digest[:8], "little") % self.count == self.index

    @property
    def suffix(self) -> str:
        """Suffix of the journal's folder."""
        return "" if self.count == 1 else f".shard-{self.index}-of-{self.count}"


def journal_folder(sweep: Sweep, out: Path, shard: Shard) -> Path:
    """Path of the journal of a sweep or of one of its shards."""
    name = f"sweep={sweep.file.name}{shard.suffix}"
    return out / _JOURNAL / f"system={sweep.file.system}" / name


def run_sweep(  # noqa: PLR0913 - the one place that puts a run together
    sweep: Sweep,
    strategy: Strategy,
    runner: Runner,
    out: Path,
    *,
    resume: bool,
    retry_failed: bool = False,
    take_over: bool = False,
    watcher: Watcher | None = None,
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
        watcher: is told of progress and asked whether to stop.
        shard: this process's share of the launches.

    Raises:
        UserError: the sweep is in `out` already and `resume` is False, or with other trials, or
            another run of it lives.
        MachineError: the disk is full, or a launch could not be started at all.
    """
    shard = shard or Shard()
    runner.check(sweep.trials)
    out.mkdir(parents=True, exist_ok=True)
    folder = journal_folder(sweep, out, shard)
    _refuse_orphans(sweep, out, folder)
    grid = {"trials": _trials_hash(sweep), "runner": runner.name, "layout": _LAYOUT}
    with Journal(folder, grid, resume=resume, take_over=take_over) as journal:
        scribe = PartWriter(sweep, out, journal.identity, runner.name)
        journal.settle(scribe.segments(), scribe.write)
        run = _Run(sweep, strategy, runner, journal, watcher or Silent(), shard)
        summary = run.go(scribe.write, retry_failed=retry_failed)
        if summary.ended in {"done", "budget"}:
            if summary.launches_run:
                write_choices(choices_path(out, sweep.file, shard.suffix), run.choices())
            journal.complete(sweep.text, summary.ended)
        return summary


class _Run:
    """The state of one run."""

    def __init__(
        self,
        sweep: Sweep,
        strategy: Strategy,
        runner: Runner,
        journal: Journal,
        watcher: Watcher,
        shard: Shard,
    ) -> None:
        self._sweep = sweep
        self._strategy = strategy
        self._runner = runner
        self._journal = journal
        self._watcher = watcher
        self._shard = shard
        self._by_key = {trial.key: trial for trial in (*_references(sweep), *sweep.trials)}
        self._quarantine = Quarantine()
        self._statuses: Counter[str] = Counter()
        self._skipped = self._launched = 0
        self._budget = Budget(sweep.file.budget, (shard.index, shard.count))
        self._records: dict[str, Record] = {}
        self._may_retry = False

    def go(self, write_part: Callable[[Sealing], None], *, retry_failed: bool) -> RunSummary:
        self._may_retry = retry_failed
        for record in self._journal.commits:
            self._remember(record)
        self._watcher.expect(self._strategy.expected_picks())
        self._watcher.advance(sum(len(c["outcomes"]) for c in self._journal.commits))
        ended, number = "done", 0
        while ended == "done" and (round_ := self._round(number)) is not None:
            for launch in self._layout(round_):
                ended = self._reason_to_stop()
                if ended != "done":
                    break
                try:
                    self._measure(launch)
                except MachineError:
                    self._journal.seal(write_part)
                    raise
            self._journal.seal(write_part)
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

    def choices(self) -> dict[tuple[Setting, int], Config]:
        """The best config of each task, from all outcomes so far."""
        confidence = self._sweep.file.strategy.confidence
        commits = self._journal.commits
        references = [o for record in commits for o in decode_outcomes(record, "references")]
        return choose(self._sweep.trials, self._history(), references, confidence=confidence)

    def _reason_to_stop(self) -> str:
        if self._watcher.stopping():
            return "interrupted"
        return "budget" if self._budget.is_spent else "done"

    def _round(self, number: int) -> Round | None:
        """The picks of a round: from the journal, else from the strategy."""
        if number < len(self._journal.rounds):
            record = self._journal.rounds[number]
            picks = [self._pick(entry) for entry in record["picks"]]
            return Round(number, tuple(picks))
        rounds = self._journal.rounds
        found = self._strategy.next_picks(*without_retries(number, self._history(), rounds))
        if found is None:
            return self._retry(number)
        entries = [[p.trial.key, p.repeat, p.probability] for p in found]
        self._journal.begin_round({"round": number, "picks": entries})
        return Round(number, tuple(found))

    def _retry(self, number: int) -> Round | None:
        """The retry round, once, when nothing else is left; None when nothing failed."""
        record = retry_record(number, self._history()) if self._may_retry else None
        self._may_retry = False
        if record is None:
            return None
        self._journal.begin_round(record)
        self._quarantine = Quarantine()
        return Round(number, tuple(self._pick(entry) for entry in record["picks"]))

    def _pick(self, entry: Sequence[Any]) -> Pick:
        key, repeat, probability = entry
        return Pick(self._by_key[key], repeat, probability)

    def _history(self) -> list[Outcome]:
        outcomes = (o for record in self._journal.commits for o in decode_outcomes(record))
        return that_count(outcomes, self._journal.rounds)

    def _layout(self, round_: Round) -> Iterator[Launch]:
        """This shard's launches of a round that are not done, in an order seeded by the round."""
        infeasible = [p for p in round_.picks if p.trial.infeasible is not None]
        feasible = tuple(p for p in round_.picks if p.trial.infeasible is None)
        launches = list(self._runner.launches(Round(round_.number, feasible)))
        random.Random(f"{self._sweep.file.name}:{round_.number}").shuffle(launches)
        # What must be known before rows are written comes first, whatever the order.
        launches.sort(key=lambda launch: launch.mode is not LaunchMode.READ_BACK)
        for launch in (*self._not_run(round_, infeasible), *launches):
            if self._shard.holds(launch):
                yield from self._until_done(launch)

    def _not_run(self, round_: Round, picks: Sequence[Pick]) -> Iterator[Launch]:
        settings = dict.fromkeys(pick.trial.setting for pick in picks)
        for setting in settings:
            ours = tuple(pick for pick in picks if pick.trial.setting == setting)
            yield Launch(
                f"{round_.number}:{setting.key}:infeasible",
                round_.number,
                setting,
                LaunchMode.SIMULATED,
                ours,
            )

    def _until_done(self, launch: Launch) -> Iterator[Launch]:
        """A launch, then new launches of the same kind for what it left over."""
        while True:
            if launch.id in self._records:
                self._skipped += 1
            else:
                yield launch
            record = self._records.get(launch.id)
            if record is None or not record["unfinished"]:
                return
            left = tuple(self._pick(entry) for entry in record["unfinished"])
            launch = replace(launch, id=f"{launch.id}~", picks=left)

    def _measure(self, launch: Launch) -> None:
        kept: list[Pick] = []
        lost: list[Measured] = []
        for pick in launch.picks:
            needless = pick.trial.infeasible or self._runner.reason_to_skip(pick.trial)
            reason = needless or self._quarantine.reason(pick.trial)
            if reason is None:
                kept.append(pick)
                continue
            if launch.mode is LaunchMode.READ_BACK:
                continue  # its row comes from the launch that would have timed it
            status = Status.INFEASIBLE if needless else Status.FAILED
            base = {**pick_row(self._sweep.file, launch, pick)}
            base |= self._runner.environment()
            lost.append(Measured(pick, (lost_row(base, status, reason),)))
        self._watcher.advance(len(lost))
        result = LaunchResult(())
        paid, over = self._budget.cut(
            launch,
            kept,
            sum(one.rows[0]["status"] != Status.INFEASIBLE.value for one in lost),
            lambda picks: self._runner.measurements(replace(launch, picks=tuple(picks))),
        )
        began = time.monotonic()
        if paid:
            self._launched += 1
            # Nobody picked the reference default: it is not in what the bar expects.
            asked = 0 if launch.mode is LaunchMode.REFERENCE else len(paid)
            progress = AtMost(asked, self._watcher.advance)
            result = self._runner.run(replace(launch, picks=tuple(paid)), progress.advance)
        result = replace(
            result,
            measured=(*lost, *result.measured),
            unfinished=(*result.unfinished, *over),
        )
        seconds = time.monotonic() - began
        self._commit(launch, result, seconds)

    def _commit(self, launch: Launch, result: LaunchResult, seconds: float) -> None:
        rows = [row for measured in result.measured for row in measured.rows]
        record: Record = {
            "launch": launch.id,
            "round": launch.round,
            "seconds": round(seconds, 3),
            "unfinished": [[p.trial.key, p.repeat, p.probability] for p in result.unfinished],
            "quarantined": [[q.trial.key, q.reason] for q in result.quarantined],
            "facts": dict(result.facts),
            **encode_outcomes(launch, result),
            "rows": [_plain(row) for row in rows],
        }
        self._journal.commit(record)
        self._remember(record)
        self._statuses.update(str(row.get("status", Status.OK.value)) for row in rows)
        for outcome in decode_outcomes(record):
            if outcome.trial_key in self._by_key:
                self._watcher.outcome(self._by_key[outcome.trial_key], outcome)

    def _remember(self, record: Record) -> None:
        self._records[record["launch"]] = record
        measured = [outcome for outcome in decode_outcomes(record) if not outcome.infeasible]
        # A journal of version 0.1 has no seconds.
        self._budget.add(len(measured), record.get("seconds", 0.0))
        counts = record["round"] >= last_retry(self._journal.rounds)
        for key, reason in record["quarantined"]:
            if key in self._by_key and counts:
                self._quarantine.add(self._by_key[key], reason)
        if record["facts"]:
            self._runner.learn(record["launch"], record["facts"])


def _references(sweep: Sweep) -> Iterator[Trial]:
    """NCCL's default in the untouched environment, for every task of the sweep."""
    for trial in sweep.trials:
        if trial.config == ABSTAIN:
            yield replace(trial, setting=replace(trial.setting, profile=LaunchProfile()))


def _plain(row: Any) -> dict[str, Any]:
    return {
        name: value.isoformat() if name == "timestamp" else value
        for name, value in row.items()
        if value is not None
    }


def _trials_hash(sweep: Sweep) -> str:
    keys = "\n".join(trial.key for trial in sweep.trials)
    return hashlib.sha256(keys.encode()).hexdigest()


def _refuse_orphans(sweep: Sweep, out: Path, journal: Path) -> None:
    """Raise UserError for parts of this name that the journal does not know."""
    folder = sweep_folder(out, sweep.file.system, sweep.file.name)
    orphans = sweep_parts(out, sweep.file.system, sweep.file.name)
    name = f"sweep={sweep.file.name}"
    shards = journal.parent.glob(f"{name}.shard-*/sweep.json")
    known = [journal.parent / name / "sweep.json", *shards]
    if orphans and not any(path.is_file() for path in known):
        raise UserError(
            f"{folder} already holds {len(orphans)} parts of sweep '{sweep.file.name}' and no "
            "journal says what they are; take another --out or name"
        )
