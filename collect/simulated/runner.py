"""The simulator runner: the same rows as a real sweep, marked `source = simulator`."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl.collect.interference.kinds import SIMULATED
from dynamiccl.collect.nccl_tests.cost_table import as_logged, write_costs
from dynamiccl.collect.runner import Launch, LaunchMode, LaunchResult, Measured, Pick, Round, Row
from dynamiccl.collect.simulated.comms import SimulatedCall
from dynamiccl.collect.simulated.launches import launch_of, surroundings_of
from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.collect.sweep.trial import Setting, Trial
from dynamiccl.collect.trial_rows import lost_row, pick_row
from dynamiccl.datasets.schema import QUIET, Source, Statistic, Status
from dynamiccl.errors import InvalidSweep
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.noise import Noise
from dynamiccl.simulator.system import Call, System
from dynamiccl.simulator.systems import find_system


class SimulatorRunner:
    """Measures on a simulated system; needs no GPU, no NCCL and no network."""

    name = "simulator"

    def __init__(
        self, file: SweepFile, out: Path | None = None, system: System | None = None
    ) -> None:
        """Load the sweep's simulated system.

        NCCL's cost tables are written to the data set `out`, as those of a real job are. `system`
        replaces the one that the settings name. Raises UnknownName for an unknown one.
        """
        settings = file.simulator
        self._file = file
        self._out = out
        self._system = find_system(settings.system) if system is None else system
        self._kept: set[tuple[Group, str]] = set()
        self._noise = Noise(
            settings.seed,
            settings.noise_sigma,
            settings.tail_probability,
            settings.drift_sigma,
        )

    def check(self, trials: Sequence[Trial]) -> None:
        """Raise for groups, collectives, profiles and interference that are not modelled."""
        for setting in dict.fromkeys(trial.setting for trial in trials):
            _check(setting, self._system)

    def launches(self, round_: Round) -> tuple[Launch, ...]:
        """One launch for each setting of the round."""

        def key(pick: Pick) -> Setting:
            return pick.trial.setting

        grouped = groupby(sorted(round_.picks, key=key), key=key)
        return tuple(
            Launch(
                f"{round_.number}:{setting.key}",
                round_.number,
                setting,
                LaunchMode.SIMULATED,
                tuple(picks),
            )
            for setting, picks in grouped
        )

    def measurements(self, launch: Launch) -> int:
        """One for each pick."""
        return len(launch.picks)

    def reason_to_skip(self, trial: Trial) -> str | None:  # noqa: ARG002
        """None: a simulated measurement costs nothing."""
        return None

    def run(self, launch: Launch, progress: Callable[[int], None]) -> LaunchResult:
        """Simulate one call for each pick; out-of-place only."""
        self._keep_costs(launch)
        measured = []
        for pick in launch.picks:
            measured.append(Measured(pick, (self._measure(launch, pick),)))
            progress(1)
        return LaunchResult(tuple(measured))

    def _keep_costs(self, launch: Launch) -> None:
        """Write NCCL's modelled cost table, once for each group."""
        setting = launch.setting
        group = Group(setting.num_nodes, setting.ranks_per_node)
        place = group, setting.profile.name
        if self._out is None or place in self._kept:
            return
        self._kept.add(place)
        known = {**pick_row(self._file, launch, launch.picks[0]), **self.environment()}
        write_costs(self._out, as_logged(self._system.lines(group)), known, program="run")

    def learn(self, launch: str, facts: Mapping[str, Any]) -> None:
        """Do nothing."""

    def environment(self) -> Row:
        """The simulated system's environment columns."""
        return {
            **self._system.environment,
            "source": Source.SIMULATOR.value,
            "timestamp": datetime.now(UTC),
            "in_place": False,
            "exclusive_node": True,
            "mig": False,
        }

    def _measure(self, launch: Launch, pick: Pick) -> Row:
        trial, setting = pick.trial, launch.setting
        row = {**pick_row(self._file, launch, pick), **self.environment()}
        group = Group(setting.num_nodes, setting.ranks_per_node)
        call = Call(group, setting.collective, trial.size_bytes)
        fixed = launch_of(setting.profile, self._system)
        try:
            parts = self._system.parts(call, trial.config, fixed)
        except KeyError:
            reason = f"NCCL has no {trial.config.key} for this group"
            return lost_row(row, Status.INFEASIBLE, reason)
        name = trial.key + (f"#{pick.repeat}" if pick.repeat else "")
        ran = SimulatedCall(
            parts, surroundings_of(setting.interference), self._noise, launch.run, name
        )
        times_us, processes_us = ran.times(setting)
        time_us = float(np.mean(times_us))
        algbw = trial.size_bytes / (1000.0 * time_us)
        return {
            **row,
            "actual_algorithm": parts.algorithm.wire,
            "actual_protocol": parts.protocol.wire,
            "actual_num_channels": parts.num_channels,
            "verified": True,
            "statistic": Statistic.MEAN.value,
            "time_us": time_us,
            "algbw_gbytes_per_s": algbw,
            "busbw_gbytes_per_s": algbw * setting.collective.bus_factor(group.num_ranks),
            "wrong_values": 0,
            "process_times_us": processes_us if self._file.runner.per_iteration else None,
        }


def _check(setting: Setting, system: System) -> None:
    known = system.groups()
    if Group(setting.num_nodes, setting.ranks_per_node) not in known:
        shapes = ", ".join(f"{g.num_nodes}x{g.ranks_per_node}" for g in known)
        raise InvalidSweep(
            f"the simulator has no group of {setting.num_nodes} nodes x "
            f"{setting.ranks_per_node} ranks; choose from {shapes}"
        )
    if setting.collective not in system.collectives():
        names = ", ".join(c.wire for c in system.collectives())
        raise InvalidSweep(f"the simulator has no {setting.collective.wire}; choose from {names}")
    launch_of(setting.profile, system)
    if setting.interference.kind not in (QUIET, *SIMULATED):
        raise InvalidSweep(
            f"the simulator has no interference '{setting.interference.kind}'; choose from "
            f"{', '.join((QUIET, *SIMULATED))}"
        )
