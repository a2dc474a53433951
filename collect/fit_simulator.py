"""Fits a simulated system to measurements: `dynamiccl-collect fit-simulator`.

Times span five orders of magnitude, so residuals are differences of log time, and parameters, all
positive, are fitted as logarithms too. Calls above 1 MiB, where time is spent, weigh four times as
much as smaller ones. Loss: soft L1, which bends over at a tenth, so that a launch in a bad state of
the machine pulls little.

Every third size of every config is held out in turn and predicted by a fit of the other two thirds;
the numbers that are written come from all of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
from rich.console import Console
from rich.table import Table

from dynamiccl.collect.describe import figure_class, size_label
from dynamiccl.datasets import store
from dynamiccl.datasets.cells import pair_spread, quiet, tuned, usable
from dynamiccl.datasets.schema import REQUESTED_COLUMNS
from dynamiccl.errors import MachineError, NotEnoughData, UnknownName, UserError
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.parameters import (
    CELL_NUMBERS,
    LINK_NUMBERS,
    CellParameters,
    FitParameters,
    Origin,
    Parameter,
    SystemFile,
)
from dynamiccl.simulator.parametric import ParametricSystem
from dynamiccl.simulator.physics import MAX_OVERLAP, CellValues, LinkValues, Work, times
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.system_text import system_text
from dynamiccl.simulator.systems import parametric_system, system_file

Vector = npt.NDArray[np.float64]
#: Where a call counts fully.
LARGE_BYTES: Final = 1 << 20
FOLDS: Final = 3
#: What a fit is to reach above 1 MiB, unless the noise of repeats is larger.
BAR_MEDIAN: Final = 0.05
BAR_P90: Final = 0.15
_SMALL_WEIGHT: Final = 0.25
_BENDS_AT: Final = 0.1
_MAX_EVALUATIONS: Final = 200
_LEAST, _MOST = 1e-4, 1e7
#: A larger crowd penalty would let the bandwidth have two peaks over channels (physics.py).
_MOST_OF: Final = {"overlap": MAX_OVERLAP, "crowd_penalty": 50.0, "small_penalty": 8.0}
_LINKS: Final = "links"
#: A number that changes no time by more than this when it is e times as large is not in the data.
_LEAST_EFFECT: Final = 0.02
#: Singular values below this share of the largest: two numbers that only show together.
_LEAST_SHARE: Final = 2e-3
#: What each number shows in.
_SHOWS_IN: Final[Mapping[str, str]] = {
    "base_us": "small sizes",
    "hop_us": "small sizes",
    "net_hop_us": "small sizes",
    "slice_us": "sizes on both sides of 64 KiB per channel and rank",
    "turn_us": "sizes that take many loops over the buffers",
    "proxy_us": "small sizes with few and with many channels",
    "channel_gbytes_per_s": "large sizes with few channels (num_channels = [1, 2, 4])",
    "link_share": "large sizes with NCCL's own channels",
    "inside_gbytes_per_s": "large sizes inside a node",
    "between_gbytes_per_s": "large sizes between nodes",
    "overlap": "sizes between the small and the large ones",
    "crowd_penalty": "more channels than NCCL opens by itself",
    "crowd_channels": "channel counts up to the most that can be opened",
    "small_penalty": "small sizes with many channels",
    "small_bytes": "small sizes with many channels",
}
#: Numbers that one channel count says nothing about, and how many it takes.
_NEEDS_CHANNELS: Final = {
    "proxy_us": 2,
    "channel_gbytes_per_s": 2,
    "crowd_channels": 3,
    "crowd_penalty": 3,
}
#: Upper ends of the size classes, and their names.
_CLASSES: Final = (
    (64 << 10, "to 64 KiB"),
    (1 << 20, "to 1 MiB"),
    (16 << 20, "to 16 MiB"),
    (256 << 20, "to 256 MiB"),
    (1 << 62, "above 256 MiB"),
)
_CELL: Final = (
    "collective",
    "num_nodes",
    "ranks_per_node",
    "size_bytes",
    "launch_profile",
    *REQUESTED_COLUMNS,
)
#: Both halves of one launch (in place and not) are one measurement.
_REPEAT: Final = ("sweep", "run", "repeat")
_MARKS: Final = "osD^vPX*<>"
_HEAD: Final = (
    "Fitted by dynamiccl-collect fit-simulator; docs/simulator.md says what each number does.\n"
    "origin = fitted: by the measurements; published and prior: as in the description {base}."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One config of one call: its median time over independent repeats, and what NCCL ran."""

    call: Call
    #: What was requested; ABSTAIN is NCCL's own choice.
    config: Config
    #: Most channels that the communicator was allowed to open; None = NCCL's own number.
    opened: int | None
    time_us: float
    repeats: int
    #: By how much two repeats differ; None for a single one.
    spread: float | None
    work: Work
    #: Key of the physics that it runs on.
    key: str
    #: By a fit that did not see its size; NaN before it is held out.
    predicted_us: float = float("nan")

    @property
    def label(self) -> str:
        """The config as shown in tables."""
        limit = "" if self.opened is None else f" (at most {self.opened}ch)"
        return f"{self.call.collective.wire} {self.config.key}{limit}"

    @property
    def error(self) -> float:
        """Predicted / measured - 1; 0.1 = predicted 10 % too slow."""
        return self.predicted_us / self.time_us - 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted description, and its held-out errors."""

    file: SystemFile
    held_out: list[Cell]
    #: Measurements that say nothing of the physics, by reason.
    left_out: dict[str, int]
    #: Free numbers that ended at a bound.
    at_bound: list[str]


def fit_to_file(
    data: Path,
    out: Path,
    *,
    base: str,
    systems: Sequence[str] = (),
    name: str | None = None,
    progress: Callable[[str], None],
) -> Fit:
    """Fit `base` to `data` and write the file.

    Raises UserError, UnknownName and MissingPath for what was asked, NotEnoughData for what the
    data cannot tell, MachineError without SciPy.
    """
    if out.suffix != ".toml":
        raise UserError(f"--out is '{out}'; name a TOML file, such as {out.with_suffix('.toml')}")
    file = system_file(base)
    changes: dict[str, Any] = {"kind": "fitted"}
    if name is not None:
        changes["name"] = store.check_slug(name, "system")
    if systems and not set(systems) <= set(file.fit.systems):
        # Rules about the runs of one data set say nothing about another's.
        changes["fit"] = FitParameters(systems=tuple(systems))
    fit = fit_system(file.model_copy(update=changes), data, systems, progress)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(system_text(fit.file, head=_HEAD.format(base=base)), encoding="utf-8")
    return fit


def fit_system(
    file: SystemFile,
    data: Path,
    systems: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Fit:
    """Fit the parameters marked `fitted` in `file` to a data directory.

    Raises NotEnoughData where the data does not determine a parameter, MachineError without SciPy,
    and what `read_cells` raises.
    """
    cells, left_out = read_cells(data, file, systems)
    problem = Problem(file, cells)
    _check_data(problem)
    progress(f"{len(problem.names)} numbers from {len(cells)} cells")
    found = _solve(problem)
    low, high = problem.bounds()
    at_bound = (found.x - low < 1e-3) | (high - found.x < 1e-3)
    _check_sensitivity(problem, found.jac / problem.weights[:, None], at_bound)
    stuck = ["/".join(name) for name, is_at in zip(problem.names, at_bound, strict=True) if is_at]
    return Fit(problem.filled(found.x), _hold_out(problem, progress), left_out, stuck)


def read_cells(
    data: Path, file: SystemFile, systems: Sequence[str] = ()
) -> tuple[list[Cell], dict[str, int]]:
    """The cells that the fit of `file` looks at, and how many it cannot use, by reason.

    `systems` names others than the file does. Raises UserError where the data has several systems
    and nobody says which, UnknownName for one that it lacks, and NotEnoughData where nothing is
    left.
    """
    frame, rules = store.read(data), file.fit
    names = _chosen(sorted(frame["system"].unique()), rules, systems)
    size = pl.col("size_bytes")
    for rule in rules.rescale:
        # Sizes in bytes, of runs whose sizes are written in another unit.
        factor = pl.when(pl.col("run").is_in(list(rule.runs))).then(rule.factor).otherwise(1)
        size = size * factor
    asked = {one.wire for one in file.collectives}
    least = {name: max(rules.min_bytes_of.get(name, rules.min_bytes), 1) for name in asked}
    smallest = pl.col("collective").replace_strict(least, default=None, return_dtype=pl.Int64)
    shape = {name: frame.schema[name] for name in ("num_nodes", "ranks_per_node")}
    shapes = [(group.num_nodes, group.ranks_per_node) for group in file.groups]
    wanted = (
        tuned(quiet(usable(frame)))
        .filter(
            pl.col("system").is_in(names)
            & pl.col("launch_profile").is_in(list(rules.profiles))
            & ~pl.col("run").is_in(list(rules.exclude_runs))
            & (pl.col("is_default") | ~pl.col("run").is_in(list(rules.exclude_forced_of)))
        )
        .with_columns(size_bytes=size)
        .filter(pl.col("size_bytes") >= smallest)
        .join(pl.DataFrame(shapes, schema=shape, orient="row"), on=list(shape), how="semi")
    )
    if wanted.is_empty():
        raise NotEnoughData(
            f"nothing of {', '.join(names)} is left to fit '{file.name}' to: of its groups, "
            f"collectives and launch profiles ({', '.join(rules.profiles)}) the data has no time"
        )
    once = wanted.group_by([*_CELL, *_REPEAT], maintain_order=True).agg(pl.col("time_us").median())
    grouped = once.group_by(list(_CELL), maintain_order=True).agg(pl.col("time_us"))
    system, cells, left_out = parametric_system(file), list[Cell](), Counter[str]()
    # By name, so that the order of rows in the data changes no figure.
    for row in grouped.sort(list(_CELL), nulls_last=True).iter_rows(named=True):
        try:
            cells.append(_cell(row, system, rules.profiles[row["launch_profile"]].max_channels))
        except KeyError as error:
            left_out[str(error.args[0])] += 1
    return cells, dict(left_out)


def _chosen(there: Sequence[str], rules: FitParameters, systems: Sequence[str]) -> list[str]:
    for name in systems:
        if name not in there:
            raise UnknownName("system of the data", name, there)
    known = list(systems) or [name for name in rules.systems if name in there]
    if not known and len(there) > 1:
        raise UserError(
            f"the data has {len(there)} systems; say which with --system: {', '.join(there)}"
        )
    return known or list(there)


def _cell(row: Mapping[str, Any], system: ParametricSystem, opened: int | None) -> Cell:
    """One row of grouped measurements; raises KeyError with the reason where NCCL lacks it."""
    algorithm, protocol = row["requested_algorithm"], row["requested_protocol"]
    config = Config(
        None if algorithm is None else Algorithm.parse(algorithm),
        None if protocol is None else Protocol.parse(protocol),
        # What a profile limits is not asked for call by call.
        None if opened is not None else row["requested_num_channels"],
        row["requested_chunk_bytes"],
    )
    group = Group(row["num_nodes"], row["ranks_per_node"])
    call = Call(group, Collective.parse(row["collective"]), row["size_bytes"])
    ran = system.resolve_measured(call, config, opened)
    assert ran.algorithm is not None
    assert ran.protocol is not None
    times_us: list[float] = row["time_us"]
    return Cell(
        call=call,
        config=config,
        opened=opened,
        time_us=float(np.median(times_us)),
        repeats=len(times_us),
        spread=pair_spread(times_us),
        work=system.work(call, ran),
        key=system.parameters(call.collective, ran.algorithm, ran.protocol).key,
    )


class Problem:
    """A system file and its cells as a function from parameters to residuals.

    A free parameter is named (owner, number); its owner is the key of a cell's physics, or "links".
    """

    def __init__(self, file: SystemFile, cells: Sequence[Cell]) -> None:
        """Take the description to start from; what is `fitted` in it is free, if it is measured."""
        self.file = file
        self.cells = cells
        used = {cell.key for cell in cells}
        owners: list[tuple[str, Any, Sequence[str]]] = [(_LINKS, file.links, LINK_NUMBERS)]
        owners += [(cell.key, cell, CELL_NUMBERS) for cell in file.cells if cell.key in used]
        self.names = [
            (owner, number)
            for owner, holder, numbers in owners
            for number in numbers
            if getattr(holder, number).origin is Origin.FITTED
        ]
        self.measured = np.log([cell.time_us for cell in cells])
        sizes = np.array([cell.call.size_bytes for cell in cells])
        self.weights = np.where(sizes > LARGE_BYTES, 1.0, _SMALL_WEIGHT)
        self._values = {
            owner: {number: getattr(holder, number).value for number in numbers}
            for owner, holder, numbers in owners
        }

    def start(self) -> Vector:
        """The description's own values, moved inside the bounds."""
        low, high = self.bounds()
        values = [max(self._values[owner][number], _LEAST) for owner, number in self.names]
        return np.clip(np.log(values), low + 1e-6, high - 1e-6)

    def bounds(self) -> tuple[Vector, Vector]:
        """Lower and upper bound of every free parameter."""
        low = [1.0 if number == "overlap" else _LEAST for _, number in self.names]
        high = [_MOST_OF.get(number, _MOST) for _, number in self.names]
        return np.log(low), np.log(high)

    def log_times(self, x: Vector) -> Vector:
        """log(time in us) of every cell."""
        values = {owner: dict(numbers) for owner, numbers in self._values.items()}
        for (owner, number), value in zip(self.names, np.exp(x), strict=True):
            values[owner][number] = float(value)
        links = LinkValues(**values.pop(_LINKS))
        physics = {owner: CellValues(**numbers) for owner, numbers in values.items()}
        return np.log([times(cell.work, physics[cell.key], links).total_us for cell in self.cells])

    def residuals(self, x: Vector) -> Vector:
        """Weighted differences of log time, predicted - measured."""
        difference: Vector = self.weights * (self.log_times(x) - self.measured)
        return difference

    def filled(self, x: Vector) -> SystemFile:
        """The description with the fitted parameters in it."""
        found = dict(zip(self.names, np.exp(x).tolist(), strict=True))

        def fitted(owner: str, holder: Any) -> dict[str, Parameter]:
            return {
                number: getattr(holder, number).model_copy(
                    update={"value": value, "origin": Origin.FITTED}
                )
                for (of, number), value in found.items()
                if of == owner
            }

        def filled_cell(cell: CellParameters) -> CellParameters:
            # What was to be fitted and is not in the data stays what it was: a guess.
            unseen = {
                number: held.model_copy(update={"origin": Origin.PRIOR, "note": "not in the data"})
                for number in CELL_NUMBERS
                if (held := getattr(cell, number)).origin is Origin.FITTED
            }
            return cell.model_copy(update=unseen | fitted(cell.key, cell))

        links = self.file.links.model_copy(update=fitted(_LINKS, self.file.links))
        cells = tuple(map(filled_cell, self.file.cells))
        return self.file.model_copy(update={"cells": cells, "links": links})


