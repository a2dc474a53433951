"""The tables of a sweep file, checked by Pydantic."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from dynamiccl.collect.interference.kinds import KINDS, SIMULATED
from dynamiccl.collect.launchers import LAUNCHERS, ContainerSettings, LauncherSettings
from dynamiccl.collect.sweep.group_shape import GroupShape
from dynamiccl.collect.sweep.sizes import (
    DATATYPE_BYTES,
    factor_ladder,
    octave_ladder,
    parse_size,
)
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET
from dynamiccl.nccl import Algorithm, Protocol
from dynamiccl.simulator.toml_table import Table, one_of
from dynamiccl.sizes import MAX_SIZE_BITS

_Size = Annotated[int, BeforeValidator(parse_size)]
#: What a launch profile's `transport` sets (NCCL user guide, `env.rst` at v2.30.7).
TRANSPORT_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "P2P": {},
    "SHM": {"NCCL_P2P_DISABLE": "1"},
    "NET": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}


#: Options of nccl-tests (v2.19.6) that `runner.arguments` must leave alone, and why.
_SET_BY_THE_SWEEP: Final = "is set by the sweep; change the sweep file's own keys"
_SWEEPS_OWN: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("-b", "-e", "-f", "-i", "-g", "-t", "-n", "-w", "-c", "-d"), _SET_BY_THE_SWEEP
    ),
    **dict.fromkeys(("-N", "-J", "-I", "-K", "-S"), _SET_BY_THE_SWEEP),
    "-m": "makes one call of many: a row would no longer be calls of one size and config",
    "-G": "asks for configs while a graph is captured only: no block would have its own",
    "-h": "prints its help and measures nothing",
}
#: Values that it must leave alone; all others of these options are the user's own.
_REFUSED_VALUES: Final[Mapping[str, tuple[re.Pattern[str], str]]] = {
    "-R": (re.compile("2"), "makes NCCL's symmetric kernels run, and these ask no tuner"),
    "-D": (re.compile("(?!0$).*"), "runs a kernel of nccl-tests' own, which asks no tuner"),
    "-C": (re.compile("(?!0$).*"), "reports the CPU's time in place of the collective's"),
    "-o": (re.compile("all"), "measures each size once for every operator: name one of them"),
    "-r": (re.compile("-1"), "measures each size once for every root: name one of them"),
}
_LONG_OPTIONS: Final = {
    "--minbytes": "-b",
    "--maxbytes": "-e",
    "--stepfactor": "-f",
    "--stepbytes": "-i",
    "--ngpus": "-g",
    "--nthreads": "-t",
    "--iters": "-n",
    "--warmup_iters": "-w",
    "--check": "-c",
    "--datatype": "-d",
    "--run_cycles": "-N",
    "--output_file": "-J",
    "--per_iter_timing": "-I",
    "--per_iter_skip": "-K",
    "--report_timestamps": "-S",
    "--agg_iters": "-m",
    "--cudagraph": "-G",
    "--local_register": "-R",
    "--device_implementation": "-D",
    "--report_cputime": "-C",
    "--op": "-o",
    "--root": "-r",
    "--help": "-h",
}


def _options_in(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """The word, its option's short name and the value: of `-R 2`, `-R2`, `--op=all`."""
    for word, following in zip(arguments, (*arguments[1:], ""), strict=True):
        if not word.startswith("-") or word[1:2].isdigit():
            continue
        is_long = word.startswith("--")
        head, _, given = word.partition("=") if is_long else (word[:2], "", word[2:])
        yield word, _short(head) if is_long else head, given or following


def _short(option: str) -> str:
    """The short name of a long option that is ours, cut short as getopt_long allows."""
    if option in _LONG_OPTIONS:
        return _LONG_OPTIONS[option]
    meant = [short for name, short in _LONG_OPTIONS.items() if name.startswith(option)]
    return meant[0] if meant else option


class Sizes(Table):
    """Message sizes: from `min` to `max` by `factor` or in steps of an octave, or a `list`."""

    min: _Size | None = None
    max: _Size | None = None
    steps_per_octave: Literal[1, 2, 4] | None = None
    factor: int | None = Field(default=None, ge=2)
    list: tuple[_Size, ...] = ()

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        ranged = self.min is not None or self.max is not None
        if ranged == bool(self.list):
            raise ValueError("give either min and max, or list = [sizes]")
        if ranged and (self.min is None or self.max is None):
            raise ValueError(f"{'min' if self.min is None else 'max'} is missing; add it")
        if (self.factor is not None) + (self.steps_per_octave is not None) + bool(self.list) > 1:
            raise ValueError("give one of factor, steps_per_octave and list")
        if max(self.list, default=self.max or 0) >> MAX_SIZE_BITS or not self.ladder():
            raise ValueError(
                f"no size of the ladder lies from {self.min} to {self.max} bytes; give a min below "
                f"the max, less than 2^{MAX_SIZE_BITS} bytes, with a power of two between them"
            )
        return self

    def ladder(self) -> tuple[int, ...]:
        """Sizes in bytes, ascending, each once."""
        if self.min is None or self.max is None:
            return tuple(sorted(set(self.list)))
        if self.factor is not None:
            return factor_ladder(self.min, self.max, self.factor) if self.min <= self.max else ()
        return octave_ladder(self.min, self.max, self.steps_per_octave or 1)


