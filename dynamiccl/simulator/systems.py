"""Simulated systems: the file that describes one, NCCL's decisions on it, and its physics.

Every number of a file is a table `{ value = 8.3, origin = "fitted" }`; `note` says more:

    fitted      by `dynamiccl-collect fit-simulator` to measurements of this system
    published   a figure of the vendor or of whoever measured it, named in `note`
    prior       taken from literature or another system, measured by nobody here

A fit starts from a file and changes only what is `fitted`. Errors name file, key and value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import MissingPath, UnknownName, UserError
from dynamiccl.files import toml_names
from dynamiccl.nccl import Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator import physics
from dynamiccl.simulator.cost_model import CostModel, Ran
from dynamiccl.simulator.h100 import H100System
from dynamiccl.simulator.machine import find_machine
from dynamiccl.simulator.system import (
    UNTOUCHED,
    Call,
    Cell,
    Contention,
    CostLine,
    Group,
    Launch,
    Parts,
)
from dynamiccl.simulator.toml_table import Table, parse_toml, toml_value

_SUFFIX: Final = ".toml"
_SHIPPED: Final = resources.files("dynamiccl.simulator") / "systems"
PARAMETRIC: Final = tuple(toml_names(_SHIPPED))
SYSTEMS: Final = (H100System.name, *PARAMETRIC)
#: Of `NCCL_NTHREADS`.
MIN_THREADS, MAX_THREADS, WARP = 64, 512, 32


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
    """Parameters of one (algorithm, protocol), for the formulas of physics.py."""

    algorithm: _Algorithm
    protocol: _Protocol
    #: None = all that no other table of this cell names.
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
        """`Ring/LL`, or `Ring/LL/Broadcast,Reduce`."""
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

    #: NCCL's own; bandwidth peaks at `best`.
    default: int = Field(default=512, ge=32, le=640)
    best: Parameter
    #: Share of the best at half of the rise.
    half: Parameter
    crowding: Parameter


class ChunkParameters(Table):
    """AutoCCL's C: a parabola in the logarithm, 1 at NCCL's own chunk; Simple only."""

    curvature: Parameter
    largest: Parameter
    pieces: Parameter


class TransportParameters(Table):
    """AutoCCL's T, inside a node: a transport's bandwidth limit, and its hop latency."""

    gbytes_per_s: Parameter
    hop_factor: Parameter


class ComputeParameters(Table):
    """Mutual slowdown of compute and collectives on one GPU (system.py)."""

    #: Of the memory's bandwidth, taken by a matrix product alone.
    memory_share: Parameter
    memory_gbytes_per_s: Parameter
    call_slowdown: Parameter
    held_us: Parameter


class GroupParameters(Table):
    """A shape of communicators."""

    num_nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)


class NcclParameters(Table):
    """Inputs of NCCL's own cost model."""

    #: A built-in machine, or the path of one.
    machine: str
    #: `NCCL_MIN_CTAS` and `NCCL_MAX_CTAS`.
    min_channels: int | None = Field(default=None, ge=1)
    max_channels: int | None = Field(default=None, ge=1)
    note: str = ""


class Rescale(Table):
    """Runs of the data whose sizes are not in bytes."""

    runs: tuple[str, ...]
    factor: int = Field(ge=2)
    why: str


class FitProfile(Table):
    """A launch profile that changes the number of opened channels."""

    max_channels: int | None = Field(default=None, ge=1)


class FitParameters(Table):
    """How measurements become cells of this system's fit."""

    systems: tuple[str, ...] = ()
    #: That are this system as described.
    profiles: dict[str, FitProfile] = Field(default_factory=lambda: {"default": FitProfile()})
    exclude_runs: tuple[str, ...] = ()
    #: Of these runs only NCCL's own choice is taken.
    exclude_forced_of: tuple[str, ...] = ()
    #: The least to look at, also by collective (0 = all).
    min_bytes: int = Field(default=1024, ge=0)
    min_bytes_of: dict[str, int] = Field(default_factory=dict)
    rescale: tuple[Rescale, ...] = ()
    why: str = ""


