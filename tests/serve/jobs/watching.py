"""Inspects running ranks: records, threads, libraries."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.calls import SUFFIX, read_header, read_records
from dynamiccl.collect.output import FileReport

#: Prints the threads and libraries of all ranks, by process: one of them is its parent.
_LOOK: Final = """
import json, os, pathlib, sys

def kind_of(process):
    parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
    return parent, os.readlink(process / "exe")

seen = {}
kind = kind_of(pathlib.Path("/proc") / str(os.getppid()))
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        if kind_of(process) != kind:
            continue
        seen[process.name] = {
            "threads": [(t / "comm").read_text().strip() for t in (process / "task").iterdir()],
            "libraries": sorted({
                line.split()[-1] for line in (process / "maps").read_text().splitlines()
                if line.endswith(".so")
            }),
        }
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
with open(sys.argv[1], "w") as file:
    json.dump(seen, file)
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank's process at one moment."""

    threads: list[str]
    libraries: list[str]


class Look:
    """An action that inspects all ranks: `*at(100, look.action)`, then `look.ranks()`."""

    def __init__(self, folder: Path) -> None:
        """Keep program and result in `folder`, which is made."""
        folder.mkdir()
        self._script = folder / "look.py"
        self._script.write_text(_LOOK)
        self._result = folder / "seen.json"
        # In place of the shell, so that a rank is its parent.
        self.action = f"sh=exec {sys.executable} -S {self._script} {self._result}"

    def ranks(self) -> list[Seen]:
        """The snapshots, in the order in which the ranks were started."""
        seen = json.loads(self._result.read_text())
        return [Seen(**seen[process]) for process in sorted(seen, key=int)]


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
