"""Shared by all benchmarks: writes figures to a JSON file, and prints them as a table."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from dynamiccl.datasets.store import git_commit

ROOT: Final = Path(__file__).resolve().parents[1]
#: Results land here, one file for each benchmark; not under version control.
OUT: Final = ROOT / "out" / "bench"
# A benchmark run as a script finds the tests' builders of rows and manifests, too.
sys.path.append(str(ROOT))


def machine_facts() -> dict[str, float | int | str | None]:
    """Facts about the machine that the figures were measured on."""
    return {
        "commit": git_commit(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count() or 0,
        "python": platform.python_version(),
    }


def write_result(
    name: str,
    figures: Mapping[str, float | int | str | None],
    tables: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write `figures` and the machine they were taken on to out/bench/NAME.json; print them.

    `tables` stand in the file only, under their names.
    """
    record: dict[str, float | int | str | None] = {**figures, **machine_facts()}
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps({**record, **tables}, indent=2) + "\n", encoding="utf-8")
    table = Table("figure", "value", title=name)
    for key, value in record.items():
        table.add_row(key, f"{value:,.6g}" if isinstance(value, float) else str(value))
    Console().print(table)
    return path
