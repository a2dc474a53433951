"""What a sweep asks of a runner: launches go in, and come back with the rows that they gave.

A *strategy* picks trials, round by round. A *runner* turns the trials of a round into launches
(processes that measure them, a pure function of the round and of what earlier launches told) and
runs them one after the other. A launch is the unit of commitment: its rows are in the journal, or
it runs again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.datasets.schema import DEFAULT_PROFILE, DefaultScope, Statistic, Status
from dynamiccl.nccl import ABSTAIN

#: A measurement as column -> value; columns that are missing take the schema's neutral value.
Row = Mapping[str, Any]


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
    """One process (or its simulation), the trials that it measures, and what came of them."""

    #: Unique within the sweep, and reproducible: laying out a round again gives the same ids.
    id: str
    round: int
    setting: Setting
    mode: LaunchMode
    trials: tuple[Trial, ...]
    #: Whether the plugin applies the configs; else a single config is forced by environment.
    is_scheduled: bool = False

    # What follows is empty until it has run.

    #: The rows of each trial: one for each buffer placement, or a single one with the failure.
    measured: tuple[tuple[Trial, tuple[Row, ...]], ...] = ()
    #: Trials to run again: a config hung or crashed before them, or a stop was requested.
    left: tuple[Trial, ...] = ()
    #: The trial at which it hung or crashed, and the row that says so; it is in `left`, too.
    culprit: tuple[Trial, Row] | None = None
    #: New facts about the setting, as plain data (read-back results, environment columns).
    facts: Mapping[str, Any] = field(default_factory=dict)
    #: Whether it reached a config.
    began: bool = False
    #: Why it reached none, where its configs or the machine may be to blame.
    never_began: str = ""

    @property
    def run(self) -> str:
        """The `run` column of its rows, one for each round: noise within a run is correlated."""
        return f"cycle-{self.round}"

    def again(self, trials: Sequence[Trial]) -> "Launch":
        """A further launch of the same kind, for trials that this one left."""
        name = f"{self.id}~"
        return Launch(name, self.round, self.setting, self.mode, tuple(trials), self.is_scheduled)


class Runner(Protocol):
    """Measures trials: a failed attempt is a row with a status and a reason, never missing."""

    @property
    def name(self) -> str:
        """The name on the command line; a sweep is resumed with the same runner only."""

    def check(self, trials: Sequence[Trial]) -> None:
        """Refuse a sweep that this runner cannot measure, before anything runs.

        Raises UserError or MachineError, which name the fix.
        """

    def launches(self, number: int, trials: Sequence[Trial]) -> Sequence[Launch]:
        """The launches that measure the trials of round `number`."""

    def measurements(self, launch: Launch) -> int:
        """Number of measurements a launch makes: its trials, and defaults that fill gaps."""

    def reason_to_skip(self, trial: Trial) -> str | None:
        """Why this trial need not be measured, or None when it must be."""

    def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
        """Run one launch; `progress` gets the number of trials done since its last call."""

    def learn(self, facts: Mapping[str, Any]) -> None:
        """Take in the facts of an earlier launch of this sweep (read-back, environment)."""

    def environment(self) -> Row:
        """Environment columns known so far, for rows of attempts that start no process."""


def trial_row(file: SweepFile, launch: Launch, trial: Trial) -> dict[str, Any]:
    """The identity, workload and requested-config columns of one attempt."""
    setting, config = launch.setting, trial.config
    return {
        "system": file.system,
        "sweep": file.name,
        "run": launch.run,
        "repeat": trial.repeat,
        "round": launch.round,
        "launch": launch.id,
        "collective": setting.collective.wire,
        "size_bytes": trial.size_bytes,
        "datatype": setting.datatype,
        "num_ranks": setting.num_ranks,
        "num_nodes": setting.num_nodes,
        "num_hosts": setting.hosts,
        "ranks_per_node": setting.ranks_per_node,
        "num_comms": None if setting.comms is None else setting.comms.count,
        "comm_split": setting.split or None,
        "launch_profile": setting.profile.name,
        "interference_kind": setting.interference.kind,
        "interference_level": setting.interference.level,
        "default_scope": default_scope(launch).value,
        "is_default": config == ABSTAIN,
        "requested_algorithm": config.algorithm.wire if config.algorithm is not None else None,
        "requested_protocol": config.protocol.wire if config.protocol is not None else None,
        "requested_num_channels": config.num_channels,
        "requested_chunk_bytes": config.chunk_bytes,
        "behaviour_probability": trial.probability,
    }


def default_scope(launch: Launch) -> DefaultScope:
    """Which default the rows of a launch are, or are to be compared with.

    Inside the sweep mode NCCL's own choice is measured with our plugin loaded, which displaces a
    vendor's: that is a default of its profile, and only a launch without us gives the untouched.
    """
    ours = launch.mode is LaunchMode.SWEEP
    if ours or launch.setting.profile.name != DEFAULT_PROFILE:
        return DefaultScope.PROFILE
    return DefaultScope.UNTOUCHED


def lost_row(row: Row, status: Status, reason: str) -> dict[str, Any]:
    """The row of an attempt that gave no time, with the reason."""
    return {
        **row,
        "status": status.value,
        "reason": reason,
        "statistic": Statistic.NONE.value,
    }
