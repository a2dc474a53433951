"""The interface of a sampling strategy, and the tasks that it samples from."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.outcomes import Outcome
from dynamiccl.collect.runner import Pick
from dynamiccl.nccl import ABSTAIN, Algorithm
from dynamiccl.nccl import Protocol as NcclProtocol

Subspace = tuple[Algorithm | None, NcclProtocol | None]


class Strategy(Protocol):
    """Picks trials, round by round.

    `next_picks` is a pure function of how the strategy was made, the round's number and what the
    rounds before it brought, whatever their order: an interrupted sweep continues exactly.
    """

    def next_picks(self, number: int, history: Sequence[Outcome]) -> tuple[Pick, ...] | None:
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

    def default_pair(self) -> tuple[Pick, ...]:
        """The default twice (an A/A pair), from which the noise is estimated."""
        if self.default is None:
            return ()
        return Pick(self.default, 0), Pick(self.default, 1)


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


def infeasible_picks(trials: Sequence[Trial]) -> tuple[Pick, ...]:
    """The trials that NCCL cannot run, once each: they become rows with a reason."""
    return tuple(Pick(trial) for trial in trials if trial.infeasible is not None)


def seed_of(*words: str | int) -> int:
    """A 64-bit seed, hashed from the parts, the same on every machine."""
    digest = hashlib.sha256("|".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "little")
