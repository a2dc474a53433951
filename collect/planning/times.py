"""Call times for planning: the simulator's model of the sweep's communicators.

Where the model holds a group, its times are taken. Each gap has a rule, and each rule that was used
says so in `notes`:

* another group of the same kind (one node, or several) lends its times, the nearest one in nodes
  and ranks per node; to one of over sixteen times its nodes nothing is lent, and there is no plan;
* a collective that the model lacks, or a kind of group, takes 50 us and 10 GB/s;
* a config for which NCCL has no cell takes what NCCL's own choice takes, since that runs then;
* a launch profile that is not modelled takes the times of the untouched environment, and what runs
  beside on purpose slows nothing, but for the simulator's own congestion.
"""

import math
from collections.abc import Sequence
from typing import Final

from dynamiccl.collect.simulated import launch_of, surroundings_of
from dynamiccl.collect.sweep.trial import SIMULATED, LaunchProfile, Setting
from dynamiccl.datasets.schema import QUIET
from dynamiccl.errors import InvalidSweep, UserError
from dynamiccl.nccl import ABSTAIN, Config
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.parts import Parts
from dynamiccl.simulator.system import UNTOUCHED, Call, Launch, System
from dynamiccl.simulator.systems import find_system

#: A call that no model knows has a latency and the bandwidth of a middling network.
LATENCY_US: Final = 50.0
GBYTES_PER_S: Final = 10.0
#: A group lends its times to groups of so many times its nodes at most.
MOST_TIMES_NODES: Final = 16
_RULE: Final = f"{LATENCY_US:g} us and {GBYTES_PER_S:g} GB/s for each call"


class CallTimes:
    """Call times on one simulated system."""

    def __init__(self, system: str) -> None:
        """Load a system by name or file. Raises UnknownName, MissingPath and UserError."""
        self.system = find_system(system)
        self._settings: dict[Setting, SettingTimes] = {}

    def of(self, setting: Setting) -> "SettingTimes":
        """The call times of one setting (cached)."""
        if setting not in self._settings:
            self._settings[setting] = SettingTimes(self.system, setting)
        return self._settings[setting]

    @property
    def notes(self) -> Sequence[str]:
        """Notes on the fallback rules that were used, each once."""
        found = (note for times in self._settings.values() for note in times.notes)
        return [*dict.fromkeys(found)]


class SettingTimes:
    """Call times of one setting, by size and config."""

    def __init__(self, system: System, setting: Setting) -> None:
        """Find the modelled communicator shape that stands for the setting's."""
        self._system = system
        self._setting = setting
        self._group = _group(system, setting)
        self._launch, problem = _launch(system, setting.profile)
        self._around = surroundings_of(setting.interference)
        self._parts: dict[tuple[int, Config], Parts | None] = {}
        self._notes = dict.fromkeys(self._first_notes(problem))

    @property
    def notes(self) -> Sequence[str]:
        """Notes on the fallback rules that were used."""
        return [*self._notes]

    def call_us(self, size_bytes: int, config: Config) -> float:
        """Microseconds of a call of `size_bytes` (NCCL's nBytes) under `config`, without noise."""
        parts = self.parts(size_bytes, config)
        if parts is None and self._group is not None:
            parts = self.parts(size_bytes, ABSTAIN)
            self._notes[
                f"{self._system.name} has no {_cell(config)} for "
                f"{self._setting.collective.wire}: NCCL's own choice runs there"
            ] = None
        if parts is None:
            return LATENCY_US + size_bytes / (1000.0 * GBYTES_PER_S)
        return parts.time_us(self._around)

    def parts(self, size_bytes: int, config: Config) -> Parts | None:
        """The config that runs and its time in parts; None where the model has no cell."""
        key = size_bytes, config
        if key not in self._parts:
            self._parts[key] = self._find(size_bytes, config)
        return self._parts[key]

    def _find(self, size_bytes: int, config: Config) -> Parts | None:
        if self._group is None or size_bytes <= 0:
            return None
        call = Call(self._group, self._setting.collective, size_bytes)
        try:
            return self._system.parts(call, config, self._launch)
        except KeyError:
            return None

    def _first_notes(self, problem: str) -> Sequence[str]:
        setting, name = self._setting, self._system.name
        asked = Group(setting.num_nodes, setting.ranks_per_node)
        found = []
        if setting.collective not in self._system.collectives():
            found.append(f"{name} has no {setting.collective.wire}: {_RULE}")
        elif self._group is None:
            nodes = "several nodes" if asked.num_nodes > 1 else "one node"
            found.append(f"{name} has no group of {nodes}: {_RULE}")
        elif self._group != asked:
            found.append(
                f"{name} has no group of {_shape(asked)}: the times of {_shape(self._group)}"
            )
        if problem and self._group is not None:
            found.append(f"{problem}: the times of the untouched environment")
        if setting.interference.kind not in {QUIET, *SIMULATED}:
            found.append(f"what '{setting.interference.kind}' beside slows is not in it")
        return found


def _shape(group: Group) -> str:
    return f"{group.num_nodes} x {group.ranks_per_node}"


def _cell(config: Config) -> str:
    words = (config.algorithm, config.protocol)
    return " ".join(word.wire for word in words if word is not None)


def _group(system: System, setting: Setting) -> Group | None:
    """The setting's shape in the model, or the nearest one of its kind; None without one."""
    if setting.collective not in system.collectives():
        return None
    asked = Group(setting.num_nodes, setting.ranks_per_node)
    alike = [g for g in system.groups() if (g.num_nodes > 1) == (asked.num_nodes > 1)]

    def apart(group: Group) -> float:
        nodes = math.log2(group.num_nodes / asked.num_nodes)
        return abs(nodes) + abs(math.log2(group.ranks_per_node / asked.ranks_per_node))

    found = min(alike, key=apart, default=None)
    if found is not None and asked.num_nodes > MOST_TIMES_NODES * found.num_nodes:
        raise UserError(
            f"nothing is known of a group of {asked.num_nodes} nodes: the largest that "
            f"{system.name} models has {found.num_nodes}, and hours made of its times would mean "
            f"nothing; plan for up to {MOST_TIMES_NODES * found.num_nodes} nodes, or name another "
            "[simulator] system"
        )
    return found


def _launch(system: System, profile: LaunchProfile) -> tuple[Launch, str]:
    """The launch profile's settings, and why it is not modelled ('' if it is)."""
    try:
        return launch_of(profile, system), ""
    except InvalidSweep:
        return UNTOUCHED, f"{system.name} does not model the profile '{profile.name}'"
