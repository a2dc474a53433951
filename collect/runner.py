"""The interface between a sweep and what measures it: picks in, measurement rows out.

A *strategy* picks trials, round by round. A *runner* turns a round into launches (processes that
measure it, a pure function of the round and of earlier facts) and runs them one after the other. A
launch is the unit of commit: on resume, a launch that was killed is committed with the rows that it
had, and its other picks run again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from dynamiccl.collect.sweep.trial import Setting, Trial

#: A measurement as column -> value; columns that are missing take the schema's neutral value.
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pick:
    """A trial to be measured once."""

    trial: Trial
    #: Number of the repeat within its round, from 0 on.
    repeat: int = 0
    #: P(config | task, history) of the strategy's random draw; None = it was not drawn.
    probability: float | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """The picks that a strategy asks for at once; one cycle of an exhaustive sweep is a round."""

    number: int
    picks: tuple[Pick, ...]


class LaunchMode(StrEnum):
    """How a launch sets the config: environment variables, the tuner plugin, or not at all."""

    #: The user's untouched environment, nothing of ours loaded: the reference default.
    REFERENCE = "reference"
    #: The plugin applies a schedule: many configs in one process.
    SWEEP = "sweep"
    #: One config, forced by environment.
    FORCED = "forced"
    #: As SWEEP or FORCED, untimed: NCCL's log says what really runs.
    READ_BACK = "read-back"
    #: No process at all.
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Launch:
    """One process (or its simulation), and the picks that it measures, in this order."""

    #: Unique within the sweep, and reproducible: laying out a round again gives the same ids.
    id: str
    round: int
    setting: Setting
    mode: LaunchMode
    picks: tuple[Pick, ...]
    #: Whether the plugin applies the configs; else a single config is forced by environment.
    is_scheduled: bool = False

    @property
    def run(self) -> str:
        """The `run` column of its rows, one for each round: noise within a run is correlated."""
        return f"cycle-{self.round}"


@dataclass(frozen=True, slots=True)
class Measured:
    """The rows of one pick: one for each buffer placement, or a single one with the failure."""

    pick: Pick
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A trial that hung or crashed: its config is skipped at this size and above."""

    trial: Trial
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """Rows, picks to run again, and quarantined configs of a launch that has ended."""

    measured: tuple[Measured, ...]
    #: Picks to run again: a config hung or crashed before them, or a stop was requested.
    unfinished: tuple[Pick, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    #: New facts about the setting, as plain data (read-back results, environment columns).
    facts: Mapping[str, Any] = field(default_factory=dict)


class Runner(Protocol):
    """Measures picks. A failed attempt is a row with a status and a reason, never a missing row."""

    @property
    def name(self) -> str:
        """The name on the command line; a sweep is resumed with the same runner only."""

    def check(self, trials: Sequence[Trial]) -> None:
        """Refuse a sweep that this runner cannot measure, before anything runs.

        Raises UserError or MachineError, which name the fix.
        """

    def launches(self, round_: Round) -> tuple[Launch, ...]:
        """The launches that measure a round, in the order in which they run."""

    def measurements(self, launch: Launch) -> int:
        """Number of measurements a launch makes: its picks, and defaults that fill gaps."""

    def reason_to_skip(self, trial: Trial) -> str | None:
        """Why this trial need not be measured, or None when it must be."""

    def run(self, launch: Launch, progress: Callable[[int], None]) -> LaunchResult:
        """Run one launch; `progress` gets the number of picks done since its last call."""

    def learn(self, launch: str, facts: Mapping[str, Any]) -> None:
        """Take in the facts of an earlier launch of this sweep (read-back, environment)."""

    def environment(self) -> Row:
        """Environment columns known so far, for rows of attempts that start no process."""