class SystemFile(Table):
    """One simulated system."""

    name: str
    about: str
    #: Only `fitted` systems have held-out errors.
    kind: Literal["fitted", "assembled"]
    nccl_version: str
    num_sms: int = Field(ge=1)
    #: NCCL_BUFFSIZE that it was measured with.
    buffer_bytes: int = Field(default=4 << 20, ge=1 << 16)
    collectives: tuple[_Collective, ...]
    groups: tuple[GroupParameters, ...] = Field(min_length=1)
    environment: dict[str, Any]
    nccl: NcclParameters
    links: LinkParameters
    threads: ThreadParameters
    chunks: ChunkParameters
    #: NCCL's own inside a node, which `links` is about, and the others.
    default_transport: Literal["P2P", "SHM", "NET"] = "P2P"
    transports: dict[Literal["P2P", "SHM", "NET"], TransportParameters] = Field(
        default_factory=dict
    )
    compute: ComputeParameters
    cells: tuple[CellParameters, ...] = Field(min_length=1)
    fit: FitParameters = FitParameters()

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


CELL_NUMBERS: Final = tuple(
    name for name, field in CellParameters.model_fields.items() if field.annotation is Parameter
)
LINK_NUMBERS: Final = tuple(LinkParameters.model_fields)


def system_text(file: SystemFile, *, head: str = "") -> str:
    """The file as TOML, below a comment `head`; loading it gives an equal file."""
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
    # No fit is worth more digits.
    return [f"{key} = {toml_value(told, number='{:.5g}'.format)}" for key, told in table.items()]


class ParametricSystem(CostModel):
    """NCCL's decisions, among the cells that a file has physics for. Raises UnknownName."""

    def __init__(self, file: SystemFile) -> None:
        machine = find_machine(file.nccl.machine)
        opens = file.nccl.min_channels, file.nccl.max_channels
        super().__init__(NcclVersion.parse(file.nccl_version), machine, *opens)
        self.file = file
        self.name = file.name
        self.num_sms = file.num_sms
        # A cell that names its collectives wins over one that does not.
        self._parameters = {
            (collective, cell.algorithm, cell.protocol): cell
            for cell in sorted(file.cells, key=lambda cell: bool(cell.collectives))
            for collective in cell.collectives or file.collectives
        }
        self._values = {cell.key: physics.CellValues(**_numbers(cell)) for cell in file.cells}
        self._chunks = physics.ChunkValues(**_numbers(file.chunks))
        self._links = physics.LinkValues(**_numbers(file.links))
        self.contention = Contention(file.num_sms, **_numbers(file.compute))
        self.environment: Mapping[str, Any] = {
            **file.environment,
            "nccl_version": file.nccl_version,
            "system_description": f"simulated: {file.about}",
        }

    def groups(self) -> Sequence[Group]:
        """Shapes that the file names."""
        shapes = sorted((shape.num_nodes, shape.ranks_per_node) for shape in self.file.groups)
        return [Group(*shape) for shape in shapes]

    def collectives(self) -> Sequence[Collective]:
        """Collectives that the file names."""
        return sorted(self.file.collectives)

    def lines(self, group: Group) -> Mapping[Cell, CostLine]:
        """Lines of the cells that the file has physics for."""
        found = super().lines(group)
        return {cell: line for cell, line in found.items() if cell in self._parameters}

    def ran_measured(self, call: Call, config: Config, opened: int | None) -> Ran:
        """What ran in a measurement; its launch opened at most `opened` channels.

        A request for more means that their number was raised (None: NCCL's own). A protocol that
        NCCL lacks but `NCCL_PROTO` forced runs on a ring. Raises KeyError.
        """
        algorithm, protocol = config.algorithm or Algorithm.Ring, config.protocol
        described = {cell[1:] for cell in self._parameters if cell[0] is call.collective}
        forced = described - {*self.cells(call.group, call.collective)}
        if protocol is None or (algorithm, protocol) not in forced:
            algorithm, protocol, _ = self.ran(call, config)
        decisions: CostModel = self
        if opened is not None:
            decisions = decisions.reopened(most=opened)
        asked = config.num_channels
        if asked is not None and asked > decisions.max_channels(call.group, algorithm):
            decisions = decisions.reopened(least=asked)
        return algorithm, protocol, decisions.num_channels(call, algorithm, protocol, asked)

    def parameters(
        self, collective: Collective, algorithm: Algorithm, protocol: Protocol
    ) -> CellParameters:
        """The physics of a cell; KeyError for one that the file lacks."""
        return self._parameters[collective, algorithm, protocol]

    def work(
        self, call: Call, ran: Ran, asked_bytes: int | None, launch: Launch = UNTOUCHED
    ) -> physics.Work:
        """What runs as inputs of the formulas; the chunk is what was asked for."""
        algorithm, protocol, channels = ran
        way = physics.route(call.group, call.collective, algorithm)
        buffer_bytes = self.file.buffer_bytes
        default = physics.largest_chunk_bytes(call.collective, algorithm, protocol, buffer_bytes)
        used = physics.asked_chunk_bytes(default, asked_bytes)
        if algorithm in physics.NVLS_KINDS:
            default = physics.nvls_chunk_bytes(call.size_bytes, channels, way.width)
            used = default if asked_bytes is None else used
        simple = protocol is Protocol.Simple
        # NCCL_NTHREADS is for LL and Simple on rings; everything else runs 640.
        threaded = algorithm is Algorithm.Ring and protocol is not Protocol.LL128
        rank_bytes = call.size_bytes / call.group.num_ranks
        slower = physics.chunk_factor(self._chunks, rank_bytes, default, used)
        return physics.Work(
            route=way,
            protocol=protocol,
            size_bytes=call.size_bytes,
            num_channels=channels,
            chunk_bytes=used,
            thread_factor=thread_factor(self.file.threads, launch.num_threads) if threaded else 1.0,
            chunk_factor=slower if simple else 1.0,
        )

    def parts(self, call: Call, config: Config, launch: Launch = UNTOUCHED) -> Parts:
        """The formulas of physics.py on what runs."""
        ran = self.ran(call, config)
        work = self.work(call, ran, config.chunk_bytes, launch)
        values = self._values[self.parameters(call.collective, *ran[:2]).key]
        found = physics.times(work, values, self.links_of(launch))
        return Parts(*ran, *found, host_share=values.host_share)

    def links_of(self, launch: Launch) -> physics.LinkValues:
        """The links of a transport. Raises UserError for one without figures."""
        default = self.file.default_transport
        alone = all(group.ranks_per_node == 1 for group in self.file.groups)
        # Between nodes NCCL has only the network.
        if alone or launch.transport is None or launch.transport.value == default:
            return self._links
        held = self.file.transports.get(launch.transport.value)
        if held is None:
            known = ", ".join([default, *self.file.transports])
            raise UserError(
                f"system '{self.name}' has no transport {launch.transport.value}; it has {known}"
            )
        return replace(
            self._links,
            inside_gbytes_per_s=held.gbytes_per_s.value,
            hop_factor=held.hop_factor.value,
        )


