"""The cells common to two sweeps, as log times by run, with run effects removed."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.cells import CONFIG_COLUMNS, comparable, independent, quiet
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.errors import NotEnoughData

#: What an upgrade may change, and what is a repeat here: both placements of one launch.
_MAY_DIFFER: Final = ("nccl_version", "gpu", "in_place")
GROUP_COLUMNS: Final = tuple(c for c in TASK_COLUMNS if c not in {*_MAY_DIFFER, "size_bytes"})
CELL: Final = (*GROUP_COLUMNS, "size_bytes", *CONFIG_COLUMNS)
#: What all sizes of one config in one group share.
LINE: Final = tuple(c for c in CELL if c != "size_bytes")
_LEAST_RUNS: Final = 2
#: Rounds of taking out what a run shares; it converges in two where all runs hold all cells.
_ROUNDS: Final = 4
#: Cells of like size from which a spread, or a variance, is taken.
LIKE: Final = 30
#: How many standard deviations from the median a time is winsorised.
_LIMIT: Final = 2.0

Logs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Side:
    """One sweep."""

    #: (cells, runs): log times without what a run shares; NaN = not measured.
    raw: Logs
    #: The same, winsorised.
    winsorised: Logs
    #: (runs,): what each run's cells have in common, less the mean over runs.
    drift: Logs


@dataclass(frozen=True, slots=True)
class Paired:
    """Both sweeps over the cells that they share."""

    #: A row a cell, the columns CELL.
    cells: pl.DataFrame
    old: Side
    new: Side
    #: (cells,): standard deviation of a log time about its side's median, from cells of like size.
    spread: Logs
    #: Cells that one sweep alone has.
    only_old: int
    only_new: int


def pair(old: pl.DataFrame, new: pl.DataFrame) -> Paired:
    """Match two measurement frames cell by cell.

    Raises NotEnoughData when they share no cell, or one of them has a single run: then the
    difference between runs is not known.
    """
    placed = [_by_run(frame) for frame in (old, new)]
    both = [*CELL, "in_place"]
    shared = (
        placed[0]
        .select(both)
        .unique()
        .join(placed[1].select(both).unique(), on=both, how="inner", nulls_equal=True)
    )
    if shared.is_empty():
        raise NotEnoughData(_nothing_shared(old, new))
    cells = shared.select(CELL).unique().sort(CELL, nulls_last=True).with_row_index("cell")
    sides = []
    for name, frame in zip(("old", "new"), placed, strict=True):
        rows = frame.join(shared, on=both, how="semi", nulls_equal=True)
        runs = rows["name"].unique().sort()
        if len(runs) < _LEAST_RUNS:
            raise NotEnoughData(
                f"the {name} sweep has one run ({runs[0]}), and what two runs differ by anyway is "
                "not known from it: measure with cycles = 3 or more"
            )
        at = rows.join(cells, on=list(CELL), nulls_equal=True).join(
            pl.DataFrame({"name": runs}).with_row_index("run_index"), on="name"
        )
        logs = np.full((cells.height, len(runs)), np.nan)
        # Placements differ by an offset of their own, which is the same on both sides.
        means = at.group_by("cell", "run_index").agg(pl.col("log").mean())
        logs[means["cell"].to_numpy(), means["run_index"].to_numpy()] = means["log"].to_numpy()
        sides.append(_side(logs))
    sides, spread = _winsorised(sides, cells["size_bytes"].to_numpy())
    counts = [frame.select(CELL).unique().height - cells.height for frame in placed]
    return Paired(cells, sides[0], sides[1], spread, counts[0], counts[1])


def _by_run(frame: pl.DataFrame) -> pl.DataFrame:
    rows = independent(comparable(quiet(frame)))
    name = pl.concat_str(["sweep", "run"], separator="/")
    return rows.group_by(*CELL, "in_place", name.alias("name")).agg(
        log=pl.col("time_us").log().mean()
    )


def _side(logs: Logs) -> Side:
    """Subtract each run's median effect: a config that changed in one run does not count for it."""
    drift = np.zeros(logs.shape[1])
    for _ in range(_ROUNDS):
        left = logs - drift
        rest = left - np.nanmean(left, axis=1, keepdims=True)
        drift = drift + np.nanmedian(rest, axis=0)
        drift -= drift.mean()
    return Side(logs - drift, logs - drift, drift)


def _winsorised(sides: list[Side], sizes: npt.NDArray[np.int64]) -> tuple[list[Side], Logs]:
    """Pull outliers towards their cell's median, by the spread of cells of similar size.

    One launch in a hundred takes twice as long (Huber's estimate of location, one step).
    """
    centres = [np.nanmedian(side.winsorised, axis=1, keepdims=True) for side in sides]
    rests = np.hstack([side.winsorised - c for side, c in zip(sides, centres, strict=True)])
    order = np.argsort(sizes, kind="stable")
    spread = np.empty((len(order), 1))
    for at, cell in enumerate(order):
        first = max(0, min(at - LIKE // 2, len(order) - LIKE))
        like = rests[order[first : first + LIKE]]
        # From medians of few, the rest is too small: by about one in as many.
        spread[cell] = 1.4826 * np.nanmedian(np.abs(like[like != 0.0])) if like.any() else 0.0
    limit = _LIMIT * spread
    winsorised = [
        Side(side.raw, np.clip(side.raw, c - limit, c + limit), side.drift)
        for side, c in zip(sides, centres, strict=True)
    ]
    return winsorised, spread[:, 0]


def _nothing_shared(old: pl.DataFrame, new: pl.DataFrame) -> str:
    reasons = []
    for column in ("system", "collective", "num_nodes", "ranks_per_node"):
        one, other = (sorted(map(str, frame[column].unique())) for frame in (old, new))
        if not set(one) & set(other):
            reasons.append(
                f"{column} is {', '.join(one)} in one and {', '.join(other)} in the other"
            )
    return "the two sweeps share no cell: " + ("; ".join(reasons) or "no size or config is in both")
