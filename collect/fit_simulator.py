"""Fits a simulated system to measurements: `dynamiccl-collect fit-simulator`.

Residuals and the (positive) parameters are logarithms, since times span five orders of magnitude.
Calls above 1 MiB weigh four times as much. Loss: soft L1, bending at a tenth, so that a launch in
a bad state pulls little. Numbers come from all sizes, errors from fits without the size.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets import store
from dynamiccl.datasets.cells import pair_spread, quiet, tuned, usable
from dynamiccl.datasets.schema import REQUESTED_COLUMNS
from dynamiccl.datasets.store import config_of
from dynamiccl.errors import NotEnoughData, UnknownName, UserError
from dynamiccl.nccl import Collective
from dynamiccl.simulator.physics import MAX_OVERLAP, CellValues, LinkValues, Work, times
from dynamiccl.simulator.system import Call, Group
from dynamiccl.simulator.systems import (
    CELL_NUMBERS,
    LINK_NUMBERS,
    FitParameters,
    Origin,
    Parameter,
    ParametricSystem,
    SystemFile,
    system_file,
    system_text,
)

#: A cell's key or "links", and the number.
Name = tuple[str, str]
Vector = npt.NDArray[np.float64]
LARGE_BYTES: Final = 1 << 20
FOLDS: Final = 3
_LEAST, _MOST = 1e-4, 1e7
#: A larger crowd penalty could give bandwidth two peaks over channels (physics.py).
_MOST_OF: Final = {"overlap": MAX_OVERLAP, "crowd_penalty": 50.0, "small_penalty": 8.0}
_LINKS: Final = "links"
_CLASSES: Final = ("to 64 KiB", "to 1 MiB", "to 16 MiB", "to 256 MiB", "above 256 MiB")
_CLASS_ENDS: Final = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
_CELL: Final = (
    *("collective", "num_nodes", "ranks_per_node", "size_bytes", "launch_profile"),
    *REQUESTED_COLUMNS,
)
_HEAD: Final = (
    "Fitted by dynamiccl-collect fit-simulator; docs/simulator.md says what each number does.\n"
    "origin = fitted: by the measurements; published and prior: as in the description {base}."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One config of one call: its median time over independent repeats, and what ran."""

    call: Call
    #: Collective and requested config; ABSTAIN is NCCL's own choice.
    label: str
    time_us: float
    #: By how much two repeats differ.
    spread: float | None
    work: Work
    key: str
    #: By a fit that did not see its size.
    predicted_us: float = float("nan")

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_us / self.time_us - 1.0


class Fit(NamedTuple):
    """A fitted description, and its held-out errors."""

    file: SystemFile
    held_out: list[Cell]
    left_out: dict[str, int]
    at_bound: list[str]


def fit_to_file(data: Path, out: Path, *, base: str, systems: Sequence[str] = ()) -> Fit:
    """Fit `base` and write it; the file names the system. Raises UserError, or as `fit_system`."""
    if out.suffix != ".toml":
        raise UserError(f"--out is '{out}'; name a TOML file, such as {out.with_suffix('.toml')}")
    file = system_file(base)
    changes: dict[str, Any] = {"kind": "fitted", "name": store.check_slug(out.stem, "system")}
    if systems and not set(systems) <= set(file.fit.systems):
        # Rules about the runs of one data set say nothing about another's.
        changes["fit"] = FitParameters(systems=tuple(systems))
    fit = fit_system(file.model_copy(update=changes), data, systems)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(system_text(fit.file, head=_HEAD.format(base=base)), encoding="utf-8")
    return fit


