"""Sweep files: their tables and bounds, and the trials that they declare.

The grid is collectives x group shapes x datatypes x launch profiles x interference x sizes x
(NCCL's default + algorithms x protocols x channels x chunk sizes); what NCCL cannot run is in it.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from dynamiccl import nccl
from dynamiccl.collect import grid
from dynamiccl.collect.grid import Interference, LaunchProfile, Setting, Trial, parse_size
from dynamiccl.collect.launchers import LauncherSettings
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET
from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import DynamicclError, InvalidSweep, MissingPath
from dynamiccl.simulator.toml_table import Table, first_problem, one_of, toml_value

#: nccl-tests keeps three buffers (`maxBytes` in common.cu), and no GPU has over 288 GB.
_MAX_BYTES: Final = 288 * 10**9 // 3
_Size = Annotated[int, BeforeValidator(parse_size)]
_SizeOrAuto = Annotated[int, BeforeValidator(lambda size: size and parse_size(size))]
#: NCCL user guide, `env.rst` at v2.30.7.
_TRANSPORT_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "P2P": {},
    "SHM": {"NCCL_P2P_DISABLE": "1"},
    "NET": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}


class GroupShape(Table):
    """A communicator's nodes and ranks per node, as NCCL counts them; with a split, the job's."""

    num_nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    #: Where NCCL counts other nodes: a whole NVL72 is one to it.
    num_hosts: int | None = Field(default=None, ge=1)
    split: Annotated[str, AfterValidator(grid.split_text)] | None = None
    #: The split may leave single processes over, which have nobody to talk to.
    spare: bool = False

    @model_validator(mode="after")
    def _hosts_share_the_ranks(self) -> Self:
        ranks = self.num_nodes * self.ranks_per_node
        if self.num_hosts is not None and ranks % self.num_hosts:
            raise ValueError(f"{ranks} ranks cannot be shared out evenly to {self.num_hosts} hosts")
        if self.split is not None and self.num_hosts not in {None, self.num_nodes}:
            raise ValueError("split needs nodes that are hosts; leave num_hosts out")
        if self.spare and self.split is None:
            raise ValueError("spare is about the processes that a split leaves over; give one")
        self.communicator()
        return self

    def communicator(self) -> tuple[int, int]:
        """Its nodes, and its ranks on each."""
        shape = self.num_nodes, self.ranks_per_node
        if self.split is None:
            return shape
        ranks = grid.communicators(self.split, *shape, spare=self.spare)[0]
        nodes = len({rank // self.ranks_per_node for rank in ranks})
        return nodes, len(ranks) // nodes

    @property
    def hosts(self) -> int:
        """Hosts of the job."""
        return self.num_hosts or self.num_nodes

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each host of the job."""
        return self.num_nodes * self.ranks_per_node // self.hosts


class Sizes(Table):
    """Sizes from `min` to `max` by `factor` or in steps of an octave, or a `list`."""

    min: _Size | None = None
    max: _Size | None = None
    steps_per_octave: Literal[1, 2, 4] | None = None
    factor: int | None = Field(default=None, ge=2)
    list: tuple[_Size, ...] = ()

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if (self.min is None) != (self.max is None):
            raise ValueError(f"{'min' if self.min is None else 'max'} is missing; add it")
        if (self.min is None) != bool(self.list):
            raise ValueError("give either min and max, or list = [sizes]")
        if (self.factor is not None) + (self.steps_per_octave is not None) + bool(self.list) > 1:
            raise ValueError("give one of factor, steps_per_octave and list")
        largest = max(self.list, default=self.max or 0)
        if largest > _MAX_BYTES:
            raise ValueError(
                f"{largest} bytes are more than a GPU holds, of which nccl-tests keeps three "
                f"buffers; give at most '{_MAX_BYTES >> 30}G'"
            )
        if not self.ladder():
            raise ValueError(
                f"no size of the ladder lies from {self.min} to {self.max} bytes; give a min below "
                "the max, with a power of two between them"
            )
        return self

    def ladder(self) -> tuple[int, ...]:
        """Sizes in bytes, ascending, each once."""
        if self.min is None or self.max is None:
            return tuple(sorted(set(self.list)))
        if self.factor is not None:
            whole = self.min <= self.max
            return grid.factor_ladder(self.min, self.max, self.factor) if whole else ()
        return grid.octave_ladder(self.min, self.max, self.steps_per_octave or 1)