def _solve(problem: Problem) -> Any:
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise MachineError(
            "fitting needs SciPy, which is not installed; pip install 'dynamiccl[train]'"
        ) from error
    return least_squares(
        problem.residuals,
        problem.start(),
        bounds=problem.bounds(),
        loss="soft_l1",
        f_scale=_BENDS_AT,
        max_nfev=_MAX_EVALUATIONS,
    )


def _hold_out(problem: Problem, progress: Callable[[str], None]) -> list[Cell]:
    """Each cell with the time that a fit without its size gives it: every third size at a time.

    Staggered by config, since a sweep over channels may stand at a single size: were that size held
    out of every config at once, nothing would tell what a channel does.
    """
    sizes: dict[str, set[int]] = {
        label: set() for label in sorted({c.label for c in problem.cells})
    }
    for cell in problem.cells:
        sizes[cell.label].add(cell.call.size_bytes)
    fold = {
        (label, size): (rank + order) % FOLDS
        for order, (label, held) in enumerate(sizes.items())
        for rank, size in enumerate(sorted(held))
    }
    found: list[Cell] = []
    for number in range(FOLDS):
        progress(f"held-out sizes {number + 1} of {FOLDS}")
        parts: tuple[list[Cell], list[Cell]] = [], []
        for cell in problem.cells:
            parts[fold[cell.label, cell.call.size_bytes] == number].append(cell)
        rest, asked = parts
        if rest and asked:
            seen = Problem(problem.file, rest)
            # A number that only the held-out sizes would tell stays as the description has it.
            file = seen.filled(_solve(seen).x) if seen.names else problem.file
            found += predict(file, asked)
    return sorted(found, key=lambda cell: cell.call.size_bytes)


