"""Held-out errors of all fitted systems, and errors on measurements outside of every fit.

    python benchmarks/simulator_fit.py

Imports the published sweeps, fits every shipped system that says `fitted` from its own numbers, and
compares what a fit without each size says of it with what was measured. Below that, measurements
of another number of ranks, that no fit has seen at all.
"""

import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from dynamiccl.collect import fit_simulator as fitting
from dynamiccl.collect.fit_simulator import Fit, fit_system
from dynamiccl.collect.imports import import_files
from dynamiccl.errors import MissingPath
from dynamiccl.simulator.systems import PARAMETRIC, SystemFile, system_file

DATA: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "sweeps"
SWEEPS: Final = (
    "b300_nvlink_allreduce.csv",
    "gb10_roce_ring.csv",
    "rtx5090_socket_tables.csv",
    "rtx5090_socket_raw_repeats.csv",
)


#: A built-in system, and the published one of another number of ranks that no fit has seen.
BASE: Final = "rtx5090-sockets"
UNSEEN: Final = (
    "rtx-5090-workstation-3-ranks-on-one-gpu-tcp-sockets-p2p-and-shm-off-a-host-id-per-rank"
)


@cache
def imported(data: Path = DATA) -> Path:
    """A store of the published sweeps, cached for this process. Raises MissingPath without them."""
    if not data.is_dir():
        raise MissingPath("published sweeps", data, "name the folder that holds them")
    folder = Path(tempfile.mkdtemp(prefix="dynamiccl-fit-"))
    import_files([data / name for name in SWEEPS], folder)
    return folder


def fits(data: Path = DATA) -> Iterator[Fit]:
    """A fit of every built-in fitted system."""
    store = imported(data)
    for name in PARAMETRIC:
        file = system_file(name)
        if file.kind == "fitted":
            yield fit_system(file, store)


def unseen(data: Path = DATA) -> dict[str, Any]:
    """Errors above 1 MiB of the built-in parameters on three ranks, which their fit leaves out."""
    document = system_file(BASE).model_dump()
    document["fit"] |= {"systems": (UNSEEN,)}
    document["groups"] = [{"num_nodes": 3, "ranks_per_node": 1}]
    told = SystemFile.model_validate(_by_name(document))
    cells, _ = fitting.read_cells(imported(data), told)
    judged = fitting.predict(told, cells)
    return fitting.errors_of(
        [cell for cell in judged if cell.call.size_bytes > fitting.LARGE_BYTES]
    )


def _by_name(document: dict[str, Any]) -> dict[str, Any]:
    """The dump with NCCL's names instead of its numbers, as a file has them."""

    def named(value: Any) -> Any:
        if hasattr(value, "wire"):
            return value.wire
        if isinstance(value, Mapping):
            return {key: named(one) for key, one in value.items()}
        return [named(one) for one in value] if isinstance(value, list | tuple) else value

    found: dict[str, Any] = named(document)
    return found


def figures(data: Path = DATA) -> dict[str, float | int | str | None]:
    """Held-out errors above 1 MiB by system (0.05 = five per cent), and by size class.

    Keys end in the system's name with underscores: `fit_median_error_b300_nvlink`,
    `fit_p90_error_*`, `repeat_noise_*` (None where nothing was measured twice),
    `fit_held_out_cells_*`, `fit_reaches_bar_*` (1 or 0), and
    `fit_median_error_*_to_16_mib` for each class. `unseen_median_error_*` are the shipped numbers'
    errors on measurements outside every fit. Raises MissingPath without the data.
    """
    found: dict[str, float | int | str | None] = {}
    for fit in fits(data):
        name = _key(fit.file.name)
        said = fitting.to_json(fit)
        errors = said["held_out_above_1mib"]
        found[f"fit_median_error_{name}"] = errors["median"]
        found[f"fit_p90_error_{name}"] = errors["p90"]
        found[f"repeat_noise_{name}"] = errors["noise"]
        found[f"fit_held_out_cells_{name}"] = errors["cells"]
        found[f"fit_reaches_bar_{name}"] = int(not said["misses"])
        for size, part in said["by_size"].items():
            found[f"fit_median_error_{name}_{_key(size)}"] = part["median"]
            found[f"fit_p90_error_{name}_{_key(size)}"] = part["p90"]
    names = {"median": "unseen_median_error", "p90": "unseen_p90_error", "cells": "unseen_cells"}
    errors = unseen(data)
    return found | {f"{name}_{_key(BASE)}": errors[key] for key, name in names.items()}


def _key(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


def _table() -> Table:
    table = Table(title="errors of the simulated systems' times")
    for heading in ("", "cells", "median error", "90th percentile", "repeat noise", "bar"):
        table.add_column(heading, justify="left" if not heading else "right")
    return table


def _row(name: str, errors: dict[str, Any], bar: str = "") -> tuple[str, ...]:
    noise = "-" if errors["noise"] is None else f"{errors['noise']:.1%}"
    return name, str(errors["cells"]), f"{errors['median']:.1%}", f"{errors['p90']:.1%}", noise, bar


def main() -> None:
    """Fit, judge, print."""
    console, table, details = Console(), _table(), []
    for fit in fits():
        said = fitting.to_json(fit)
        errors, missed = said["held_out_above_1mib"], said["misses"]
        bar = "missed" if missed else "reached"
        table.add_row(*_row(f"{fit.file.name}, held out, above 1 MiB", errors, bar))
        for size, part in said["by_size"].items():
            table.add_row(*_row(f"  {size}", part))
        details += [f"{fit.file.name}: {line}" for line in missed]
    table.add_row(*_row(f"{BASE}, three ranks, seen by no fit, above 1 MiB", unseen()))
    console.print(table)
    for line in details:
        console.print(line, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
