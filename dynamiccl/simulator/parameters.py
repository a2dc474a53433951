"""The system file: every parameter of the time model with its origin; read, checked and written.

A number is a table `{ value = 8.3, origin = "fitted" }`, and `note` says more where that is needed:

    fitted      by `dynamiccl-collect fit-simulator` to measurements of this system
    published   a figure of the vendor or of whoever measured it, named in `note`
    prior       taken from literature or another system, measured by nobody here

A fit changes what is `fitted` and nothing else, so a file is also the description that a fit starts
from. Errors name file, key and value.
"""

import tomllib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import DynamicclError, MissingPath, UserError
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.simulator.toml_table import Table, first_problem, toml_value


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


def _nothing() -> Parameter:
    return Parameter(value=0.0, origin=Origin.PRIOR)


def _one() -> Parameter:
    return Parameter(value=1.0, origin=Origin.PRIOR)


def _bytes() -> Parameter:
    return Parameter(value=8192.0, origin=Origin.PRIOR)


def _channels() -> Parameter:
    return Parameter(value=32.0, origin=Origin.PRIOR)


_Algorithm = Annotated[Algorithm, BeforeValidator(Algorithm.parse)]
_Protocol = Annotated[Protocol, BeforeValidator(Protocol.parse)]
_Collective = Annotated[Collective, BeforeValidator(Collective.parse)]


class CellParameters(Table):
    """Parameters of one (algorithm, protocol); physics.py has the formulas."""

    algorithm: _Algorithm
    protocol: _Protocol
    #: Which collectives it is for; none = all that no other table of this cell names.
    collectives: tuple[_Collective, ...] = ()
    base_us: Parameter
    hop_us: Parameter = Field(default_factory=_nothing)
    net_hop_us: Parameter = Field(default_factory=_nothing)
    slice_us: Parameter = Field(default_factory=_nothing)
    turn_us: Parameter = Field(default_factory=_nothing)
    proxy_us: Parameter = Field(default_factory=_nothing)
    channel_gbytes_per_s: Parameter
    link_share: Parameter = Field(default_factory=_one)
    overlap: Parameter = Field(default_factory=_one)
    crowd_penalty: Parameter = Field(default_factory=_nothing)
    crowd_channels: Parameter = Field(default_factory=_channels)
    small_penalty: Parameter = Field(default_factory=_nothing)
    small_bytes: Parameter = Field(default_factory=_bytes)
    host_share: Parameter = Field(default_factory=_nothing)

    @property
    def key(self) -> str:
        """A readable name: `Ring/LL`, or `Ring/LL/Broadcast,Reduce`."""
        parts = [self.algorithm.wire, self.protocol.wire]
        if self.collectives:
            parts.append(",".join(collective.wire for collective in self.collectives))
        return "/".join(parts)


class LinkParameters(Table):
    """Bandwidth limits: links of one GPU inside a node, and all NICs of a node."""

    inside_gbytes_per_s: Parameter = Field(default_factory=_one)
    between_gbytes_per_s: Parameter = Field(default_factory=_one)


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


#: Numbers of a cell, in the order of the file.
CELL_NUMBERS: Final = tuple(
    name for name, field in CellParameters.model_fields.items() if field.annotation is Parameter
)
LINK_NUMBERS: Final = tuple(LinkParameters.model_fields)
_TABLES = ("environment", "nccl", "links", "threads", "chunks", "compute", "fit")


def load_system_file(path: Path) -> SystemFile:
    """Read and check a system file. Raises MissingPath and UserError."""
    if not path.is_file():
        raise MissingPath("system file", path, "write one with 'dynamiccl-collect fit-simulator'")
    return parse_system(path.read_text(encoding="utf-8"), where=str(path))


def parse_system(text: str, *, where: str) -> SystemFile:
    """Check the text of a system file. Raises UserError with key, value and what is wrong."""
    try:
        file = SystemFile.model_validate(tomllib.loads(text))
        check_slug(file.name, "system")
        NcclVersion.parse(file.nccl_version)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is not TOML: {error}; correct that line") from error
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error)}") from error
    except DynamicclError as error:
        raise UserError(f"{where}: {error}") from error
    twice = _named_twice(file)
    if twice:
        raise UserError(f"{where}: cell {twice} stands there twice; write it once")
    return file


def _named_twice(file: SystemFile) -> str | None:
    seen: set[tuple[Algorithm, Protocol, Collective | None]] = set()
    for cell in file.cells:
        for collective in cell.collectives or (None,):
            key = (cell.algorithm, cell.protocol, collective)
            if key in seen:
                return cell.key
            seen.add(key)
    return None


def system_text(file: SystemFile, *, head: str = "") -> str:
    """The file as TOML; `head` is a comment on top. Loading it gives an equal file."""
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    lines += [""] if head else []
    lines += [f"{key} = {_value(value)}" for key, value in _plain(file)]
    for name in _TABLES:
        lines += _table(name, getattr(file, name))
    for transport, held in file.transports.items():
        lines += _table(f"transports.{transport}", held)
    for cell in file.cells:
        lines += ["", "[[cells]]", *_entries(cell)]
    return "\n".join(lines) + "\n"


def _plain(file: SystemFile) -> Iterator[tuple[str, Any]]:
    for key in SystemFile.model_fields:
        if key not in {*_TABLES, "transports", "cells"}:
            yield key, getattr(file, key)


def _table(name: str, table: Any) -> list[str]:
    entries = list(_entries(table))
    return ["", f"[{name}]", *entries] if entries else []


def _entries(table: Any) -> Iterator[str]:
    if isinstance(table, BaseModel):
        given = table.model_dump(exclude_defaults=True)
        pairs = {key: getattr(table, key) for key in given}
        # A parameter equal to the default is written too: its origin may differ.
        pairs |= {
            key: value
            for key in table.model_fields_set
            if isinstance(value := getattr(table, key), Parameter)
        }
        pairs = {key: pairs[key] for key in type(table).model_fields if key in pairs}
    else:
        pairs = dict(table)
    for key, value in pairs.items():
        yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    return toml_value(_data(value), number=_number)


def _data(value: Any) -> Any:
    """A value of the file as plain data."""
    if isinstance(value, Parameter):
        note = {"note": value.note} if value.note else {}
        return {"value": value.value, "origin": value.origin.value, **note}
    if isinstance(value, BaseModel):
        pairs = {key: getattr(value, key) for key in type(value).model_fields}
        return {key: _data(one) for key, one in pairs.items() if one is not None}
    if isinstance(value, Mapping):
        return {key: _data(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_data(one) for one in value]
    # NCCL's names are numbers to Python.
    return getattr(value, "wire", value)


def _number(value: float) -> str:
    """Five digits are more than any fit is worth."""
    return repr(float(f"{value:.5g}"))
