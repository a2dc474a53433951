"""The simulated systems by name, and those that a file of `fit-simulator` describes.

A parametric system is NCCL's own decisions, and the physics of a system file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

from dynamiccl.errors import UnknownName, UserError
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.simulator.default import CostModel, Overrides, find_machine, read_machine
from dynamiccl.simulator.group import Cell as NcclCell
from dynamiccl.simulator.group import CostLine, Group
from dynamiccl.simulator.h100 import H100System
from dynamiccl.simulator.parameters import (
    CELL_NUMBERS,
    LINK_NUMBERS,
    CellParameters,
    SystemFile,
    ThreadParameters,
    load_system_file,
    parse_system,
)
from dynamiccl.simulator.physics import (
    NVLS_KINDS,
    CellValues,
    ChunkValues,
    LinkValues,
    Work,
    asked_chunk_bytes,
    chunk_factor,
    largest_chunk_bytes,
    nvls_chunk_bytes,
    route,
    saturating,
    times,
)
from dynamiccl.simulator.system import UNTOUCHED, Call, Contention, Launch, Parts

Cell = tuple[Algorithm, Protocol]
_SUFFIX: Final = ".toml"
_SHIPPED: Final = resources.files("dynamiccl.simulator") / "systems"
#: Systems that a shipped TOML file describes.
PARAMETRIC: Final = tuple(
    sorted(p.name.removesuffix(_SUFFIX) for p in _SHIPPED.iterdir() if p.name.endswith(_SUFFIX))
)
#: All that ship.
SYSTEMS: Final = (H100System.name, *PARAMETRIC)
#: Threads that `NCCL_NTHREADS` may ask for, in steps of a warp.
MIN_THREADS, MAX_THREADS, WARP = 64, 512, 32


class ParametricSystem(CostModel):
    """A system described by a file: NCCL's decisions, among the cells that it has physics for."""

    def __init__(self, file: SystemFile) -> None:
        """Take a checked file. Raises UnknownName for its machine or release of NCCL."""
        name = file.nccl.machine
        machine = read_machine(Path(name)) if _is_path(name) else find_machine(name)
        made = Overrides(file.nccl.min_channels, file.nccl.max_channels)
        super().__init__(file.version, machine, made)
        self.file = file
        self.name = file.name
        self.num_sms = file.num_sms
        self._parameters = _by_collective(file)
        self._values = {
            cell.key: CellValues(**{name: getattr(cell, name).value for name in CELL_NUMBERS})
            for cell in file.cells
        }
        self._chunks = ChunkValues(**{k: p.value for k, p in iter(file.chunks)})
        self._links = LinkValues(**{name: getattr(file.links, name).value for name in LINK_NUMBERS})
        self.contention = Contention(
            file.num_sms, **{name: number.value for name, number in iter(file.compute)}
        )
        #: Environment columns of the machines.
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

    def lines(self, group: Group) -> Mapping[NcclCell, CostLine]:
        """NCCL's latencies and bandwidths, of the cells that the file has physics for."""
        found = super().lines(group)
        return {cell: line for cell, line in found.items() if cell in self._parameters}

    def resolve_measured(self, call: Call, config: Config, opened: int | None) -> Config:
        """The config that ran in a measurement, whose launch may have opened other channel counts.

        `opened` is the largest number that it allowed, None for NCCL's own; a request for more
        channels than NCCL opens means that the number was raised. A protocol that NCCL lacks here
        but was forced by `NCCL_PROTO` runs on a ring. Raises KeyError like `resolve`.
        """
        algorithm, protocol = config.algorithm or Algorithm.Ring, config.protocol
        forced = (
            protocol is not None
            and (call.collective, algorithm, protocol) in self._parameters
            and (algorithm, protocol) not in self.cells(call.group, call.collective)
        )
        if protocol is None or not forced:
            ran = self.resolve(call, config)
            assert ran.algorithm is not None
            assert ran.protocol is not None
            algorithm, protocol = ran.algorithm, ran.protocol
        decisions: CostModel = self
        if opened is not None:
            decisions = decisions.reopened(most=opened)
        asked = config.num_channels
        if asked is not None and asked > decisions.max_channels(call.group, algorithm):
            decisions = decisions.reopened(least=asked)
        channels = decisions.num_channels(call, algorithm, protocol, asked)
        return Config(algorithm, protocol, channels, config.chunk_bytes)

    def parameters(
        self, collective: Collective, algorithm: Algorithm, protocol: Protocol
    ) -> CellParameters:
        """The physics of a cell; KeyError for one that the file lacks."""
        return self._parameters[collective, algorithm, protocol]

    def work(self, call: Call, ran: Config, launch: Launch = UNTOUCHED) -> Work:
        """A resolved config as inputs of the formulas."""
        assert ran.algorithm is not None
        assert ran.protocol is not None
        assert ran.num_channels is not None
        way = route(call.group, call.collective, ran.algorithm)
        default = largest_chunk_bytes(
            call.collective, ran.algorithm, ran.protocol, self.file.buffer_bytes
        )
        used = asked_chunk_bytes(default, ran.chunk_bytes)
        if ran.algorithm in NVLS_KINDS:
            default = nvls_chunk_bytes(call.size_bytes, ran.num_channels, way.width)
            used = default if ran.chunk_bytes is None else used
        simple = ran.protocol is Protocol.Simple
        # NCCL_NTHREADS is for LL and Simple on rings; everything else runs 640.
        threaded = ran.algorithm is Algorithm.Ring and ran.protocol is not Protocol.LL128
        rank_bytes = call.size_bytes / call.group.num_ranks
        return Work(
            route=way,
            protocol=ran.protocol,
            size_bytes=call.size_bytes,
            num_channels=ran.num_channels,
            chunk_bytes=used,
            thread_factor=thread_factor(self.file.threads, launch.num_threads) if threaded else 1.0,
            chunk_factor=chunk_factor(self._chunks, rank_bytes, default, used) if simple else 1.0,
        )

    def parts(self, call: Call, config: Config, launch: Launch = UNTOUCHED) -> Parts:
        """The formulas of physics.py on what runs."""
        ran = self.resolve(call, config)
        work = self.work(call, ran, launch)
        assert ran.algorithm is not None
        assert ran.protocol is not None
        cell = self._parameters[call.collective, ran.algorithm, ran.protocol]
        values = self._values[cell.key]
        found = times(work, values, self._links_of(launch))
        return Parts(
            algorithm=ran.algorithm,
            protocol=ran.protocol,
            num_channels=work.num_channels,
            fixed_us=found.fixed_us,
            intra_us=found.inside_us,
            inter_us=found.between_us,
            host_share=values.host_share,
        )

    def check_launch(self, launch: Launch) -> None:
        """Raise UserError for a transport that the file has no figures for."""
        self._links_of(launch)

    def _links_of(self, launch: Launch) -> LinkValues:
        default = self.file.default_transport
        alone = all(group.ranks_per_node == 1 for group in self.file.groups)
        # Between nodes NCCL has nothing but the network.
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


