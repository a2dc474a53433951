"""Inspects running ranks: records, threads, libraries."""

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.calls import SUFFIX, read_header, read_records
from dynamiccl.collect.output import FileReport


def look(folder: Path) -> str:
    """An action of all ranks, `*at(100, look(folder), rank=ALL)`; see `ranks_in`."""
    folder.mkdir()
    return f"sh=cat /proc/$PPID/task/*/comm /proc/$PPID/maps > {folder}/$PPID"


def ranks_in(folder: Path) -> list[str]:
    """The names of each rank's threads, and its libraries, in lines."""
    return [path.read_text() for path in folder.iterdir()]


def records_of(directory: Path, rank: int) -> npt.NDArray[np.void]:
    """All records of one rank, in the order of the calls."""
    found: list[npt.NDArray[np.void]] = []
    for path in sorted(
        directory.rglob(f"*{SUFFIX}"), key=lambda path: int(read_header(path)["number"])
    ):
        report = FileReport(path=str(path), format="calls")
        records = read_records(path, report)
        found.append(records[records["rank"] == rank])
        assert not report.rejected, report
    records = np.concatenate(found)
    ordered: npt.NDArray[np.void] = records[np.argsort(records["enqueued_ns"], kind="stable")]
    return ordered


def metrics_of(text: str) -> dict[tuple[str, str], float]:
    """Values by name and labels; fails for a line that is not of Prometheus' text format."""
    form = r"(# HELP \w+ .*|# TYPE \w+ (counter|gauge)|\w+(\{[^{}]*\})? [-+.\w]+)\n"
    assert re.fullmatch(f"({form})+", text), text
    names = re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)
    found = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
    values = {(name, labels): float(value) for name, labels, value in found}
    assert len(set(names)) == len(names), text
    assert len(values) == len(found), text
    assert {name for name, _ in values} <= set(names), text
    return values
