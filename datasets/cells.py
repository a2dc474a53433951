"""Tasks, cells and noise: the grouping that describe, reward and evaluate share; scored tasks.

A *task* is what the job asked and where (schema.TASK_COLUMNS). A *cell* is a task and the config
that was requested for it, in place or not; its time is the median over independent repeats. The
*noise band* of a collective on a system is what nine in ten of its configs repeat within.

A `TaskGrid` has tasks with the measured time of every action, against which choices are scored, on
validation by training and on test by evaluation, so both mean the same by regret:

    regret = time(chosen) / min over measured actions of time - 1

Its times count in place and out of place as one. ABSTAIN is an action like the others: its time is
that of NCCL's default. Interfered tasks are left out: a cold observation cannot see what disturbed
them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.features import ENVIRONMENT_COLUMNS, TUNED
from dynamiccl.datasets.schema import QUIET, REQUESTED_COLUMNS, TASK_COLUMNS, DefaultScope, Status
from dynamiccl.datasets.splits import Split, with_bins, with_split
from dynamiccl.drawn_worlds import Floats, Ints
from dynamiccl.nccl import NcclVersion
from dynamiccl.repeats import cells_of

CONFIG_COLUMNS: Final = ("is_default", *REQUESTED_COLUMNS)
PLACED_COLUMNS: Final = (*TASK_COLUMNS, "in_place")
CELL_COLUMNS: Final = (*PLACED_COLUMNS, *CONFIG_COLUMNS)
#: Sweeps name their runs alike; a run counts the default's repeats once for each scope.
REPEAT_COLUMNS: Final = ("sweep", "run", "repeat", "default_scope")
#: What fails here is not trusted under any NCCL release or interference.
FAILED_WHERE: Final = ("system", "num_nodes", "ranks_per_node", "launch_profile", "collective")
#: With more repeats, the spread is computed from this many quantiles: pairs grow quadratically.
_MAX_PAIRED: Final = 256
NOISE_KEY: Final = ("system", "collective")
#: True or above 0: unhealthy GPUs; null counts as healthy.
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
_IS_KNOWN: Final = pl.col("is_default") | pl.any_horizontal(pl.col(REQUESTED_COLUMNS).is_not_null())
MIN_FORCED: Final = 2


def usable(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows with a time of a successful collective on healthy GPUs; no others are trained on."""
    return frame.filter(_IS_USABLE)


def is_unwell(row: Mapping[str, Any]) -> bool:
    """Whether the row's GPUs were throttled or had memory errors."""
    return any(row.get(name) for name in UNWELL_COLUMNS)


def left_out(frame: pl.DataFrame) -> dict[str, int]:
    """How many timed rows `usable` leaves out, by reason; a row may count under both."""
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
    """Calls about which NCCL asks a tuner, of a known size, with `bin`."""
    return tuned(with_bins(calls)).filter(pl.col("asks_tuner").fill_null(value=True))


