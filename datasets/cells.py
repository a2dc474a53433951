"""Tasks, cells and noise: the grouping that describe, reward and evaluate share.

The *noise band* of a system is what nine in ten of its configs repeat within: two measurements of
one config differ by less, so a smaller difference between two configs says nothing.

A *task* is what the job asked and where (schema.TASK_COLUMNS). A *cell* is a task and the config
that was requested for it, in place or not; the default is the cell with `is_default`. A repeat is
an independent measurement of one cell (REPEAT_COLUMNS); its time is the median over its repeats.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.schema import QUIET, REQUESTED_COLUMNS, TASK_COLUMNS, DefaultScope, Status
from dynamiccl.datasets.splits import with_bins
from dynamiccl.nccl import NcclVersion

#: Columns that identify the requested config within a task.
CONFIG_COLUMNS: Final = ("is_default", *REQUESTED_COLUMNS)
PLACED_COLUMNS: Final = (*TASK_COLUMNS, "in_place")
CELL_COLUMNS: Final = (*PLACED_COLUMNS, *CONFIG_COLUMNS)
#: What makes two measurements of a cell independent. Sweeps name their runs alike, and a run counts
#: the default's repeats from 0 twice: untouched, and under our plugin.
REPEAT_COLUMNS: Final = ("sweep", "run", "repeat", "default_scope")
#: With more repeats the spread is computed from this many quantiles: pairs grow quadratically.
_MAX_PAIRED: Final = 256
#: Columns of a group with its own noise band.
NOISE_KEY: Final = ("system", "collective")
#: Columns that show unhealthy GPUs if true or above 0; null (unknown) counts as healthy.
UNWELL_COLUMNS: Final = ("throttled", "ecc_errors")
_IS_TIMED: Final = (
    (pl.col("status") == Status.OK.value)
    & pl.col("time_us").is_not_null()
    & (pl.col("time_us") > 0)
)
_IS_UNWELL: Final = pl.any_horizontal(
    (pl.col(name) > 0).fill_null(value=False) for name in UNWELL_COLUMNS
)
_IS_ALONE: Final = (pl.col("interference_kind") == QUIET) & pl.col("num_comms").is_null()
_IS_USABLE: Final = _IS_TIMED & ~_IS_UNWELL


def usable(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows with a time of a successful collective on healthy GPUs.

    Times affected by throttling or memory errors say nothing about a config: such a row stays on
    disk, but is used in no reference, noise band, verdict or training.
    """
    return frame.filter(_IS_USABLE)


def is_unwell(row: Mapping[str, Any]) -> bool:
    """Whether `usable` leaves a row out because its GPUs were throttled or had memory errors."""
    return any(row.get(name) for name in UNWELL_COLUMNS)


def left_out(frame: pl.DataFrame) -> dict[str, int]:
    """How many rows with a time `usable` leaves out, by reason; a row may count under both."""
    timed = frame.filter(_IS_TIMED)
    return {name: timed.filter(pl.col(name) > 0).height for name in UNWELL_COLUMNS}


def left_out_text(counts: Mapping[str, int]) -> str:
    """The counts of `left_out` as text.

    >>> left_out_text({"throttled": 3, "ecc_errors": 0}), left_out_text({"throttled": 0})
    ('3 throttled', 'none')
    """
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "none"