class ProfileSettings(Table):
    """A launch profile: settings that NCCL reads once per process."""

    name: str
    transport: Literal["P2P", "SHM", "NET"] | None = None
    threads: Literal[64, 128, 256, 512] | None = None
    buffer_bytes: _Size | None = None
    env: dict[str, str] = Field(default_factory=dict)

    @field_validator("env")
    @classmethod
    def _is_nccls(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name.startswith("NCCL_"):
                raise ValueError(f"'{name}' is no NCCL_* variable; [launcher] env takes others")
            if name in {"NCCL_ALGO", "NCCL_PROTO", "NCCL_TUNER_PLUGIN", "NCCL_DEBUG"}:
                raise ValueError(f"'{name}' is the sweep's own; use algorithms and protocols")
            if name == "NCCL_SYM_NOWIN_ENABLE" and value != "0":
                raise ValueError(f"'{name}' makes symmetric kernels run, and these ask no tuner")
        return env

    @model_validator(mode="after")
    def _default_is_untouched(self) -> Self:
        if self.name == DEFAULT_PROFILE and self.environment():
            raise ValueError(
                f"the profile '{DEFAULT_PROFILE}' is the user's untouched environment; give a "
                "profile with settings another name"
            )
        return self

    def environment(self) -> dict[str, str]:
        """The variables that the profile sets."""
        found = dict(TRANSPORT_SETTINGS[self.transport]) if self.transport else {}
        if self.threads is not None:
            found["NCCL_NTHREADS"] = str(self.threads)
        if self.buffer_bytes is not None:
            found["NCCL_BUFFSIZE"] = str(self.buffer_bytes)
        return found | self.env


class InterferenceSettings(Table):
    """What runs beside the collective; `level` is 0..1, for `congestion` any factor from 0 up."""

    kind: Annotated[str, one_of("interference", KINDS)] = QUIET
    level: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _level_fits(self) -> Self:
        if (self.kind == QUIET) != (self.level == 0):
            raise ValueError("kind 'none' has level 0, and every other kind a level above 0")
        if self.kind not in SIMULATED and self.level > 1:
            raise ValueError(f"the level of '{self.kind}' is a share from 0 to 1")
        return self


class OnlySettings(Table):
    """Tasks of the grid that are measured in place of all: under NCCL's default, and one config."""

    collective: str
    num_nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    sizes: tuple[_Size, ...] = Field(min_length=1)
    algorithm: str
    protocol: str
    #: 0 stands for AUTO, here and below.
    num_channels: int = Field(default=0, ge=0)
    chunk_size: Annotated[int, BeforeValidator(lambda v: v and parse_size(v))] = 0


class StrategySettings(Table):
    """Which trials are measured, and how often."""

    kind: Literal["exhaustive", "random", "adaptive"] = "exhaustive"
    #: Share of the grid that `random` measures in each cycle.
    share: float = Field(default=0.25, gt=0, le=1)
    #: Share of uniform exploration in every adaptive round (off-policy evaluation needs it).
    epsilon: float = Field(default=0.1, gt=0, le=1)
    #: Adaptive stops at a task when its winner is this sure ...
    confidence: float = Field(default=0.9, gt=0.5, lt=1)
    #: ... or when what is left to win is below this share of the time.
    tolerance: float = Field(default=0.01, gt=0, lt=1)
    max_rounds: int = Field(default=12, ge=1)
    seed: int = 0


class BudgetSettings(Table):
    """When to stop early; nothing given = when the sweep is done.

    Of the whole sweep, whatever the number of jobs that it takes. Shards run side by side: each has
    its share of the measurements, and all of the hours.
    """

    max_measurements: int | None = Field(default=None, ge=1)
    max_hours: float | None = Field(default=None, gt=0)

    @property
    def max_seconds(self) -> float:
        """The time limit in seconds; infinite without one."""
        return math.inf if self.max_hours is None else self.max_hours * 3600


class RunnerSettings(Table):
    """How nccl-tests is run."""

    #: One process for the whole grid (`sweep`), or one for each config (`processes`).
    mode: Literal["auto", "sweep", "processes"] = "auto"
    #: The tuner plugin that plays the schedule; default: where `make plugin` puts it.
    plugin: str | None = None
    #: NCCL may take a minute to start on 512 GPUs.
    startup_timeout_s: float = Field(default=300, gt=0)
    #: So long without a new row, and the config in play counts as hung.
    stall_timeout_s: float = Field(default=120, gt=0)
    #: LL and up to two channels are measured up to this size (benchmark/grid.py says why).
    slow_max: _Size = 64 << 20
    #: A launch that reached none of its configs is tried once more, so long afterwards.
    retry_after_s: float = Field(default=10, ge=0)
    #: A second, short pass in which NCCL's log says what really ran.
    read_back: bool = True
    #: Times of single iterations and processes (`-I`), where the benchmark has them. It writes all
    #: of ranks x iterations for each block: 385 MB for one launch of 512 ranks.
    per_iteration: bool = False
    #: Blocks played in one process at most; a longer schedule is cut by cycles.
    max_blocks: int = Field(default=20_000, ge=1)
    #: Further options of nccl-tests, e.g. ["-z", "3"]; those that the sweep sets are refused.
    arguments: tuple[str, ...] = ()

    @field_validator("arguments")
    @classmethod
    def _leaves_the_sweep_its_own(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for word, name, value in _options_in(arguments):
            if name in _SWEEPS_OWN:
                raise ValueError(f"'{word}' {_SWEEPS_OWN[name]}")
            refused, why = _REFUSED_VALUES.get(name, (None, ""))
            if refused is not None and refused.fullmatch(value):
                raise ValueError(f"'{word}' with {value} {why}")
        return arguments


class SweepLauncher(LauncherSettings):
    """The `[launcher]` table, with its kind checked."""

    kind: Annotated[str, one_of("launcher", LAUNCHERS)] = "local"


class TelemetrySettings(Table):
    """Whether samplers watch the health of the GPUs while trials run."""

    enabled: bool = True


class SimulatorSettings(Table):
    """Knobs of the embedded simulator; the noise is ours, not fitted (simulator/noise.py)."""

    #: A shipped system, or the TOML file of one (docs/simulator.md).
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
    algorithms: tuple[str, ...] = tuple(a.wire for a in Algorithm)
    protocols: tuple[str, ...] = tuple(p.wire for p in Protocol)
    #: 0 stands for AUTO.
    num_channels: tuple[int, ...] = (0,)
    #: 0 stands for AUTO; others need NCCL 2.30 and the sweep mode.
    chunk_sizes: tuple[Annotated[int, BeforeValidator(lambda v: v and parse_size(v))], ...] = (0,)
    datatypes: tuple[str, ...] = ("float",)
    profiles: tuple[ProfileSettings, ...] = (ProfileSettings(name=DEFAULT_PROFILE),)
    interference: tuple[InterferenceSettings, ...] = (InterferenceSettings(),)
    #: Nothing of the grid but this, where any is named: what a gate needs of it (`evaluate gate`).
    only: tuple[OnlySettings, ...] = ()
    nccl_version: str | None = None
    #: Repeats: every trial is measured once in a cycle.
    cycles: int = Field(default=5, ge=1)
    iterations: int = Field(default=20, ge=1)
    #: At least so many for messages up to `small_max`: 20 calls of 1 KiB are 0.3 ms of signal.
    small_iterations: int = Field(default=200, ge=1)
    small_max: _Size = 256 << 10
    warmup_iterations: int = Field(default=5, ge=1)
    strategy: StrategySettings = StrategySettings()
    budget: BudgetSettings = BudgetSettings()
    runner: RunnerSettings = RunnerSettings()
    launcher: SweepLauncher = SweepLauncher()
    telemetry: TelemetrySettings = TelemetrySettings()
    simulator: SimulatorSettings = SimulatorSettings()

    @field_validator("datatypes")
    @classmethod
    def _known_datatypes(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in DATATYPE_BYTES:
                raise ValueError(
                    f"unknown datatype '{name}'; choose from {', '.join(DATATYPE_BYTES)}"
                )
        return names


#: Models of the tables inside a sweep file, by key.
TABLES: Final[Mapping[str, type[BaseModel]]] = {
    "groups": GroupShape,
    "sizes": Sizes,
    "only": OnlySettings,
    "profiles": ProfileSettings,
    "interference": InterferenceSettings,
    "strategy": StrategySettings,
    "budget": BudgetSettings,
    "runner": RunnerSettings,
    "launcher": SweepLauncher,
    "container": ContainerSettings,
    "telemetry": TelemetrySettings,
    "simulator": SimulatorSettings,
}