def fit_system(file: SystemFile, data: Path, systems: Sequence[str] = ()) -> Fit:
    """Fit what `file` marks `fitted`. Raises NotEnoughData, and ModuleNotFoundError for SciPy."""
    cells, left_out = read_cells(data, file, systems)
    found, at_bound, unclear = _solve(file, cells)
    if not found:
        raise NotEnoughData(
            "nothing is to be fitted: no measured algorithm and protocol of the description has a "
            "number with origin = 'fitted'"
        )
    if all(cell.spread is None for cell in cells):
        raise NotEnoughData(
            "no config was measured twice, so its noise is not known; measure each in at least "
            "two independent launches (cycles = 2)"
        )
    if unclear:
        raise NotEnoughData(
            f"the data do not determine {' and '.join(unclear)}; measure small and large sizes, "
            "each with few and with many channels (num_channels = [0, 1, 2, 4]), or mark the "
            "number as a prior"
        )
    return Fit(_filled(file, found), _hold_out(file, cells), left_out, at_bound)


def read_cells(
    data: Path, file: SystemFile, systems: Sequence[str] = ()
) -> tuple[list[Cell], dict[str, int]]:
    """The cells to fit `file` to, and why others are unusable -> how many.

    `systems` replace those of `file`. Raises UserError for none or unknown ones, and NotEnoughData.
    """
    frame, rules = store.read(data), file.fit
    names = _chosen(sorted(frame["system"].unique()), rules, systems)
    size, run = pl.col("size_bytes"), pl.col("run")
    for rule in rules.rescale:
        size = size * pl.when(run.is_in(list(rule.runs))).then(rule.factor).otherwise(1)
    asked = {one.wire for one in file.collectives}
    least = {name: max(rules.min_bytes_of.get(name, rules.min_bytes), 1) for name in asked}
    smallest = pl.col("collective").replace_strict(least, default=None, return_dtype=pl.Int64)
    shape = {name: frame.schema[name] for name in ("num_nodes", "ranks_per_node")}
    shapes = [(group.num_nodes, group.ranks_per_node) for group in file.groups]
    rows = tuned(quiet(usable(frame))).filter(
        pl.col("system").is_in(names),
        pl.col("launch_profile").is_in(list(rules.profiles)),
        ~run.is_in(list(rules.exclude_runs)),
        pl.col("is_default") | ~run.is_in(list(rules.exclude_forced_of)),
    )
    wanted = rows.with_columns(size_bytes=size).filter(pl.col("size_bytes") >= smallest)
    wanted = wanted.join(pl.DataFrame(shapes, shape, orient="row"), on=list(shape), how="semi")
    if wanted.is_empty():
        raise NotEnoughData(
            f"nothing of {', '.join(names)} is left to fit '{file.name}' to: of its groups, "
            f"collectives and launch profiles ({', '.join(rules.profiles)}) the data has no time"
        )
    # The in-place and out-of-place halves of a launch are one measurement.
    repeats = wanted.group_by([*_CELL, "sweep", "run", "repeat"], maintain_order=True)
    once = repeats.agg(pl.col("time_us").median())
    grouped = once.group_by(list(_CELL), maintain_order=True).agg(pl.col("time_us"))
    system, cells, left_out = ParametricSystem(file), list[Cell](), Counter[str]()
    # Sorted, so that the order of rows changes no figure.
    for row in grouped.sort(list(_CELL), nulls_last=True).iter_rows(named=True):
        try:
            cells.append(_cell(row, system, rules.profiles[row["launch_profile"]].max_channels))
        except KeyError as error:
            left_out[str(error.args[0])] += 1
    return cells, dict(left_out)


def _chosen(there: Sequence[str], rules: FitParameters, systems: Sequence[str]) -> Sequence[str]:
    for name in systems:
        if name not in there:
            raise UnknownName("system of the data", name, there)
    known = systems or [name for name in rules.systems if name in there]
    if not known and len(there) > 1:
        raise UserError(
            f"the data has {len(there)} systems; say which with --system: {', '.join(there)}"
        )
    return known or there