def _numbers(table: Table) -> dict[str, float]:
    return {name: held.value for name, held in iter(table) if isinstance(held, Parameter)}


System = H100System | ParametricSystem


def thread_factor(threads: ThreadParameters, num_threads: int | None) -> float:
    """Bandwidth of a channel with `num_threads` over that with NCCL's own; numbers are priors."""
    if num_threads is None:
        return 1.0
    asked = min(max(num_threads // WARP * WARP, MIN_THREADS), MAX_THREADS)
    best, half, crowding = (each.value for each in (threads.best, threads.half, threads.crowding))
    own = physics.saturating(threads.default / best, half, crowding)
    return physics.saturating(asked / best, half, crowding) / own


def system_file(name: str) -> SystemFile:
    """A parametric system by name or path. Raises UnknownName, MissingPath and UserError."""
    path = Path(name)
    if path.suffix != _SUFFIX:
        if name not in PARAMETRIC:
            raise UnknownName("parametric system", name, PARAMETRIC)
        text = (_SHIPPED / f"{name}{_SUFFIX}").read_bytes()
        return parse_toml(SystemFile, text, where=f"{name}{_SUFFIX}")
    if not path.is_file():
        raise MissingPath("system file", path, "write one with 'dynamiccl-collect fit-simulator'")
    return parse_toml(SystemFile, path.read_bytes(), where=name)


def find_system(name: str) -> System:
    """A system by name, or by the path of a TOML file; raises as `system_file`."""
    if name == H100System.name:
        return H100System()
    if name not in PARAMETRIC and not name.endswith(_SUFFIX):
        raise UnknownName("simulated system", name, SYSTEMS)
    return ParametricSystem(system_file(name))