def tuned(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of collectives that NCCL asks a tuner about."""
    return frame.filter(pl.col("collective").is_in([c.wire for c in TUNED]))


def asking(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls of the table `calls` about which NCCL asks a tuner, of a known size, with its `bin`."""
    return tuned(with_bins(calls)).filter(pl.col("asks_tuner").fill_null(value=True))


def nodes_of(shapes: set[tuple[int, int]]) -> dict[int, int]:
    """Number of ranks -> nodes, where one of the shapes (nodes, ranks) alone has so many ranks."""
    count = Counter(ranks for _, ranks in shapes)
    return {ranks: nodes for nodes, ranks in shapes if count[ranks] == 1}


def quiet(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows measured without interference: a cold observation cannot show interference."""
    return frame.filter(_IS_ALONE)


def interfered(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows measured beside deliberate interference, or beside other communicators."""
    return frame.filter(~_IS_ALONE)


def comparable(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows that may be used in a verdict on a forced config against NCCL's default.

    Left out are rows from shared nodes and MIG instances (their times are not the machine's), and
    the default measured under our plugin where the untouched one was measured as well.
    """
    return _one_default(
        frame.filter(
            pl.col("exclusive_node").fill_null(value=True) & ~pl.col("mig").fill_null(value=False)
        )
    )


def _one_default(frame: pl.DataFrame) -> pl.DataFrame:
    """Drop the default measured under our plugin, for tasks with a usable untouched one."""
    is_default = pl.col("is_default")
    untouched = pl.col("default_scope") == DefaultScope.UNTOUCHED.value
    known = (is_default & untouched & _IS_USABLE).any().over(PLACED_COLUMNS)
    return frame.filter(~(is_default & ~untouched & known))


def of_minor_release(frame: pl.DataFrame, version: str | None) -> pl.DataFrame:
    """Rows measured under the minor release of a NCCL version; None: under one not known."""
    wanted, minor = NcclVersion.minor_of(version), NcclVersion.minor_of
    same = [each for each in frame["nccl_version"].unique() if minor(each) == wanted]
    return frame.filter(pl.col("nccl_version").is_in(same, nulls_equal=True))


def run_names(frame: pl.DataFrame) -> list[str]:
    """`system/sweep/run` of every run that has rows, sorted."""
    names = frame.select(pl.concat_str(["system", "sweep", "run"], separator="/")).to_series()
    return [str(name) for name in names.unique().sort()]


def independent(frame: pl.DataFrame) -> pl.DataFrame:
    """Usable rows, one for each independent repeat of a cell.

    Two rows of one repeat are one measurement printed twice and count once.
    """
    key = [*CELL_COLUMNS, *REPEAT_COLUMNS]
    return usable(frame).unique(key, keep="first", maintain_order=True)


def beside_default(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of placements in which NCCL's default was measured; all of tasks without any default."""
    default = (pl.col("is_default") & _IS_USABLE).any()
    return frame.filter(default.over(PLACED_COLUMNS) | ~default.over(TASK_COLUMNS))


def one_placement(frame: pl.DataFrame) -> pl.DataFrame:
    """Independent repeats with times in place and out of place as one; `in_place` is null.

    A time counts over that of NCCL's default in the same placement, so that a config that was timed
    in one placement only, in some run or in all, is not judged by what placements differ by. A
    repeat with both counts once, with the geometric mean: where none is missing it is that of the
    two times. A placement without the default is left out (`beside_default`).
    """
    once = independent(beside_default(frame))
    log, offset = pl.col("time_us").log(), pl.col("_offset")
    own = once.filter("is_default").group_by(PLACED_COLUMNS).agg(_own=log.median())
    own = own.with_columns(_offset=pl.col("_own").mean().over(TASK_COLUMNS) - pl.col("_own"))
    repeat = [*TASK_COLUMNS, *CONFIG_COLUMNS, *REPEAT_COLUMNS]
    # Of a single time it is 0, which changes no digit.
    exponent = (log + offset.fill_null(0.0)).mean().over(repeat) - log
    return (
        once.join(own, on=PLACED_COLUMNS, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(pl.col("time_us") * exponent.exp(), in_place=None)
        .drop("_own", "_offset")
        .unique(repeat, keep="first", maintain_order=True)
    )


def cell_times(frame: pl.DataFrame) -> pl.DataFrame:
    """One row per cell: `time_us` (median over independent repeats), `repeats`, `spread`.

    `spread` = by how much two repeats differ (`pair_spread`; null for a single one).
    """
    time = pl.col("time_us")
    return (
        independent(frame)
        .group_by(CELL_COLUMNS, maintain_order=True)
        .agg(repeats=pl.len(), spread=time.implode(), time_us=time.median())
        .with_columns(pl.col("spread").map_elements(pair_spread, return_dtype=pl.Float64))
    )


def pair_spread(times_us: Sequence[float] | pl.Series) -> float | None:
    """Relative difference of two repeats: median over all pairs of slower / faster - 1.

    None for fewer than two repeats: their noise is not known. It does not grow with the number of
    repeats, as the range would.

    >>> round(pair_spread([100.0, 102.0, 104.0]), 4)
    0.02
    """
    times = np.sort(np.asarray(times_us, dtype=np.float64))
    if len(times) < 2:
        return None
    if len(times) > _MAX_PAIRED:
        times = np.quantile(times, np.linspace(0.0, 1.0, _MAX_PAIRED))
    ratios = times[None, :] / times[:, None]
    return float(np.median(ratios[np.triu_indices(len(times), k=1)]) - 1.0)


def noise_bands(frame: pl.DataFrame, by: Sequence[str] = ("system",)) -> pl.DataFrame:
    """Per `by` the `noise_band` (90th percentile of the cells' spread) and the `noise_median`.

    Both are unitless. Groups without a repeated cell are absent: their noise is not known.
    """
    return (
        # The two kinds of default differ by more than noise.
        cell_times(_one_default(frame))
        .drop_nulls("spread")
        .group_by(list(by), maintain_order=True)
        .agg(noise_band=pl.col("spread").quantile(0.9), noise_median=pl.col("spread").median())
    )