def placed(calls: pl.DataFrame, ranks_per_node: int) -> tuple[pl.DataFrame, int]:
    """Calls of the table `calls` with `num_nodes`, and of how many it is a guess.

    Where the trace does not tell it, a process group lies by `ranks_per_node`: as the trace names
    its ranks, else with all ranks of each node. Null where a group would lie unevenly: such shapes
    nobody measures.
    """
    ranks, is_guessed = pl.col("num_ranks"), pl.col("num_nodes").is_null()
    named = pl.when(pl.col("group_ranks").list.len() > 0).then(pl.col("group_ranks"))
    node = named.list.eval(pl.element() // ranks_per_node)
    full = (ranks // ranks_per_node).clip(1)
    nodes = pl.coalesce(node.list.n_unique(), full).cast(pl.Int64)
    of_each = ranks // nodes
    sizes = node.list.eval(pl.element().unique_counts().n_unique()).list.first().fill_null(1)
    is_even = (of_each * nodes == ranks) & (of_each <= ranks_per_node) & (sizes == 1)
    guessed = calls.filter(is_guessed, ranks > 1).height
    return calls.with_columns(pl.coalesce("num_nodes", pl.when(is_even).then(nodes))), guessed


def quiet(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows measured without interference."""
    return frame.filter(_IS_ALONE)


def interfered(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows measured beside deliberate interference, or beside other communicators."""
    return frame.filter(~_IS_ALONE)


def comparable(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows for verdicts on the default: no shared nodes, no MIG, untouched default if measured."""
    return _one_default(
        frame.filter(
            pl.col("exclusive_node").fill_null(value=True) & ~pl.col("mig").fill_null(value=False)
        )
    )


def _one_default(frame: pl.DataFrame) -> pl.DataFrame:
    is_default = pl.col("is_default")
    untouched = pl.col("default_scope") == DefaultScope.UNTOUCHED.value
    known = (is_default & untouched & _IS_USABLE).any().over(PLACED_COLUMNS)
    return frame.filter(~(is_default & ~untouched & known))


def of_minor_release(frame: pl.DataFrame, version: str | None) -> pl.DataFrame:
    """Rows measured under the minor release of `version`; None: under an unknown one."""
    wanted, minor = NcclVersion.minor_of(version), NcclVersion.minor_of
    same = [each for each in frame["nccl_version"].unique() if minor(each) == wanted]
    return frame.filter(pl.col("nccl_version").is_in(same, nulls_equal=True))


def run_names(frame: pl.DataFrame) -> list[str]:
    """`system/sweep/run` of every run, sorted."""
    names = frame.select(pl.concat_str(["system", "sweep", "run"], separator="/")).to_series()
    return [str(name) for name in names.unique().sort()]


def independent(frame: pl.DataFrame) -> pl.DataFrame:
    """Usable rows, one for each independent repeat: some are printed twice."""
    key = [*CELL_COLUMNS, *REPEAT_COLUMNS]
    return usable(frame).unique(key, keep="first", maintain_order=True)


def with_trust(frame: pl.DataFrame) -> pl.DataFrame:
    """With `is_trusted`: whether a table may be made of a row.

    A config is trusted at sizes below all at which it hung or crashed, an algorithm and protocol
    that computed wrong values nowhere, NCCL's own choice always; what leaves one of the two to NCCL
    may be any. What failed with a time ended, but it is not known as what.
    """
    is_default, names = pl.col("is_default"), ("algorithm", "protocol")
    lost = pl.col("status").is_in([Status.FAILED.value, Status.TIMED_OUT.value])
    lost &= pl.col("time_us").is_null()
    is_wrong = pl.col("status") == Status.WRONG_VALUES.value
    ran = [pl.coalesce(f"requested_{n}", f"actual_{n}").alias(f"requested_{n}") for n in names]
    failed = frame.filter((lost | is_wrong) & ~is_default)
    bad = pl.concat([failed, frame.filter(is_wrong).with_columns(ran)])
    bad = bad.filter(pl.any_horizontal(pl.col(REQUESTED_COLUMNS).is_not_null()))
    config = [*FAILED_WHERE, *REQUESTED_COLUMNS]
    first = pl.when(is_wrong).then(0).otherwise("size_bytes").min()
    bad = bad.group_by(config).agg(_least=first)
    asked = frame.filter(~is_default).select(config).unique()
    pairs = asked.join(bad, on=FAILED_WHERE, nulls_equal=True, suffix="_bad")
    told = [(pl.col(name), pl.col(f"{name}_bad")) for name in REQUESTED_COLUMNS]
    of_cell = [(mine == its).fill_null(value=True) for mine, its in told[:2]]
    of_rest = [mine.eq_missing(its) | (pl.col("_least") == 0) for mine, its in told[2:]]
    least = pairs.filter(*of_cell, *of_rest).group_by(config).agg(pl.col("_least").min())
    found = frame.join(least, on=config, how="left", nulls_equal=True, maintain_order="left")
    is_below = pl.col("_least").is_null() | (pl.col("size_bytes") < pl.col("_least"))
    return found.with_columns(is_trusted=is_default | is_below).drop("_least")


def trusted(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows of which a table may be made."""
    return with_trust(frame).filter("is_trusted").drop("is_trusted")


def beside_default(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of placements with a measured default; all rows of tasks without any default."""
    default = (pl.col("is_default") & _IS_USABLE).any()
    return frame.filter(default.over(PLACED_COLUMNS) | ~default.over(TASK_COLUMNS))


def one_placement(frame: pl.DataFrame) -> pl.DataFrame:
    """Independent repeats with times in place and out of place as one; `in_place` is null.

    Relative to the default of each placement: configs timed in one only are judged fairly.
    """
    once = independent(beside_default(frame))
    log, offset = pl.col("time_us").log(), pl.col("_offset")
    own = once.filter("is_default").group_by(PLACED_COLUMNS).agg(_own=log.median())
    own = own.with_columns(_offset=pl.col("_own").mean().over(TASK_COLUMNS) - pl.col("_own"))
    repeat = [*TASK_COLUMNS, *CONFIG_COLUMNS, *REPEAT_COLUMNS]
    exponent = (log + offset.fill_null(0.0)).mean().over(repeat) - log
    return (
        once.join(own, on=PLACED_COLUMNS, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(pl.col("time_us") * exponent.exp(), in_place=None)
        .drop("_own", "_offset")
        .unique(repeat, keep="first", maintain_order=True)
    )


def cell_times(frame: pl.DataFrame) -> pl.DataFrame:
    """One row per cell: median `time_us`, `repeats`, and `spread` (`pair_spread`)."""
    time = pl.col("time_us")
    return (
        independent(frame)
        .group_by(CELL_COLUMNS, maintain_order=True)
        .agg(repeats=pl.len(), spread=time.implode(), time_us=time.median())
        .with_columns(pl.col("spread").map_elements(pair_spread, return_dtype=pl.Float64))
    )


def pair_spread(times_us: Sequence[float] | pl.Series) -> float | None:
    """Median over pairs of slower / faster - 1: a range would grow with repeats. None below two.

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


def noise_bands(frame: pl.DataFrame) -> pl.DataFrame:
    """`noise_band` by NOISE_KEY: 90th percentile of the cells' spread."""
    return (
        cell_times(_one_default(frame))
        .drop_nulls("spread")
        .group_by(NOISE_KEY, maintain_order=True)
        .agg(noise_band=pl.col("spread").quantile(0.9))
    )


@dataclass(frozen=True, slots=True)
class TaskGrid:
    """T tasks and A actions, with measured times."""

    #: (T rows) task, environment, `bin` and `split` columns.
    tasks: pl.DataFrame
    #: (T, A) median us; NaN where not measured.
    times_us: npt.NDArray[np.float64]
    repeats: npt.NDArray[np.int64]
    #: Tasks that are not scored, with the reason in `unscored`.
    unscored: pl.DataFrame
    #: (task, action) -> us of each independent repeat.
    samples: Mapping[tuple[int, int], npt.NDArray[np.float64]]
    #: The same keys -> number of the run of each repeat.
    runs: Mapping[tuple[int, int], npt.NDArray[np.int64]] = field(default_factory=dict)
    #: (T, A) channels read back: the most of a config, the fewest of NCCL's own choice; else NaN.
    channels: npt.NDArray[np.float64] | None = None

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """(T, A) which were measured."""
        return ~np.isnan(self.times_us)

    @property
    def oracle_us(self) -> npt.NDArray[np.float64]:
        """(T,) best measured us."""
        best: npt.NDArray[np.float64] = np.nanmin(self.times_us, axis=1)
        return best

    @property
    def default_us(self) -> npt.NDArray[np.float64]:
        """(T,) us of NCCL's own choice."""
        return self.times_us[:, ABSTAIN_ACTION]

    def cells(
        self,
        rows: Ints,
        at: Ints,
        actions: Ints,
        log2_sizes: Sequence[float],
        left_out: Sequence[int] = (),
    ) -> tuple[Ints, Floats, Floats, Floats, Ints]:
        """(n,) ascending places, ln us, variances, numbers of repeats, and tasks, of a table.

        `at` numbers the sizes of `rows`; place = size x actions + number.
        """
        count, row_of = len(actions), dict[int, int]()
        times = dict[Hashable, list[tuple[int, float]]]()
        log2_size = dict[Hashable, float]()
        for row, size in zip(rows.tolist(), at.tolist(), strict=True):
            for number in np.flatnonzero(self.mask[row, actions]).tolist():
                place, cell = size * count + number, (row, int(actions[number]))
                logs = np.log(self.samples[cell]).tolist()
                told = sorted(zip(self.runs[cell].tolist(), logs, strict=True))
                if kept := [each for each in told if each[0] not in left_out]:
                    row_of[place], log2_size[place] = row, log2_sizes[size]
                    times[place] = kept
        found = cells_of(times, log2_size, range(0, len(log2_sizes) * count, count))
        order = sorted(row_of)
        log_us, variance, repeats = np.array([found[place] for place in order]).T
        return np.array(order), log_us, variance, repeats, np.array([row_of[p] for p in order])

    def joined(self, other: Self) -> Self:
        """The tasks of both, without the samples behind their times."""
        return replace(
            self,
            tasks=pl.concat([self.tasks, other.tasks]),
            times_us=np.vstack([self.times_us, other.times_us]),
            repeats=np.vstack([self.repeats, other.repeats]),
            samples={},
            runs={},
            channels=None,
        )

    def chosen_us(self, actions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """(T,) us; raises ValueError for an action that was not measured."""
        times = self.times_us[np.arange(len(actions)), actions]
        if np.isnan(times).any():
            raise ValueError("a policy chose an action that was not measured: its mask was ignored")
        return times

    def regret(self, actions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """(T,) time / oracle - 1."""
        return self.chosen_us(actions) / self.oracle_us - 1.0


_LEFT_OUT: Final[Mapping[str, Callable[[pl.DataFrame], pl.DataFrame]]] = {
    "from the size on at which a config failed, or of one that computed wrong values": trusted,
    "without a time of healthy GPUs": usable,
    "of collectives that no tuner is asked about": tuned,
    "of shared nodes, MIG instances or the plugin's default": comparable,
    "of a placement without NCCL's default": beside_default,
    "of a config that is not known": lambda rows: rows.filter(_IS_KNOWN),
    "of a size without a bin": with_split,
}


def rows_left_out(frame: pl.DataFrame) -> dict[str, int]:
    """How many rows are in no task of `task_grid`, by the first reason."""
    beside = interfered(frame)["interference_kind"].replace(QUIET, "other communicators")
    kinds = beside.value_counts().sort("count", "interference_kind", descending=True)
    counts = {f"beside {kind}": rows for kind, rows in kinds.rows()}
    rows = quiet(frame)
    for reason, keep in _LEFT_OUT.items():
        kept = keep(rows)
        counts[reason], rows = rows.height - kept.height, kept
    return {reason: count for reason, count in counts.items() if count}


def task_grid(frame: pl.DataFrame, catalogue: Catalogue, splits: Sequence[Split]) -> TaskGrid:
    """The scored tasks of some splits, in a stable order."""
    wanted = [split.value for split in splits]
    rows = with_split(comparable(quiet(trusted(tuned(frame)))))
    rows = one_placement(rows.filter(pl.col("split").is_in(wanted)))
    in_run = pl.struct("sweep", "run").rank("dense").alias("in_run")
    rows = rows.with_columns(catalogue.actions(rows), in_run)
    grouped = rows.drop_nulls("action").group_by([*TASK_COLUMNS, "action"], maintain_order=True)
    used, is_own = pl.col("actual_num_channels"), pl.col("action").first() == ABSTAIN_ACTION
    most = pl.when(is_own).then(used.min()).otherwise(used.max())
    told = {"median_us": pl.col("time_us").median(), "channels": most}
    found = grouped.agg("time_us", "in_run", repeats=pl.len(), **told)
    facts = [pl.col(name).drop_nulls().first() for name in ENVIRONMENT_COLUMNS]
    simulated = (pl.col("source") == "simulator").all().alias("simulated")
    tasks = rows.group_by([*TASK_COLUMNS, "bin", "split"], maintain_order=True)
    listed = tasks.agg(*facts, simulated)
    listed = listed.join(_verdicts(found), on=TASK_COLUMNS, how="inner", nulls_equal=True)
    scored = listed.filter(pl.col("reason").is_null()).drop("reason")
    scored = scored.sort(TASK_COLUMNS).with_row_index("task")
    times = np.full((scored.height, len(catalogue)), np.nan)
    repeats = np.zeros((scored.height, len(catalogue)), dtype=np.int64)
    placed = found.join(scored.select("task", *TASK_COLUMNS), on=TASK_COLUMNS, nulls_equal=True)
    index = placed["task"].to_numpy(), placed["action"].to_numpy()
    times[index] = placed["median_us"].to_numpy()
    channels = np.full(times.shape, np.nan)
    channels[index] = placed["channels"].to_numpy()
    repeats[index] = placed["repeats"].to_numpy()
    samples = dict[tuple[int, int], npt.NDArray[np.float64]]()
    runs = dict[tuple[int, int], npt.NDArray[np.int64]]()
    columns = ("task", "action", "time_us", "in_run")
    for task, action, each_us, each_run in placed.select(columns).iter_rows():
        samples[task, action] = np.asarray(each_us, dtype=np.float64)
        runs[task, action] = np.asarray(each_run, dtype=np.int64)
    unscored = listed.filter(pl.col("reason").is_not_null()).rename({"reason": "unscored"})
    unscored = unscored.sort(TASK_COLUMNS)
    return TaskGrid(scored.drop("task"), times, repeats, unscored, samples, runs, channels)


def _verdicts(found: pl.DataFrame) -> pl.DataFrame:
    forced = (pl.col("action") != ABSTAIN_ACTION).sum()
    default = (pl.col("action") == ABSTAIN_ACTION).any()
    reason = (
        pl.when(forced < MIN_FORCED)
        .then(pl.lit(f"fewer than {MIN_FORCED} forced configs measured"))
        .when(~default)
        .then(pl.lit("NCCL's default was not measured"))
    )
    return found.group_by(TASK_COLUMNS, maintain_order=True).agg(reason=reason)