def predict(file: SystemFile, cells: Sequence[Cell]) -> list[Cell]:
    """The cells with the time that a description gives each."""
    problem = Problem(file, cells)
    predicted = np.exp(problem.log_times(problem.start()))
    return [replace(c, predicted_us=float(us)) for c, us in zip(cells, predicted, strict=True)]


def _check_data(problem: Problem) -> None:
    """Refuse too few sizes or channel counts, and cells without any repeat (NotEnoughData)."""
    if not problem.cells:
        raise NotEnoughData("no measurement runs on physics that the description has")
    if not problem.names:
        raise NotEnoughData(
            "nothing is to be fitted: no parameter of a measured cell has origin = 'fitted'; mark "
            "those that the data is to tell"
        )
    if all(cell.repeats < 2 for cell in problem.cells):
        raise NotEnoughData(
            "no config was measured twice, so its noise is not known; measure each in at least "
            "two independent launches (cycles = 2)"
        )
    complaints = []
    for owner in dict.fromkeys(owner for owner, _ in problem.names):
        names = [number for of, number in problem.names if of == owner]
        mine = [cell for cell in problem.cells if owner in {_LINKS, cell.key}]
        sizes = {cell.call.size_bytes for cell in mine}
        counts = {cell.work.num_channels for cell in mine}
        if len({(cell.call.size_bytes, cell.work.num_channels) for cell in mine}) < len(names):
            complaints.append(
                f"{owner} has {len(names)} numbers to fit ({', '.join(names)}) and only "
                f"{len(mine)} measured cells of {len(sizes)} sizes; measure at least {len(names)} "
                "sizes or channel counts of it"
            )
        complaints += [
            f"{owner}/{number} cannot be determined from {len(counts)} channel count(s); measure "
            f"{_SHOWS_IN[number]}"
            for number, least in _NEEDS_CHANNELS.items()
            if number in names and len(counts) < least
        ]
    if complaints:
        raise NotEnoughData("; ".join(complaints))


