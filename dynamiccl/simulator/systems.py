"""The simulated systems: built-in ones by name, and those in files of `fit-simulator`."""

from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Final

from dynamiccl.errors import UnknownName
from dynamiccl.simulator.default import CostModel, Overrides, find_machine, read_machine
from dynamiccl.simulator.h100_system import H100System
from dynamiccl.simulator.parameters import SystemFile, load_system_file, parse_system
from dynamiccl.simulator.parametric import ParametricSystem
from dynamiccl.simulator.system import System

_SUFFIX: Final = ".toml"
_H100: Final = "h100-ib"
_SHIPPED: Final = resources.files("dynamiccl.simulator") / "systems"
#: Systems that a shipped TOML file describes.
PARAMETRIC: Final = tuple(
    sorted(p.name.removesuffix(_SUFFIX) for p in _SHIPPED.iterdir() if p.name.endswith(_SUFFIX))
)


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
    if _is_path(name):
        return parametric_system(system_file(name))
    if name not in SYSTEMS:
        raise UnknownName("simulated system", name, [*SYSTEMS])
    return SYSTEMS[name]()


def parametric_system(file: SystemFile) -> ParametricSystem:
    """The system of a file. Raises UnknownName for its machine or release of NCCL."""
    told, path = file.nccl, Path(file.nccl.machine)
    machine = read_machine(path) if _is_path(told.machine) else find_machine(told.machine)
    overrides = Overrides(told.min_channels, told.max_channels)
    return ParametricSystem(file, CostModel(file.version, machine, overrides))


def _is_path(name: str) -> bool:
    return name.endswith(_SUFFIX)


def _shipped(name: str) -> Callable[[], System]:
    return lambda: parametric_system(shipped_file(name))


SYSTEMS: Final[Mapping[str, Callable[[], System]]] = {
    _H100: H100System,
    **{name: _shipped(name) for name in PARAMETRIC},
}
