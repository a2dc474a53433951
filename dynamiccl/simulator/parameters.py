"""The system file: every parameter of the time model with its origin; read, checked and written.

A number is a table `{ value = 8.3, origin = "fitted" }`, and `note` says more where that is needed:

    fitted      by `dynamiccl-collect fit-simulator` to measurements of this system
    published   a figure of the vendor or of whoever measured it, named in `note`
    prior       taken from literature or another system, measured by nobody here

A fit changes what is `fitted` and nothing else, so a file is also the description that a fit starts
from. Errors name file, key and value.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.toml_table import Table, parse_toml, toml_value


class Origin(StrEnum):
    """Where a parameter comes from."""

    FITTED = "fitted"
    PUBLISHED = "published"
    PRIOR = "prior"


class Parameter(Table):
    """One number and its origin; the unit is in the key's name."""

    value: float = Field(ge=0.0)
    origin: Origin
    note: str = ""


def _prior(value: float) -> Parameter:
    return Parameter(value=value, origin=Origin.PRIOR)


_AS_NCCL_WRITES: Final = PlainSerializer(lambda name: name.wire)
_Algorithm = Annotated[Algorithm, BeforeValidator(Algorithm.parse), _AS_NCCL_WRITES]
_Protocol = Annotated[Protocol, BeforeValidator(Protocol.parse), _AS_NCCL_WRITES]
_Collective = Annotated[Collective, BeforeValidator(Collective.parse), _AS_NCCL_WRITES]


class CellParameters(Table):
    """Parameters of one (algorithm, protocol); physics.py has the formulas."""

    algorithm: _Algorithm
    protocol: _Protocol
    #: Which collectives it is for; none = all that no other table of this cell names.
    collectives: tuple[_Collective, ...] = ()
    base_us: Parameter
    hop_us: Parameter = _prior(0.0)
    net_hop_us: Parameter = _prior(0.0)
    slice_us: Parameter = _prior(0.0)
    turn_us: Parameter = _prior(0.0)
    proxy_us: Parameter = _prior(0.0)
    channel_gbytes_per_s: Parameter
    link_share: Parameter = _prior(1.0)
    overlap: Parameter = _prior(1.0)
    crowd_penalty: Parameter = _prior(0.0)
    crowd_channels: Parameter = _prior(32.0)
    small_penalty: Parameter = _prior(0.0)
    small_bytes: Parameter = _prior(8192.0)
    host_share: Parameter = _prior(0.0)

    @property
    def key(self) -> str:
        """A readable name: `Ring/LL`, or `Ring/LL/Broadcast,Reduce`."""
        parts = [self.algorithm.wire, self.protocol.wire]
        if self.collectives:
            parts.append(",".join(collective.wire for collective in self.collectives))
        return "/".join(parts)


class LinkParameters(Table):
    """Bandwidth limits: links of one GPU inside a node, and all NICs of a node."""

    inside_gbytes_per_s: Parameter = _prior(1.0)
    between_gbytes_per_s: Parameter = _prior(1.0)


class ThreadParameters(Table):
    """AutoCCL's NT: bandwidth of a channel by its threads, 1 at NCCL's own number."""

    #: NCCL's own, and where the bandwidth peaks.
    default: int = Field(default=512, ge=32, le=640)
    best: Parameter
    #: Threads, as a share of the best, at which half of the rise is done.
    half: Parameter
    #: Loss for each further share of the best.
    crowding: Parameter


class ChunkParameters(Table):
    """AutoCCL's C: a parabola in the logarithm, 1 at NCCL's own chunk; Simple only."""

    curvature: Parameter
    largest: Parameter
    #: Pieces that a rank's share of the call wants to be cut into.
    pieces: Parameter


class TransportParameters(Table):
    """AutoCCL's T, inside a node: bandwidth limit of a transport, and its hop latency."""

    gbytes_per_s: Parameter
    hop_factor: Parameter


class ComputeParameters(Table):
    """Mutual slowdown of compute and collectives on one GPU (system.py)."""

    #: Share of the memory's bandwidth that a matrix product takes when it runs alone.
    memory_share: Parameter
    #: The GPU's memory, GB/s.
    memory_gbytes_per_s: Parameter
    #: How much longer a call takes while compute fills the GPU.
    call_slowdown: Parameter
    #: How long a call's blocks hold their SMs before it runs, beside compute.
    held_us: Parameter


class GroupParameters(Table):
    """A shape of communicators."""

    num_nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)


class NcclParameters(Table):
    """Inputs of NCCL's own cost model."""

    #: A description in `default/machines`, or the path of one.
    machine: str
    #: `NCCL_MIN_CTAS` and `NCCL_MAX_CTAS` of the job.
    min_channels: int | None = Field(default=None, ge=1)
    max_channels: int | None = Field(default=None, ge=1)
    note: str = ""


