"""NCCL's cost table as it is logged: latency and bandwidth of every (algorithm, protocol) cell.

NCCL 2.13 to 2.30, `src/graph/tuning.cc`, by rank 0 under NCCL_DEBUG_SUBSYS=TUNING, in blocks of
three algorithms:

      Algorithm   |                            Tree                  |  ...
      Protocol    |             LL |          LL128 |         Simple |  ...
     Max NThreads |            512 |            640 |            512 |  ...
        Broadcast |     0.0/   0.0 |     0.0/   0.0 |     9.3/   1.2 |  ...

A bandwidth of 0.0 means that NCCL does not take the cell, or that it is below 0.05 GB/s.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from dynamiccl.datasets.provenance import program_record
from dynamiccl.datasets.schema import COSTS
from dynamiccl.datasets.store import write_part
from dynamiccl.errors import UnknownName
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator.group import Line

_NAMES: Final = re.compile(r"\s+Algorithm\s+\|(.*)")
_THREADS: Final = re.compile(r"\s+Max NThreads \|(.*)")
_ROW: Final = re.compile(r"\s+([A-Z][A-Za-z]+) \|((?:\s*\d+\.\d/\s*\d+\.\d \|)+)\s*$")
_CELL: Final = re.compile(r"\s*(\d+\.\d)/\s*(\d+\.\d) \|")
_PROTOCOLS: Final = (Protocol.LL, Protocol.LL128, Protocol.Simple)

Cell = tuple[Collective, Algorithm, Protocol]


@dataclass(frozen=True, slots=True)
class Cost:
    """NCCL's prediction for a cell: latency + bytes / bandwidth, before its corrections by size."""

    latency_us: float
    #: NCCL's bandwidth of the algorithm, as it prints it; 0 = it does not take the cell.
    bandwidth_gbytes_per_s: float
    max_threads: int | None


@dataclass(slots=True)
class CostLog:
    """The cost tables of a log, one for each communicator that logged one."""

    tables: list[dict[Cell, Cost]] = field(default_factory=list)
    _algorithms: list[Algorithm | None] = field(default_factory=list)
    _threads: list[int | None] = field(default_factory=list)

    def add(self, line: str) -> bool:
        """Parse a line; returns whether it belongs to a cost table."""
        _, mark, text = line.partition("NCCL INFO")
        if not mark or "|" not in text:
            return False
        if names := _NAMES.match(text):
            self._begin([_algorithm(name) for name in names[1].split("|") if name.strip()])
            return True
        if threads := _THREADS.match(text):
            self._threads = [_count(word) for word in threads[1].replace("|", " ").split()]
            return True
        row = _ROW.match(text)
        return row is not None and self._take(row[1], row[2])

    def only(self) -> Mapping[Cell, Cost] | None:
        """The table that all communicators logged; None without one, or if they differ."""
        distinct = [t for i, t in enumerate(self.tables) if t and t not in self.tables[:i]]
        return distinct[0] if len(distinct) == 1 else None

    def _begin(self, algorithms: list[Algorithm | None]) -> None:
        # Each communicator begins with the first block.
        if Algorithm.Tree in algorithms or not self.tables:
            self.tables.append({})
        self._algorithms, self._threads = algorithms, []

    def _take(self, name: str, text: str) -> bool:
        if not self.tables or not self._algorithms:
            return False
        try:
            collective = Collective.parse(name)
        except UnknownName:
            return False
        for number, (latency, bandwidth) in enumerate(_CELL.findall(text)):
            block, protocol = divmod(number, len(_PROTOCOLS))
            algorithm = self._algorithms[block] if block < len(self._algorithms) else None
            if algorithm is None:
                continue
            threads = self._threads[number] if number < len(self._threads) else None
            cost = Cost(float(latency), float(bandwidth), threads)
            self.tables[-1][collective, algorithm, _PROTOCOLS[protocol]] = cost
        return True


def _count(word: str) -> int | None:
    """A number of threads; None for a word that was damaged in the log."""
    return int(word) if re.fullmatch(r"[0-9]{1,9}", word) else None


def _algorithm(name: str) -> Algorithm | None:
    try:
        return Algorithm.parse(name.strip())
    except UnknownName:
        return None  # a later NCCL's: the other columns still are what they are


def as_logged(lines: Mapping[Cell, Line]) -> dict[Cell, Cost]:
    """The cost table as NCCL prints it, with one decimal."""
    return {
        cell: Cost(round(line.latency_us, 1), round(line.algbw_gbytes_per_s, 1), None)
        for cell, line in lines.items()
    }


def write_costs(
    out: Path, table: Mapping[Cell, Cost], known: Mapping[str, Any], *, program: str
) -> list[Path]:
    """Write a group's cost table as parts of a data set; returns their paths."""
    rows = pa.Table.from_pylist(cost_rows(table, known), schema=COSTS)
    return write_part(out, rows, kind="costs", provenance=program_record(program))


def cost_rows(table: Mapping[Cell, Cost], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the `costs` table, with the group's columns from `known`."""
    shared = {name: known[name] for name in COSTS.names if name in known}
    return [
        {
            **shared,
            "collective": collective.wire,
            "algorithm": algorithm.wire,
            "protocol": protocol.wire,
            "latency_us": cost.latency_us,
            "bandwidth_gbytes_per_s": cost.bandwidth_gbytes_per_s,
            "max_threads": cost.max_threads,
        }
        for (collective, algorithm, protocol), cost in table.items()
    ]