def _check_sensitivity(problem: Problem, jacobian: Vector, at_bound: npt.NDArray[np.bool_]) -> None:
    """Refuse parameters that change no time, and pairs that the data cannot tell apart.

    `jacobian`: (cells, parameters), derivatives of log time. Raises NotEnoughData.
    """

    def unseen(indices: Iterable[int]) -> str:
        told = [
            f"{'/'.join(problem.names[index])} (shows in {_SHOWS_IN[problem.names[index][1]]})"
            for index in indices
        ]
        return (
            f"the data do not determine {' and '.join(told)}; measure that, or mark the number as "
            "a prior"
        )

    idle = np.flatnonzero((np.abs(jacobian).max(axis=0) < _LEAST_EFFECT) & ~at_bound)
    if idle.size:
        raise NotEnoughData(unseen(idle))
    moving = np.flatnonzero(~at_bound)
    if len(moving) < 2:
        return
    scaled = jacobian[:, moving] / np.linalg.norm(jacobian[:, moving], axis=0)
    _, singular, directions = np.linalg.svd(scaled, full_matrices=False)
    if singular[-1] < _LEAST_SHARE * singular[0]:
        pair = np.sort(np.argsort(-np.abs(directions[-1]))[:2])
        raise NotEnoughData("their effects cannot be separated: " + unseen(moving[pair]))


