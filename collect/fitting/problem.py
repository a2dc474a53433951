"""The least-squares problem: which parameters are free, and the predicted time of every cell.

Times span five orders of magnitude, so residuals are differences of log time, and parameters, all
positive, are fitted as logarithms too. Calls above 1 MiB, where time is spent, weigh four times as
much as smaller ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.fitting.measured import MeasuredCell
from dynamiccl.nccl import Config
from dynamiccl.simulator.parameters import (
    CELL_NUMBERS,
    LINK_NUMBERS,
    CellParameters,
    Origin,
    Parameter,
    SystemFile,
)
from dynamiccl.simulator.parametric import ParametricSystem
from dynamiccl.simulator.physics import (
    MAX_OVERLAP,
    CellValues,
    LinkValues,
    Work,
    times,
)

Vector = npt.NDArray[np.float64]
#: Where a call counts fully.
LARGE_BYTES: Final = 1 << 20
_SMALL_WEIGHT: Final = 0.25
_LEAST, _MOST = 1e-4, 1e7
#: Larger would let the bandwidth have two peaks over channels (physics.py).
_MAX_PENALTY: Final = 50.0
_LINKS: Final = "links"


@dataclass(frozen=True, slots=True)
class Name:
    """A free parameter: of a cell by its key, or of the links."""

    owner: str
    number: str

    def __str__(self) -> str:
        return f"{self.owner}/{self.number}"


@dataclass(frozen=True, slots=True)
class Item:
    """A measured cell, and the config that NCCL runs for it."""

    cell: MeasuredCell
    work: Work
    #: Key of the physics that it runs on.
    key: str


class Problem:
    """A system file and its cells as a function from parameters to residuals."""

    def __init__(self, file: SystemFile, items: Sequence[Item]) -> None:
        """Take the description to start from; what is `fitted` in it is free."""
        self.file = file
        self.items = list(items)
        self.names = _free(file, {item.key for item in items})
        self.measured = np.log([item.cell.time_us for item in items])
        sizes = np.array([item.cell.call.size_bytes for item in items])
        self.weights = np.where(sizes > LARGE_BYTES, 1.0, _SMALL_WEIGHT)
        self._cells = {
            cell.key: CellValues(**{name: getattr(cell, name).value for name in CELL_NUMBERS})
            for cell in file.cells
        }
        self._links = LinkValues(**{name: getattr(file.links, name).value for name in LINK_NUMBERS})

    def start(self) -> Vector:
        """The description's own values, moved inside the bounds."""
        low, high = self.bounds()
        values = [max(self._value(name), _LEAST) for name in self.names]
        return np.clip(np.log(values), low + 1e-6, high - 1e-6)

    def bounds(self) -> tuple[Vector, Vector]:
        """Lower and upper bound of every free parameter."""
        low = [1.0 if name.number == "overlap" else _LEAST for name in self.names]
        most = {"overlap": MAX_OVERLAP, "crowd_penalty": _MAX_PENALTY, "small_penalty": 8.0}
        high = [most.get(name.number, _MOST) for name in self.names]
        return np.log(low), np.log(high)

    def log_times(self, x: Vector) -> Vector:
        """log(time in us) of every cell."""
        cells, links = self._values(x)
        return np.log([times(i.work, cells[i.key], links).total_us for i in self.items])

    def residuals(self, x: Vector) -> Vector:
        """Weighted differences of log time, predicted - measured."""
        difference: Vector = self.weights * (self.log_times(x) - self.measured)
        return difference

    def filled(self, x: Vector) -> SystemFile:
        """The description with the fitted parameters in it."""
        found = {name: float(np.exp(value)) for name, value in zip(self.names, x, strict=True)}
        cells = tuple(_with(cell, found, self.names) for cell in self.file.cells)
        links = self.file.links.model_copy(
            update={
                name.number: _moved(getattr(self.file.links, name.number), value)
                for name, value in found.items()
                if name.owner == _LINKS
            }
        )
        return self.file.model_copy(update={"cells": cells, "links": links})

    def _value(self, name: Name) -> float:
        owner = self._links if name.owner == _LINKS else self._cells[name.owner]
        value: float = getattr(owner, name.number)
        return value

    def _values(self, x: Vector) -> tuple[Mapping[str, CellValues], LinkValues]:
        cells, links = dict(self._cells), self._links
        changes: dict[str, dict[str, float]] = {}
        for name, value in zip(self.names, np.exp(x), strict=True):
            changes.setdefault(name.owner, {})[name.number] = float(value)
        for owner, change in changes.items():
            if owner == _LINKS:
                links = replace(links, **change)
            else:
                cells[owner] = replace(cells[owner], **change)
        return cells, links


def make_items(
    system: ParametricSystem, cells: Sequence[MeasuredCell]
) -> tuple[list[Item], dict[str, int]]:
    """What NCCL runs in every cell, and counts of cells that cannot be used, by reason."""
    items: list[Item] = []
    left_out: dict[str, int] = {}
    for cell in cells:
        try:
            ran = system.resolve_measured(cell.call, cell.config, cell.opened)
        except KeyError as error:
            reason = str(error.args[0])
            left_out[reason] = left_out.get(reason, 0) + 1
            continue
        items.append(_item(system, cell, ran))
    return items, left_out


def _item(system: ParametricSystem, cell: MeasuredCell, ran: Config) -> Item:
    assert ran.algorithm is not None
    assert ran.protocol is not None
    physics = system.parameters(cell.call.collective, ran.algorithm, ran.protocol)
    return Item(cell, system.work(cell.call, ran), physics.key)


def _free(file: SystemFile, used: set[str]) -> list[Name]:
    """Fitted parameters of cells that have measurements, and of the links."""
    names = [
        Name(_LINKS, number)
        for number in LINK_NUMBERS
        if getattr(file.links, number).origin is Origin.FITTED
    ]
    return names + [
        Name(cell.key, number)
        for cell in file.cells
        if cell.key in used
        for number in CELL_NUMBERS
        if getattr(cell, number).origin is Origin.FITTED
    ]


def _with(
    cell: CellParameters, found: Mapping[Name, float], free: Sequence[Name]
) -> CellParameters:
    changes = {
        name.number: _moved(getattr(cell, name.number), value)
        for name, value in found.items()
        if name.owner == cell.key
    }
    # What was to be fitted and is not in the data stays what it was: a guess.
    changes |= {
        number: held.model_copy(update={"origin": Origin.PRIOR, "note": "not in the data"})
        for number in CELL_NUMBERS
        if (held := getattr(cell, number)).origin is Origin.FITTED
        and Name(cell.key, number) not in free
    }
    return cell.model_copy(update=changes)


def _moved(parameter: Parameter, value: float) -> Parameter:
    return parameter.model_copy(update={"value": value, "origin": Origin.FITTED})