class ProfileSettings(Table):
    """Settings that NCCL reads once per process."""

    name: str
    transport: Literal["P2P", "SHM", "NET"] | None = None
    env: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sets_what_is_not_the_sweeps(self) -> Self:
        for name, value in self.env.items():
            if not name.startswith("NCCL_"):
                raise ValueError(f"'{name}' is no NCCL_* variable; [launcher] env takes others")
            if name in {"NCCL_ALGO", "NCCL_PROTO", "NCCL_TUNER_PLUGIN", "NCCL_DEBUG"}:
                raise ValueError(f"'{name}' is the sweep's own; use algorithms and protocols")
            if name == "NCCL_SYM_NOWIN_ENABLE" and value != "0":
                raise ValueError(f"'{name}' makes symmetric kernels run, and these ask no tuner")
        if self.name == DEFAULT_PROFILE and self.environment():
            raise ValueError(
                f"the profile '{DEFAULT_PROFILE}' is the user's untouched environment; give a "
                "profile with settings another name"
            )
        return self

    def environment(self) -> dict[str, str]:
        """The variables that the profile sets."""
        return {**_TRANSPORT_SETTINGS.get(self.transport or "", {}), **self.env}


class InterferenceSettings(Table):
    """What runs beside the collective; `level` is a share, a factor, or the edge of matrices."""

    kind: Annotated[str, one_of("interference", (QUIET, *grid.REAL, *grid.SIMULATED))] = QUIET
    level: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _level_fits(self) -> Self:
        if (self.kind == QUIET) != (self.level == 0):
            raise ValueError("kind 'none' has level 0, and every other kind a level above 0")
        if self.kind in grid.PRODUCTS:
            if not self.level.is_integer() or not 16 <= self.level <= 1 << 16:
                raise ValueError(f"the level of '{self.kind}' is the matrices' edge: 16 to 65536")
        elif self.kind not in grid.SIMULATED and self.level > 1:
            raise ValueError(f"the level of '{self.kind}' is a share from 0 to 1")
        return self


class StrategySettings(Table):
    """What is measured, and how often."""

    kind: Literal["exhaustive", "random", "adaptive"] = "exhaustive"
    #: Of a forced config in a cycle; `adaptive` has its own.
    repeats: int = Field(default=1, ge=1)
    share: float = Field(default=0.25, gt=0, le=1)
    #: Of uniform exploration in adaptive rounds (off-policy evaluation needs it).
    epsilon: float = Field(default=0.1, gt=0, le=1)
    #: Adaptive ends a setting when of each task the winner is this sure,
    confidence: float = Field(default=0.9, gt=0.5, lt=1)
    #: or less than this share of the time is left to win.
    tolerance: float = Field(default=0.01, gt=0, lt=1)
    max_rounds: int = Field(default=20, ge=1)
    seed: int = 0


class BudgetSettings(Table):
    """When to stop, over all jobs."""

    max_measurements: int | None = Field(default=None, ge=1)
    max_hours: float | None = Field(default=None, gt=0)


class RunnerSettings(Table):
    """How nccl-tests runs."""

    #: Plays schedules; default: where `make plugin` puts it.
    plugin: str | None = None
    #: NCCL may take a minute on 512 GPUs.
    startup_timeout_s: float = Field(default=300, gt=0)
    #: A config counts as hung after so long without a row.
    stall_timeout_s: float = Field(default=120, gt=0)
    #: Most for LL and up to two channels (schedule.without_slow).
    slow_max: _Size = 64 << 20
    #: A launch that reached no config runs again, so long afterwards.
    retry_after_s: float = Field(default=10, ge=0)
    read_back: bool = True
    #: Writes ranks x iterations for each block (`-I`): 385 MB for a launch of 512 ranks.
    per_iteration: bool = False