def errors_of(held_out: Sequence[Cell]) -> dict[str, Any]:
    """`cells`, `median` and `p90` of relative errors (0.05 = 5 %), and the repeats' `noise`.

    `noise` is the median over the cells with repeats of how much two differ; None without any.
    Without cells `median` and `p90` are None.
    """
    sizes = np.abs([cell.error for cell in held_out])
    spreads = [cell.spread for cell in held_out if cell.spread is not None]
    return {
        "cells": len(held_out),
        "median": float(np.median(sizes)) if held_out else None,
        "p90": float(np.quantile(sizes, 0.9)) if held_out else None,
        "noise": float(np.median(spreads)) if spreads else None,
    }


def large(fit: Fit) -> list[Cell]:
    """Held-out cells above 1 MiB, to which the targets apply."""
    return [cell for cell in fit.held_out if cell.call.size_bytes > LARGE_BYTES]


def grouped(fit: Fit) -> dict[str, dict[str, dict[str, Any]]]:
    """`errors_of` by size class, and above 1 MiB by what was asked and by what NCCL ran."""

    def size_class(cell: Cell) -> str:
        return next(name for end, name in _CLASSES if cell.call.size_bytes <= end)

    def errors_by(cells: Iterable[Cell], name: Callable[[Cell], str]) -> dict[str, dict[str, Any]]:
        groups: dict[str, list[Cell]] = {}
        for cell in cells:
            groups.setdefault(name(cell), []).append(cell)
        return {key: errors_of(group) for key, group in groups.items()}

    return {
        "by_size": errors_by(fit.held_out, size_class),
        "by_config": errors_by(large(fit), lambda cell: cell.label),
        "by_physics": errors_by(large(fit), lambda cell: cell.key),
    }