def _cell(row: dict[str, Any], system: ParametricSystem, opened: int | None) -> Cell:
    """Raises KeyError with the reason where NCCL lacks the config."""
    # A profile's limit is not asked for call by call.
    config = config_of(row if opened is None else row | {"requested_num_channels": None})
    group = Group(row["num_nodes"], row["ranks_per_node"])
    call = Call(group, Collective.parse(row["collective"]), row["size_bytes"])
    ran = system.ran_measured(call, config, opened)
    limit = "" if opened is None else f" (at most {opened}ch)"
    return Cell(
        call=call,
        label=f"{call.collective.wire} {config.key}{limit}",
        time_us=float(np.median(row["time_us"])),
        spread=pair_spread(row["time_us"]),
        work=system.work(call, ran, config.chunk_bytes),
        key=system.parameters(call.collective, *ran[:2]).key,
    )


def _numbers(file: SystemFile) -> dict[Name, Parameter]:
    links = {(_LINKS, number): getattr(file.links, number) for number in LINK_NUMBERS}
    cells = {(c.key, n): getattr(c, n) for c in file.cells for n in CELL_NUMBERS}
    return links | cells


def _log_times(cells: Sequence[Cell], values: Mapping[Name, float]) -> Vector:
    links = LinkValues(**{number: values[_LINKS, number] for number in LINK_NUMBERS})
    physics = {
        key: CellValues(**{number: values[key, number] for number in CELL_NUMBERS})
        for key in {cell.key for cell in cells}
    }
    return np.log([times(cell.work, physics[cell.key], links).total_us for cell in cells])


def _solve(
    file: SystemFile, cells: Sequence[Cell]
) -> tuple[dict[Name, float], list[str], list[str]]:
    """Numbers of links and measured cells, those at a bound, and those that cells do not tell."""
    from scipy.optimize import least_squares

    seen, held = {_LINKS, *(cell.key for cell in cells)}, _numbers(file)
    names = [name for name in held if name[0] in seen and held[name].origin is Origin.FITTED]
    if not names or not cells:
        return {}, [], []
    values = {name: one.value for name, one in held.items()}
    low = np.log([1.0 if number == "overlap" else _LEAST for _, number in names])
    high = np.log([_MOST_OF.get(number, _MOST) for _, number in names])
    start = np.log([max(values[name], _LEAST) for name in names]).clip(low + 1e-6, high - 1e-6)
    sizes = np.array([cell.call.size_bytes for cell in cells])
    weights = np.where(sizes > LARGE_BYTES, 1.0, 0.25)
    measured = np.log([cell.time_us for cell in cells])

    def residuals(x: Vector) -> Vector:
        tried = values | dict(zip(names, np.exp(x).tolist(), strict=True))
        difference: Vector = weights * (_log_times(cells, tried) - measured)
        return difference

    solved = least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, max_nfev=200
    )
    texts = np.array(["/".join(name) for name in names])
    at_bound = (solved.x - low < 1e-3) | (high - solved.x < 1e-3)
    # Standard errors of logarithms, by the slopes; a ridge for numbers that change no time.
    slopes = solved.jac[:, ~at_bound] / weights[:, None]
    variances = np.linalg.inv(slopes.T @ slopes + 1e-12 * np.eye(slopes.shape[1])).diagonal()
    # Noise of 5 % would leave the number uncertain by a factor of e.
    unclear = np.sqrt(np.abs(variances)) * 0.05 > 1.0
    values = dict(zip(names, np.exp(solved.x).tolist(), strict=True))
    return values, texts[at_bound].tolist(), texts[~at_bound][unclear].tolist()


def _filled(file: SystemFile, found: Mapping[Name, float]) -> SystemFile:
    changes: dict[str, dict[str, Parameter]] = defaultdict(dict)
    for (owner, number), held in _numbers(file).items():
        if held.origin is Origin.FITTED:
            unseen = {"origin": Origin.PRIOR, "note": "not in the data"}
            value = found.get((owner, number))
            update = unseen if value is None else {"value": value}
            changes[owner][number] = held.model_copy(update=update)
    links = file.links.model_copy(update=changes.get(_LINKS, {}))
    cells = [cell.model_copy(update=changes.get(cell.key, {})) for cell in file.cells]
    return file.model_copy(update={"cells": tuple(cells), "links": links})