class Rescale(Table):
    """Runs of the data whose sizes are not in bytes."""

    runs: tuple[str, ...]
    factor: int = Field(ge=2)
    why: str


class FitProfile(Table):
    """A launch profile of the data that changes the number of opened channels."""

    #: NCCL_MAX_NCHANNELS.
    max_channels: int | None = Field(default=None, ge=1)


class FitParameters(Table):
    """How measurements become cells of this system's fit."""

    #: `system` in the data; more than one are taken together.
    systems: tuple[str, ...] = ()
    #: Launch profiles that are this system as described.
    profiles: dict[str, FitProfile] = Field(default_factory=lambda: {"default": FitProfile()})
    exclude_runs: tuple[str, ...] = ()
    #: Runs of which only NCCL's own choice is taken.
    exclude_forced_of: tuple[str, ...] = ()
    #: Sizes below are not looked at, by collective (0 = all).
    min_bytes: int = Field(default=1024, ge=0)
    min_bytes_of: dict[str, int] = Field(default_factory=dict)
    rescale: tuple[Rescale, ...] = ()
    #: Why runs are left out.
    why: str = ""


class SystemFile(Table):
    """One simulated system."""

    name: str
    about: str
    #: `fitted` systems show held-out errors; `assembled` ones have none to show.
    kind: Literal["fitted", "assembled"]
    nccl_version: str
    num_sms: int = Field(ge=1)
    #: NCCL_BUFFSIZE that it was measured with.
    buffer_bytes: int = Field(default=4 << 20, ge=1 << 16)
    collectives: tuple[_Collective, ...]
    groups: tuple[GroupParameters, ...] = Field(min_length=1)
    #: Facts of the machines, as measurement columns.
    environment: dict[str, Any]
    nccl: NcclParameters
    links: LinkParameters
    threads: ThreadParameters
    chunks: ChunkParameters
    #: What NCCL takes inside a node by itself, which `links` is about, and the others.
    default_transport: Literal["P2P", "SHM", "NET"] = "P2P"
    transports: dict[Literal["P2P", "SHM", "NET"], TransportParameters] = Field(
        default_factory=dict
    )
    compute: ComputeParameters
    cells: tuple[CellParameters, ...] = Field(min_length=1)
    fit: FitParameters = FitParameters()

    @property
    def version(self) -> NcclVersion:
        """The NCCL release."""
        return NcclVersion.parse(self.nccl_version)

    @model_validator(mode="after")
    def _has_names_and_each_cell_once(self) -> Self:
        check_slug(self.name, "system")
        NcclVersion.parse(self.nccl_version)
        seen: set[tuple[Algorithm, Protocol, Collective | None]] = set()
        for cell in self.cells:
            keys = {(cell.algorithm, cell.protocol, each) for each in cell.collectives or (None,)}
            if keys & seen:
                raise UserError(f"cell {cell.key} stands there twice; write it once")
            seen |= keys
        return self


#: Numbers of a cell, in the order of the file.
CELL_NUMBERS: Final = tuple(
    name for name, field in CellParameters.model_fields.items() if field.annotation is Parameter
)
LINK_NUMBERS: Final = tuple(LinkParameters.model_fields)


def load_system_file(path: Path) -> SystemFile:
    """Read and check a system file. Raises MissingPath and UserError."""
    if not path.is_file():
        raise MissingPath("system file", path, "write one with 'dynamiccl-collect fit-simulator'")
    return parse_system(path.read_text(encoding="utf-8"), where=str(path))


def parse_system(text: str, *, where: str) -> SystemFile:
    """Check the text of a system file. Raises UserError with key, value and what is wrong."""
    return parse_toml(SystemFile, text, where=where)


def system_text(file: SystemFile, *, head: str = "") -> str:
    """The file as TOML; `head` is a comment on top. Loading it gives an equal file."""
    told = file.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    cells, transports = told.pop("cells"), told.pop("transports", {})
    tables = {key: told.pop(key) for key in [*told] if isinstance(told[key], dict)}
    tables |= {f"transports.{key}": table for key, table in transports.items()}
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    lines += [""] if head else []
    lines += _entries(told)
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_entries(table)] if table else []
    for cell in cells:
        lines += ["", "[[cells]]", *_entries(cell)]
    return "\n".join(lines) + "\n"


def _entries(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {toml_value(value, number=_number)}" for key, value in table.items()]


def _number(value: float) -> str:
    """Five digits are more than any fit is worth."""
    return repr(float(f"{value:.5g}"))
