"""A sweep file, and the trials it declares. Pure: nothing here runs anything.

A sweep is TOML, checked by Pydantic: an unknown key, a wrong value or a name that NCCL does not
know ends in one line that names the key, the value and the choices. The grid is collectives x group
shapes x sizes x (NCCL's default + algorithms x protocols x channels); combinations that NCCL cannot
run are trials too, with the reason, so that nothing is a silent gap.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import DynamicclError, InvalidSweep, MissingPath
from dynamiccl.nccl import (
    ABSTAIN,
    Algorithm,
    Collective,
    Config,
    NcclVersion,
    Protocol,
    invalid_reason,
)
from dynamiccl.sizes import BINS_PER_OCTAVE, bin_center_bytes, size_bin

_SIZE: Final = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(value: object) -> int:
    """Read a byte count: an integer, or text with a binary K, M, G or T as nccl-tests takes it.

    >>> parse_size("64K"), parse_size(12)
    (65536, 12)
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(str(value).strip())
    if not match or int(match[1]) == 0:
        raise ValueError(f"'{value}' is no size; write 4096, '64K', '16M' or '1G'")
    return int(match[1]) * _UNITS[match[2].upper()]


_Size = Annotated[int, BeforeValidator(parse_size)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Sizes(_Table):
    """The ladder of message sizes: from `min` to `max`, so many steps for each factor of two."""

    min: _Size
    max: _Size
    steps_per_octave: Literal[1, 2, 4] = 1

    @model_validator(mode="after")
    def _holds_a_size(self) -> Self:
        if not self.ladder():
            raise ValueError(
                f"no size of the ladder lies from {self.min} to {self.max} bytes; give a min below "
                "the max, less than 2^62 bytes, with a power of two between them"
            )
        return self

    def ladder(self) -> tuple[int, ...]:
        """Sizes in bytes, ascending, each the centre of a size bin rounded to 16 bytes."""
        stride = BINS_PER_OCTAVE // self.steps_per_octave
        bins = range(size_bin(self.min), size_bin(self.max) + 1)
        centres = [bin_center_bytes(index) for index in bins if index % stride == 0]
        return tuple(sorted({max(16, size // 16 * 16) for size in centres}))


class GroupShape(_Table):
    """Nodes and ranks per node of a communicator."""

    num_nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)


class SimulatorSettings(_Table):
    """Knobs of the embedded simulator; the noise is ours, not fitted (simulator/noise.py)."""

    seed: int = 0
    noise_sigma: float = Field(default=0.015, ge=0, le=1)
    tail_probability: float = Field(default=0.02, ge=0, le=1)
    drift_sigma: float = Field(default=0.005, ge=0, le=1)
    congestion_levels: tuple[float, ...] = (0.0,)

    @field_validator("congestion_levels")
    @classmethod
    def _not_negative(cls, levels: tuple[float, ...]) -> tuple[float, ...]:
        if not levels or min(levels) < 0:
            raise ValueError("give at least one level, 0.0 (quiet) or more")
        return levels


class SweepFile(_Table):
    """What a sweep file holds."""

    name: str
    system: str
    collectives: tuple[str, ...] = Field(min_length=1)
    groups: tuple[GroupShape, ...] = Field(min_length=1)
    sizes: Sizes
    algorithms: tuple[str, ...] = tuple(a.wire for a in Algorithm)
    protocols: tuple[str, ...] = tuple(p.wire for p in Protocol)
    #: 0 stands for AUTO.
    num_channels: tuple[int, ...] = (0,)
    datatype: str = "float"
    launch_profile: str = DEFAULT_PROFILE
    nccl_version: str | None = None
    cycles: int = Field(default=5, ge=1)
    iterations: int = Field(default=20, ge=1)
    warmup_iterations: int = Field(default=5, ge=1)
    simulator: SimulatorSettings = SimulatorSettings()


#: Models of the tables inside a sweep file, by key.
_TABLES: Final[Mapping[str, type[_Table]]] = {
    "groups": GroupShape,
    "sizes": Sizes,
    "simulator": SimulatorSettings,
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One point of the grid: a workload and the config that is requested for it."""

    collective: Collective
    num_nodes: int
    ranks_per_node: int
    size_bytes: int
    config: Config
    congestion: float = 0.0
    #: Why NCCL cannot run it; None when it can.
    infeasible: str | None = None

    @property
    def key(self) -> str:
        """Stable, readable id within a sweep."""
        shape = f"{self.num_nodes}x{self.ranks_per_node}"
        load = f"+{self.congestion:g}" if self.congestion else ""
        return f"{self.collective.wire}:{shape}:{self.size_bytes}{load}:{self.config.key}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked sweep: its settings and its trials, in declaration order."""

    file: SweepFile
    text: str
    trials: tuple[Trial, ...]


def load_sweep(path: Path) -> Sweep:
    """Read and check a sweep file. Raises MissingPath and InvalidSweep."""
    if not path.is_file():
        raise MissingPath("sweep file", path, "examples/ holds some to start from")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidSweep(f"{path.name} is not TOML: {error}") from error
    return parse_sweep(text, where=path.name)


def parse_sweep(text: str, *, where: str) -> Sweep:
    """Check the text of a sweep file and lay out its trials. Raises InvalidSweep."""
    try:
        file = SweepFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InvalidSweep(f"{where} is not TOML: {error}") from error
    except ValidationError as error:
        raise InvalidSweep(_explain(error, where)) from error
    try:
        check_slug(file.name, "sweep")
        check_slug(file.system, "system")
        trials = _trials(file, where)
    except InvalidSweep:
        raise
    except DynamicclError as error:
        raise InvalidSweep(str(error)) from error
    return Sweep(file, text, trials)


def _explain(error: ValidationError, where: str) -> str:
    errors = error.errors()
    # A misspelt key is why its right spelling is missing: say the cause.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    key = ".".join(str(part) for part in first["loc"]) or "the file"
    message = f"{where}: {key}: {first['msg']}"
    if first["type"] == "extra_forbidden":
        table = _TABLES[str(first["loc"][0])] if len(first["loc"]) > 1 else SweepFile
        return f"{message}; known keys are {', '.join(table.model_fields)}"
    if first["type"] == "missing":
        return f"{message}; add it"
    return f"{message} (got {first['input']!r})"


def _trials(file: SweepFile, where: str) -> tuple[Trial, ...]:
    collectives = [Collective.parse(c, where=f"{where}: collectives") for c in file.collectives]
    configs = _configs(file, where)
    version = NcclVersion.parse(file.nccl_version) if file.nccl_version else None
    trials = tuple(
        Trial(
            collective,
            group.num_nodes,
            group.ranks_per_node,
            size,
            config,
            congestion,
            invalid_reason(config, collective, version=version, num_nodes=group.num_nodes),
        )
        for collective in collectives
        for group in file.groups
        for congestion in file.simulator.congestion_levels
        for size in file.sizes.ladder()
        for config in configs
    )
    seen: set[str] = set()
    for trial in trials:
        if trial.key in seen:
            raise InvalidSweep(
                f"{where}: trial {trial.key} is declared twice; name every collective, group, "
                "algorithm, protocol, channel count and congestion level once"
            )
        seen.add(trial.key)
    return trials


def _configs(file: SweepFile, where: str) -> list[Config]:
    algorithms = [Algorithm.parse(a, where=f"{where}: algorithms") for a in file.algorithms]
    protocols = [Protocol.parse(p, where=f"{where}: protocols") for p in file.protocols]
    channels = [count or None for count in file.num_channels]
    forced = [Config(a, p, n) for a in algorithms for p in protocols for n in channels]
    return [ABSTAIN, *forced]