def _hold_out(file: SystemFile, cells: Sequence[Cell]) -> list[Cell]:
    """Each cell's time by a fit without its size; staggered, as a sweep may have one size only."""
    named = [(cell.label, cell.call.size_bytes) for cell in cells]
    place = pl.col("size").rank("dense").over("label") + pl.col("label").rank("dense")
    folds = pl.DataFrame(named, ("label", "size"), orient="row").select(place % FOLDS).to_series()
    found: list[Cell] = []
    for number in range(FOLDS):
        asked, rest = [*compress(cells, folds == number)], [*compress(cells, folds != number)]
        # What only held-out sizes would tell stays as described.
        found += predict(file, asked, _solve(file, rest)[0]) if rest and asked else []
    return sorted(found, key=lambda cell: cell.call.size_bytes)


def predict(
    file: SystemFile, cells: Sequence[Cell], fitted: Mapping[Name, float] | None = None
) -> list[Cell]:
    """The cells with the time that a description, with `fitted` in it, gives each."""
    values = {name: one.value for name, one in _numbers(file).items()} | dict(fitted or {})
    predicted = np.exp(_log_times(cells, values))
    return [replace(c, predicted_us=float(us)) for c, us in zip(cells, predicted, strict=True)]


def errors_of(held_out: Sequence[Cell]) -> dict[str, Any]:
    """`median` and `p90` of relative errors; `noise`: how much repeats differ. None: unknown."""
    sizes = np.abs([cell.error for cell in held_out])
    spreads = [cell.spread for cell in held_out if cell.spread is not None]
    return {
        "cells": len(held_out),
        "median": float(np.median(sizes)) if held_out else None,
        "p90": float(np.quantile(sizes, 0.9)) if held_out else None,
        "noise": float(np.median(spreads)) if spreads else None,
    }


def to_json(fit: Fit) -> dict[str, Any]:
    """The report as a JSON document; the bars hold above 1 MiB, `misses` are those missed."""
    by_size = groupby(fit.held_out, lambda one: bisect_left(_CLASS_ENDS, one.call.size_bytes))
    large = [cell for cell in fit.held_out if cell.call.size_bytes > LARGE_BYTES]
    errors = errors_of(large)
    noise = errors["noise"] or 0.0
    bars = {"median": max(0.05, noise), "p90": max(0.15, 2 * noise)}
    misses = [
        f"{name} error {errors[name]:.1%} is above the bar of {bar:.1%}"
        for name, bar in bars.items()
        if large and errors[name] > bar
    ]
    return {
        "system": fit.file.name,
        "held_out_above_1mib": errors if large else None,
        "misses": misses if large else ["no cell above 1 MiB was held out"],
        "by_size": {_CLASSES[n]: errors_of([*group]) for n, group in by_size},
        "left_out": fit.left_out,
        "at_bound": fit.at_bound,
    }


def lines(said: Mapping[str, Any]) -> Iterator[str]:
    """The document of `to_json` as text."""
    large = said["held_out_above_1mib"]
    for name, one in {**said["by_size"], **({"above 1 MiB": large} if large else {})}.items():
        shares = (one[key] for key in ("median", "p90", "noise"))
        median, p90, noise = ("-" if share is None else f"{share:.1%}" for share in shares)
        yield (
            f"{name}: {one['cells']} held-out cells, median error {median}, 90th percentile {p90}, "
            f"repeats differ by {noise}"
        )
    yield from (f"missed: {line}" for line in said["misses"])
    yield from (f"left out, {count} cells: {reason}" for reason, count in said["left_out"].items())
    yield from (f"at a bound of its range: {name}" for name in said["at_bound"])
