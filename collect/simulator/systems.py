"""The simulated systems that ship, by name, and those in files that `fit-simulator` wrote."""

from collections.abc import Callable, Mapping
from typing import Final

from dynamiccl.collect.simulator.h100_system import H100System
from dynamiccl.collect.simulator.system import System
from dynamiccl.errors import UnknownName

SYSTEMS: Final[Mapping[str, Callable[[], System]]] = {"h100-ib": H100System}


def find_system(name: str) -> System:
    """The system called `name`. Raises UnknownName with the choices."""
    if name not in SYSTEMS:
        raise UnknownName("simulated system", name, [*SYSTEMS])
    return SYSTEMS[name]()
