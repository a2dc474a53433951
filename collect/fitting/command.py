"""`dynamiccl-collect fit-simulator`: measurements in, a system file and its errors out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from dynamiccl.collect.fitting import report
from dynamiccl.collect.fitting.fit import Fit, fit_system
from dynamiccl.collect.fitting.measured import measured_cells
from dynamiccl.collect.fitting.plots import plot_residuals
from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import UserError
from dynamiccl.simulator.parameters import FitParameters, SystemFile
from dynamiccl.simulator.system_text import system_text
from dynamiccl.simulator.systems import system_file

_HEAD: Final = (
    "Fitted by dynamiccl-collect fit-simulator; docs/simulator.md says what each number does.\n"
    "origin = fitted: by the measurements; published and prior: as in the description {base}."
)


def fit_to_file(
    data: Path,
    out: Path,
    *,
    base: str,
    systems: Sequence[str] = (),
    name: str | None = None,
    plots: Path | None = None,
    progress: Callable[[str], None],
) -> tuple[Fit, list[Path]]:
    """Fit `base` to `data`, write the file, and return the fit and the plots drawn.

    Raises UserError, UnknownName and MissingPath for what was asked, NotEnoughData for what the
    data cannot tell, MachineError without SciPy or, with `plots`, without matplotlib.
    """
    if out.suffix != ".toml":
        raise UserError(f"--out is '{out}'; name a TOML file, such as {out.with_suffix('.toml')}")
    file = _described(system_file(base), name=name, systems=systems)
    fit = fit_system(file, measured_cells(data, file, systems), progress)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(system_text(fit.file, head=_HEAD.format(base=base)), encoding="utf-8")
    return fit, [] if plots is None else [plot_residuals(fit, plots)]


def _described(file: SystemFile, *, name: str | None, systems: Sequence[str]) -> SystemFile:
    """The base description, with the system and name of the command line."""
    changes: dict[str, Any] = {"kind": "fitted"}
    if name is not None:
        check_slug(name, "system")
        changes["name"] = name
    if systems and not set(systems) <= set(file.fit.systems):
        # Rules about the runs of one data set say nothing about another's.
        changes["fit"] = FitParameters(systems=tuple(systems))
    return file.model_copy(update=changes)


def show(fit: Fit, console: Console) -> None:
    """Print the fit: parameters, errors, missed targets, cells with the largest errors."""
    console.print(_errors("held-out sizes, all", report.by_size(fit)))
    console.print(_errors("held-out sizes above 1 MiB, by what was asked", report.by_config(fit)))
    console.print(_errors("held-out sizes above 1 MiB, by what ran", report.by_physics(fit)))
    for line in _lines(fit):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _errors(title: str, groups: dict[str, report.Errors]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("", "cells", "median error", "90th percentile", "repeat noise"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, errors in groups.items():
        noise = "-" if errors.noise is None else f"{errors.noise:.1%}"
        table.add_row(name, str(errors.cells), f"{errors.median:.1%}", f"{errors.p90:.1%}", noise)
    return table


def _lines(fit: Fit) -> list[str]:
    errors = report.errors_of(report.large(fit))
    lines = []
    if errors is not None:
        noise = "unknown" if errors.noise is None else f"{errors.noise:.1%}"
        lines.append(
            f"above 1 MiB: median error {errors.median:.1%}, 90th percentile {errors.p90:.1%}, "
            f"repeat noise {noise}, {errors.cells} held-out cells"
        )
    missed = report.misses(fit)
    lines += [f"missed: {line}" for line in missed]
    if missed:
        lines += [
            f"  off by {one.error:+.0%}: {one.item.cell.label} at {one.item.cell.call.size_bytes} "
            f"bytes, {one.item.key} on {one.item.work.num_channels} channels: measured "
            f"{one.item.cell.time_us:.1f} us, predicted {one.predicted_us:.1f} us"
            for one in report.worst(fit, 5)
        ]
    lines += [f"left out, {count} cells: {reason}" for reason, count in fit.left_out.items()]
    lines += [f"at a bound of its range: {name}" for name in fit.at_bound]
    return lines