#: NCCL on some machines, with what is known of its times: what NCCL decides (`CostModel`), and
#: `name`, `environment`, `contention`, `groups`, `collectives` and `parts`.
System = H100System | ParametricSystem


def _by_collective(
    file: SystemFile,
) -> Mapping[tuple[Collective, Algorithm, Protocol], CellParameters]:
    """Every collective's cells; one that names the collective comes before one that does not."""
    found: dict[tuple[Collective, Algorithm, Protocol], CellParameters] = {}
    for cell in sorted(file.cells, key=lambda cell: bool(cell.collectives)):
        for collective in cell.collectives or file.collectives:
            found[collective, cell.algorithm, cell.protocol] = cell
    return found


def thread_factor(threads: ThreadParameters, num_threads: int | None) -> float:
    """Bandwidth of a channel with `num_threads` / with NCCL's own number, where it is 1.

    `saturating` in threads over their best number; its numbers are priors, as a chunk's are.
    """
    if num_threads is None:
        return 1.0
    asked = min(max(num_threads // WARP * WARP, MIN_THREADS), MAX_THREADS)
    best, half, crowding = (each.value for each in (threads.best, threads.half, threads.crowding))
    own = saturating(threads.default / best, half, crowding)
    return saturating(asked / best, half, crowding) / own


def shipped_file(name: str) -> SystemFile:
    """The description of a built-in parametric system. Raises UnknownName with the choices."""
    if name not in PARAMETRIC:
        raise UnknownName("parametric system", name, PARAMETRIC)
    where = f"{name}{_SUFFIX}"
    return parse_system((_SHIPPED / where).read_text(encoding="utf-8"), where=where)


def system_file(name: str) -> SystemFile:
    """The description of a parametric system by name, or in the file that `name` is the path of.

    Raises UnknownName with the choices, MissingPath and UserError.
    """
    return load_system_file(Path(name)) if _is_path(name) else shipped_file(name)


def find_system(name: str) -> System:
    """The system called `name`, or described by the TOML file that `name` is the path of.

    Raises UnknownName with the choices, MissingPath and UserError.
    """
    if name == H100System.name:
        return H100System()
    if name not in PARAMETRIC and not _is_path(name):
        raise UnknownName("simulated system", name, SYSTEMS)
    return ParametricSystem(system_file(name))


def _is_path(name: str) -> bool:
    return name.endswith(_SUFFIX)