class TelemetrySettings(Table):
    """Whether samplers watch the GPUs' health."""

    enabled: bool = True


class SimulatorSettings(Table):
    """The embedded simulator; its noise is ours, not fitted (simulator/noise.py)."""

    #: A shipped one, or a TOML file (docs/simulator.md).
    system: str = "h100-ib"
    seed: int = 0
    noise_sigma: float = Field(default=0.015, ge=0, le=1)
    tail_probability: float = Field(default=0.02, ge=0, le=1)
    drift_sigma: float = Field(default=0.005, ge=0, le=1)


class SweepFile(Table):
    """All settings of a sweep file."""

    name: str
    system: str
    collectives: tuple[str, ...] = Field(min_length=1)
    groups: tuple[GroupShape, ...] = Field(min_length=1)
    sizes: Sizes
    algorithms: tuple[str, ...] = tuple(a.wire for a in nccl.Algorithm)
    protocols: tuple[str, ...] = tuple(p.wire for p in nccl.Protocol)
    #: 0 = AUTO, of chunk sizes too, which else need NCCL 2.30 and the sweep mode.
    num_channels: tuple[int, ...] = (0,)
    chunk_sizes: tuple[_SizeOrAuto, ...] = (0,)
    datatypes: tuple[Annotated[str, one_of("datatype", grid.DATATYPE_BYTES)], ...] = ("float",)
    profiles: tuple[ProfileSettings, ...] = (ProfileSettings(name=DEFAULT_PROFILE),)
    interference: tuple[InterferenceSettings, ...] = (InterferenceSettings(),)
    #: These trials alone, by key (`evaluate gate` writes them).
    only: tuple[str, ...] = ()
    nccl_version: str | None = None
    cycles: int = Field(default=5, ge=1)
    iterations: int = Field(default=20, ge=1)
    #: Up to `small_max`: 20 calls of 1 KiB are 0.3 ms of signal.
    small_iterations: int = Field(default=200, ge=1)
    small_max: _Size = 256 << 10
    warmup_iterations: int = Field(default=5, ge=1)
    strategy: StrategySettings = StrategySettings()
    budget: BudgetSettings = BudgetSettings()
    runner: RunnerSettings = RunnerSettings()
    launcher: LauncherSettings = LauncherSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    simulator: SimulatorSettings = SimulatorSettings()

    @property
    def too_old(self) -> str | None:
        """Why nccl-tests cannot play configs under this NCCL, or None."""
        version, oldest = self.nccl_version, nccl.TUNER_ABI_SINCE[4]
        needs = f"a sweep of configs needs NCCL {oldest} or later, and nccl_version is {version}"
        fix = "take a newer NCCL, or measure its own choice alone: algorithms = []"
        is_old = version is not None and nccl.NcclVersion.parse(version) < oldest
        return f"{needs}; {fix}" if is_old else None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked sweep; trials are in declaration order."""

    file: SweepFile
    text: str
    trials: tuple[Trial, ...]


def load_sweep(path: Path) -> Sweep:
    """Read and check a file. Raises MissingPath and InvalidSweep."""
    if not path.is_file():
        raise MissingPath("sweep file", path, "examples/ holds some to start from")
    try:
        return parse_sweep(path.read_text(encoding="utf-8"), where=path.name)
    except UnicodeDecodeError as error:
        raise InvalidSweep(f"{path.name} is not TOML: {error}") from error


def parse_sweep(text: str, *, where: str) -> Sweep:
    """Check a text and lay out its trials. Raises InvalidSweep."""
    try:
        file = SweepFile.model_validate(tomllib.loads(text))
        check_slug(file.name, "sweep")
        check_slug(file.system, "system")
        trials = _trials(file, where)
        if "algorithms" in file.model_fields_set and not file.only:
            _check_protocols(file, where)
        return Sweep(file, text, trials)
    except tomllib.TOMLDecodeError as error:
        raise InvalidSweep(f"{where} is not TOML: {error}") from error
    except ValidationError as error:
        raise InvalidSweep(f"{where}: {first_problem(error)}") from error
    except DynamicclError as error:
        raise InvalidSweep(str(error)) from error


def sweep_text(file: SweepFile, *, head: str = "") -> str:
    """The settings as TOML without defaults, below `head` as a comment."""
    entries = file.model_dump(mode="json", exclude_defaults=True)
    tables = {key: entries.pop(key) for key in [*entries] if isinstance(entries[key], dict)}
    entries |= {"sizes": tables.pop("sizes")}
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    lines += [f"{key} = {toml_value(value)}" for key, value in entries.items()]
    for key, table in tables.items():
        lines += ["", f"[{key}]", *(f"{name} = {toml_value(table[name])}" for name in table)]
    return "\n".join(lines) + "\n"


def _trials(file: SweepFile, where: str) -> tuple[Trial, ...]:
    version = None if file.nccl_version is None else nccl.NcclVersion.parse(file.nccl_version)
    newest = nccl.NEWEST_KNOWN
    if version is not None and (version.major, version.minor) > (newest.major, newest.minor):
        raise InvalidSweep(
            f"{where}: nccl_version: NCCL {version} is newer than the newest whose rules are known "
            f"here, {newest.major}.{newest.minor}; leave the key out, and what runs is read from "
            "NCCL's log"
        )
    algorithms = [nccl.Algorithm.parse(a, where=f"{where}: algorithms") for a in file.algorithms]
    protocols = [nccl.Protocol.parse(p, where=f"{where}: protocols") for p in file.protocols]
    knobs = product(algorithms, protocols, file.num_channels, file.chunk_sizes)
    forced = [nccl.Config(a, p, channels or None, chunk or None) for a, p, channels, chunk in knobs]
    trials = []
    for setting in _settings(file, where):
        configs = [nccl.ABSTAIN, *(forced if setting.collective.tunable else ())]
        for size, config in product(file.sizes.ladder(), configs):
            reason = nccl.invalid_reason(
                config, setting.collective, version=version, num_nodes=setting.num_nodes
            )
            if not setting.benchmark_bytes(size):
                reason = f"{size} bytes leave nothing to each of {setting.num_ranks} ranks"
            trials.append(Trial(setting, size, config, reason))
    counts = Counter(trial.key for trial in trials)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise InvalidSweep(
            f"{where}: trial {twice[0]} is declared twice; name every collective, group, datatype, "
            "profile, interference, algorithm, protocol, channel count and chunk size once"
        )
    if missing := [key for key in file.only if key not in counts]:
        raise InvalidSweep(
            f"{where}: only: the grid has no trial {missing[0]}; add what it needs to the file's "
            "own keys, or remove it"
        )
    return tuple(trial for trial in trials if not file.only or trial.key in file.only)


def _check_protocols(file: SweepFile, where: str) -> None:
    protocols = {nccl.Protocol.parse(name) for name in file.protocols}
    for algorithm in map(nccl.Algorithm.parse, file.algorithms):
        beside = map(nccl.Collective.parse, file.collectives)
        has = {p for each in beside for p in nccl.VALID_PROTOCOLS.get(each, {}).get(algorithm, ())}
        if has and not has & protocols:
            raise InvalidSweep(
                f"{where}: {algorithm.wire} has no {', '.join(file.protocols)}: add "
                f"{' or '.join(sorted(p.wire for p in has))} to protocols, or remove "
                f"{algorithm.wire} from algorithms"
            )


def _settings(file: SweepFile, where: str) -> Iterator[Setting]:
    collectives = [
        nccl.Collective.parse(c, where=f"{where}: collectives") for c in file.collectives
    ]
    profiles = [
        LaunchProfile(check_slug(one.name, "profile"), tuple(sorted(one.environment().items())))
        for one in file.profiles
    ]
    beside = [Interference(one.kind, one.level) for one in file.interference]
    for collective, group in product(collectives, file.groups):
        shape = (*group.communicator(), group.hosts, group.ranks_per_host)
        for fixed in product(file.datatypes, profiles, beside):
            yield Setting(collective, *shape, *fixed, group.split or "", group.spare)