def misses(fit: Fit) -> list[str]:
    """The targets that are missed, as lines of text; empty when all are met."""
    errors = errors_of(large(fit))
    if not errors["cells"]:
        return ["no cell above 1 MiB was held out"]
    noise = errors["noise"] or 0.0
    bars = (
        ("median", errors["median"], max(BAR_MEDIAN, noise)),
        ("90th percentile", errors["p90"], max(BAR_P90, 2 * noise)),
    )
    return [
        f"{name} error {value:.1%} is above the bar of {bar:.1%}"
        for name, value, bar in bars
        if value > bar
    ]


def worst(fit: Fit, count: int = 10) -> list[Cell]:
    """The cells above 1 MiB with the largest errors."""
    return sorted(large(fit), key=lambda cell: -abs(np.log1p(cell.error)))[:count]


def to_json(fit: Fit) -> dict[str, Any]:
    """The report as a JSON document."""
    errors = errors_of(large(fit))
    return {
        "system": fit.file.name,
        "held_out_above_1mib": errors if errors["cells"] else None,
        "misses": misses(fit),
        **grouped(fit),
        "worst": [
            {
                "config": cell.label,
                "runs": cell.key,
                "num_channels": cell.work.num_channels,
                "size_bytes": cell.call.size_bytes,
                "measured_us": cell.time_us,
                "predicted_us": cell.predicted_us,
            }
            for cell in worst(fit)
        ],
        "left_out": fit.left_out,
        "at_bound": fit.at_bound,
    }


def show(fit: Fit, console: Console) -> None:
    """Print the fit: parameters, errors, missed targets, cells with the largest errors."""
    titles = (
        "sizes, all",
        "sizes above 1 MiB, by what was asked",
        "sizes above 1 MiB, by what ran",
    )
    for title, groups in zip(titles, grouped(fit).values(), strict=True):
        table = Table(title=f"held-out {title}", title_justify="left")
        for heading in ("", "cells", "median error", "90th percentile", "repeat noise"):
            table.add_column(heading, justify="left" if not heading else "right")
        for name, one in groups.items():
            cells = (str(one["cells"]), f"{one['median']:.1%}", f"{one['p90']:.1%}")
            table.add_row(name, *cells, "-" if one["noise"] is None else f"{one['noise']:.1%}")
        console.print(table)
    for line in _lines(fit):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _lines(fit: Fit) -> list[str]:
    errors, missed, lines = errors_of(large(fit)), misses(fit), list[str]()
    if errors["cells"]:
        noise = "unknown" if errors["noise"] is None else f"{errors['noise']:.1%}"
        lines.append(
            f"above 1 MiB: median error {errors['median']:.1%}, 90th percentile "
            f"{errors['p90']:.1%}, repeat noise {noise}, {errors['cells']} held-out cells"
        )
    lines += [f"missed: {line}" for line in missed]
    if missed:
        lines += [
            f"  off by {cell.error:+.0%}: {cell.label} at {cell.call.size_bytes} bytes, {cell.key} "
            f"on {cell.work.num_channels} channels: measured {cell.time_us:.1f} us, predicted "
            f"{cell.predicted_us:.1f} us"
            for cell in worst(fit, 5)
        ]
    lines += [f"left out, {count} cells: {reason}" for reason, count in fit.left_out.items()]
    return lines + [f"at a bound of its range: {name}" for name in fit.at_bound]


def plot_errors(fit: Fit, folder: Path) -> Path:
    """Draw held-out errors over size, by algorithm and protocol; return the PNG's path.

    Raises MachineError without matplotlib.
    """
    figure = figure_class()(figsize=(9.0, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    for index, key in enumerate(sorted({cell.key for cell in fit.held_out})):
        mine = [cell for cell in fit.held_out if cell.key == key]
        sizes = [cell.call.size_bytes for cell in mine]
        errors = [100.0 * cell.error for cell in mine]
        axes.plot(sizes, errors, _MARKS[index % len(_MARKS)], label=key, markersize=4, alpha=0.7)
    axes.axhline(0.0, color="black", linewidth=0.8)
    for edge in (-100.0 * BAR_P90, 100.0 * BAR_P90):
        axes.axhline(edge, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    ticks = sorted({cell.call.size_bytes for cell in fit.held_out})
    shown = [size for size in ticks if size & (size - 1) == 0][::3] or ticks
    axes.set_xticks(shown, [size_label(size) for size in shown])
    axes.set_xlabel("message size")
    axes.set_ylabel("predicted over measured, % off")
    axes.set_title(f"{fit.file.name}: sizes that the fit has not seen")
    figure.legend(loc="outside right upper", fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{fit.file.name}.png"
    figure.savefig(path, dpi=120)
    return path
