"""Checks of a job of test_plugin_nccl.py: NCCL's logs, the plugin's records."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.calls import read_records
from dynamiccl.collect.output import FileReport
from dynamiccl.nccl import Algorithm, Config, Protocol

Records = npt.NDArray[np.void]


def is_loaded(log: str) -> bool:
    """Whether NCCL says that it uses our tuner."""
    return any("TUNER/Plugin: Using" in line and "DynamICCL" in line for line in log.splitlines())


def records_by_rank(directory: Path) -> dict[int, Records]:
    """The recorded calls of each rank in the order of their sequence numbers; none are damaged."""
    parts: dict[int, list[Records]] = {}
    paths = sorted(directory.rglob("*.dcc"))
    if not paths:
        raise AssertionError(f"the job left no calls file under {directory}")
    for path in paths:
        report = FileReport(path=str(path), format="calls")
        records = read_records(path, report)
        for rank in np.unique(records["rank"]):
            parts.setdefault(int(rank), []).append(records[records["rank"] == rank])
        if report.rejected:
            raise AssertionError(f"{path} has damaged records: {report.rejected}")
    whole = {rank: np.concatenate(found) for rank, found in parts.items()}
    return {rank: rows[np.argsort(rows["sequence"], kind="stable")] for rank, rows in whole.items()}


def table_changes(records: Records) -> list[tuple[int, int]]:
    """(sequence number, table) of the first call, and of each with another table than before."""
    tables = [int(table) for table in records["table"]]
    sequences = [int(sequence) for sequence in records["sequence"]]
    changed = [i for i, (before, after) in enumerate(pairwise(tables), 1) if before != after]
    return [(sequences[i], tables[i]) for i in [0, *changed]]


def misread(records: Records, tables: Mapping[int, Config | None]) -> list[str]:
    """Calls that did not run what the table of that number says; None: whatever NCCL chose."""
    problems = []
    for row in records:
        wanted = tables.get(int(row["table"]))
        if wanted is None:
            continue
        ran = (Algorithm(int(row["algorithm"])), Protocol(int(row["protocol"])))
        if ran != (wanted.algorithm, wanted.protocol):
            problems.append(
                f"call {row['sequence']} of {row['size_bytes']} bytes under table {row['table']}: "
                f"{ran[0].name}/{ran[1].name}"
            )
    return problems


def choices_of(records: Records, table: int) -> dict[int, set[tuple[int, int]]]:
    """(algorithm, protocol) that ran while a table was in force, by size in bytes."""
    found: dict[int, set[tuple[int, int]]] = {}
    for row in records[records["table"] == table]:
        cell = (int(row["algorithm"]), int(row["protocol"]))
        found.setdefault(int(row["size_bytes"]), set()).add(cell)
    return found


def all_alike(values: Iterable[Any]) -> bool:
    """Whether there is one value at most."""
    first, *others = list(values) or [None]
    return all(other == first for other in others)


def sums_are_exact(ranks: int, found: Sequence[float]) -> bool:
    """Whether an all-reduce of rank + 1 gave the one sum, bit for bit."""
    return all(value == ranks * (ranks + 1) / 2 for value in found)
