"""The interface of a sampling strategy, and the tasks that it samples from."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.datasets.cells import is_unwell
from dynamiccl.datasets.schema import Status
from dynamiccl.nccl import ABSTAIN, Algorithm
from dynamiccl.nccl import Protocol as NcclProtocol

Subspace = tuple[Algorithm | None, NcclProtocol | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy is told of a trial that was picked and ran."""

    trial_key: str
    round: int
    #: None where there is no usable time.
    time_us: float | None
    ok: bool
    #: It is not there to be measured, which is no failure.
    infeasible: bool = False

    @property
    def failed(self) -> bool:
        """Whether it hung, crashed, or computed wrong values."""
        return not self.ok and not self.infeasible


def outcome_of(trial_key: str, number: int, rows: Sequence[Mapping[str, Any]]) -> Outcome:
    """Read the outcome of a trial in round `number` from its rows, of which there is at least one.

    The time is that of the out-of-place half, and none where GPUs were throttled or had memory
    errors; wrong values in any half are a failure.
    """
    statuses = {row.get("status", Status.OK.value) for row in rows}
    ok = statuses == {Status.OK.value}
    first = next((row for row in rows if not row.get("in_place")), rows[0])
    time_us = first.get("time_us") if ok and not is_unwell(first) else None
    return Outcome(trial_key, number, time_us, ok, statuses == {Status.INFEASIBLE.value})


class Strategy(Protocol):
    """Picks trials, round by round.

    `next_picks` is a pure function of how the strategy was made, the round's number and what the
    rounds before it brought, whatever their order: an interrupted sweep continues exactly.
    """

    def next_picks(self, number: int, history: Sequence[Outcome]) -> tuple[Trial, ...] | None:
        """The picks of round `number`, or None when the strategy is done.

        Outcomes of this round and of later ones are not looked at.
        """

    def expected_picks(self) -> int:
        """Number of picks in all rounds, or an upper bound."""


@dataclass(frozen=True, slots=True)
class TaskTrials:
    """The trials that compete for one task: NCCL's default, and the forced configs."""

    setting: Setting
    size_bytes: int
    #: None where the sweep has no default that can run.
    default: Trial | None
    #: Feasible forced configs, in declaration order.
    candidates: tuple[Trial, ...]

    @property
    def key(self) -> str:
        """A stable, readable name of the task."""
        return f"{self.setting.key}:{self.size_bytes}"

    def default_pair(self) -> tuple[Trial, ...]:
        """The default twice (an A/A pair), from which the noise is estimated."""
        if self.default is None:
            return ()
        return self.default, replace(self.default, repeat=1)


def group_by_task(trials: Sequence[Trial]) -> tuple[TaskTrials, ...]:
    """The tasks of a sweep in declaration order; those without a feasible trial are left out."""
    feasible: dict[tuple[Setting, int], list[Trial]] = {}
    for trial in trials:
        if trial.infeasible is None:
            feasible.setdefault(trial.task, []).append(trial)
    return tuple(
        TaskTrials(
            setting,
            size_bytes,
            next((trial for trial in found if trial.config == ABSTAIN), None),
            tuple(trial for trial in found if trial.config != ABSTAIN),
        )
        for (setting, size_bytes), found in feasible.items()
    )


def subspace(trial: Trial) -> Subspace:
    """The (algorithm, protocol) of a trial, whose configs share one surrogate."""
    return trial.config.algorithm, trial.config.protocol


def infeasible_picks(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The trials that NCCL cannot run, once each: they become rows with a reason."""
    return tuple(trial for trial in trials if trial.infeasible is not None)


def seed_of(*words: str | int) -> int:
    """A 64-bit seed, hashed from the parts, the same on every machine."""
    digest = hashlib.sha256("|".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "little")
