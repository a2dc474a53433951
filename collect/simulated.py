"""The simulator as a runner: rows say `source = simulator`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from dynamiccl.collect.grid import SIMULATED, LaunchProfile, Trial
from dynamiccl.collect.nccl_log import write_costs
from dynamiccl.collect.run import Runner, run_sweep
from dynamiccl.collect.schedule import Launch, LaunchMode, Row, grouped, lost_row, trial_row
from dynamiccl.collect.strategies import logged_costs, make_strategy
from dynamiccl.collect.sweep import SweepFile, parse_sweep
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET, Source, Statistic, Status
from dynamiccl.errors import InvalidSweep, UserError
from dynamiccl.nccl import NcclVersion, Transport
from dynamiccl.simulator.noise import Noise
from dynamiccl.simulator.system import UNTOUCHED, Call, Group, Surroundings
from dynamiccl.simulator.system import Launch as LaunchSettings
from dynamiccl.simulator.systems import SYSTEMS, ParametricSystem, System, find_system

_THREADS, _NO_P2P, _NO_SHM = "NCCL_NTHREADS", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"
_MODELLED = (_THREADS, _NO_P2P, _NO_SHM)


def simulate(text: str, out: Path, system: System | None = None) -> Path:
    """Simulate a sweep file's text, on `system` if given. Raises InvalidSweep and UserError."""
    parsed = parse_sweep(text, where="simulated sweep")
    strategy = make_strategy(parsed.file, parsed.trials, logged_costs(parsed.file, out))
    run_sweep(parsed, strategy, SimulatorRunner(parsed.file, out, system), out, resume=False)
    return out


class SimulatorRunner(Runner):
    """Measures on a simulated system."""

    name = "simulator"

    def __init__(
        self, file: SweepFile, out: Path | None = None, system: System | None = None
    ) -> None:
        """`out` gets NCCL's cost tables, as from a real job. Raises UnknownName."""
        knobs = file.simulator
        self._file = file
        self._out = out
        self._system = find_system(knobs.system) if system is None else system
        self._kept: set[tuple[Group, str]] = set()
        self._noise = Noise(
            knobs.seed, knobs.noise_sigma, knobs.tail_probability, knobs.drift_sigma
        )

    def check(self, trials: Sequence[Trial]) -> None:
        """Raise for what is not modelled."""
        named, modelled = self._file.nccl_version, self._system.nccl_version
        if named is not None and NcclVersion.parse(named) != modelled:
            others = ", ".join(f"{name} {find_system(name).nccl_version}" for name in SYSTEMS)
            raise InvalidSweep(
                f"nccl_version: the sweep names NCCL {named}, and the simulated system "
                f"'{self._file.simulator.system}' runs {modelled}; write {modelled}, leave the key "
                f"out, or name another as [simulator] system: {others}"
            )
        shapes = [f"{g.num_nodes}x{g.ranks_per_node}" for g in self._system.groups()]
        collectives = [collective.wire for collective in self._system.collectives()]
        for setting in dict.fromkeys(trial.setting for trial in trials):
            for what, value, choices in (
                ("group of ", f"{setting.num_nodes}x{setting.ranks_per_node}", shapes),
                ("", setting.collective.wire, collectives),
                ("interference ", setting.interference.kind, (QUIET, *SIMULATED)),
            ):
                if value not in choices:
                    raise InvalidSweep(
                        f"the simulator has no {what}{value}; choose from {', '.join(choices)}"
                    )
            _launch_of(setting.profile, self._system)

    def launches(self, number: int, trials: Sequence[Trial]) -> tuple[Launch, ...]:
        """One launch for each setting."""
        by_setting = grouped(trials, lambda trial: trial.setting)
        return tuple(
            Launch(f"{number}:{s.key}", number, s, LaunchMode.SIMULATED, tuple(by_setting[s]))
            for s in sorted(by_setting)
        )

    def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
        """Simulate a call for each trial; out-of-place only."""
        group = Group(launch.setting.num_nodes, launch.setting.ranks_per_node)
        place = group, launch.setting.profile.name
        if self._out is not None and place not in self._kept:
            self._kept.add(place)
            known = {**trial_row(self._file, launch, launch.trials[0]), **self.environment()}
            write_costs(self._out, self._system.lines(group), known, program="run")
        measured = []
        for trial in launch.trials:
            measured.append((trial, (self._measure(launch, trial),)))
            progress(1)
        return replace(launch, measured=tuple(measured), began=True)

    def environment(self) -> Row:
        """The system's environment columns."""
        return {
            **self._system.environment,
            "source": Source.SIMULATOR.value,
            "timestamp": datetime.now(UTC),
            "in_place": False,
            "exclusive_node": True,
            "mig": False,
        }

    def _measure(self, launch: Launch, trial: Trial) -> Row:
        setting = launch.setting
        row = {**trial_row(self._file, launch, trial), **self.environment()}
        group = Group(setting.num_nodes, setting.ranks_per_node)
        call = Call(group, setting.collective, trial.size_bytes)
        fixed = _launch_of(setting.profile, self._system)
        try:
            parts = self._system.parts(call, trial.config, fixed)
        except KeyError:
            why = f"NCCL has no {trial.config.key} for this group"
            return lost_row(row, Status.INFEASIBLE, why)
        comms = setting.comms
        processes = setting.hosts * setting.ranks_per_host
        members = (range(processes),) if comms is None else comms
        name = trial.key + (f"#{trial.repeat}" if trial.repeat else "")
        factors = np.array([self._noise.factor(launch.run, name)])
        if comms is not None:
            factors = self._noise.factors(launch.run, name, len(comms))
        slower = 1.0 + setting.interference.level
        times_us = parts.time_us(Surroundings(intra=slower, inter=slower)) * factors
        by_comm = zip(members, times_us.tolist(), strict=True)
        us_of = {process: of_comm for ranks, of_comm in by_comm for process in ranks}
        # None: it is in no communicator.
        of_processes = [us_of.get(process) for process in range(processes)]
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
            "busbw_gbytes_per_s": algbw * setting.collective.bus_factor(setting.num_ranks),
            "wrong_values": 0,
            "process_times_us": of_processes if self._file.runner.per_iteration else None,
        }


def _launch_of(profile: LaunchProfile, system: System) -> LaunchSettings:
    """What a profile fixes; InvalidSweep where the system does not model that."""
    if profile.name == DEFAULT_PROFILE:
        return UNTOUCHED
    if not isinstance(system, ParametricSystem):
        raise InvalidSweep(
            f"the simulator knows no launch profiles of '{system.name}': remove '{profile.name}'"
        )
    environment = dict(profile.environment)
    unknown = [name for name in environment if name not in _MODELLED]
    if unknown:
        raise InvalidSweep(
            f"profile '{profile.name}' sets {', '.join(unknown)}, which the simulator does not "
            f"model; it takes threads and transport ({', '.join(_MODELLED)})"
        )
    transport = None
    if environment.get(_NO_P2P) == "1":
        transport = Transport.NET if environment.get(_NO_SHM) == "1" else Transport.SHM
    try:
        threads = int(environment[_THREADS]) if _THREADS in environment else None
        launch = LaunchSettings(threads, transport)
        system.links_of(launch)
    except (UserError, ValueError) as error:
        raise InvalidSweep(f"profile '{profile.name}': {error}") from error
    return launch
