"""Tasks with the measured time of every action, against which choices are scored.

Used on validation by training and on test by evaluation, so both mean the same by regret:

    regret = time(chosen) / min over measured actions of time - 1

Times are medians over independent repeats, in place and out of place as one. ABSTAIN is an action
like the others: its time is the measured time of NCCL's default. Interfered tasks are left out: a
cold observation cannot see what disturbed them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets import cells
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.schema import QUIET, REQUESTED_COLUMNS, TASK_COLUMNS
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.drawn_worlds import Floats, Ints
from dynamiccl.repeats import cells_of

#: Columns of the schema that describe where a task ran, besides those that identify it.
ENVIRONMENT_COLUMNS: Final = (
    *("num_ranks", "compute_capability", "nvlink_generation", "nvlinks_per_gpu", "nvswitch"),
    *("nic_kind", "nic_gbits_per_s", "nics_per_node", "cpu_vendor"),
)
_IS_KNOWN: Final = pl.col("is_default") | pl.any_horizontal(pl.col(REQUESTED_COLUMNS).is_not_null())
#: What makes quiet rows part of no task, and what leaves such rows out.
_LEFT_OUT: Final[Mapping[str, Callable[[pl.DataFrame], pl.DataFrame]]] = {
    "without a time of healthy GPUs": cells.usable,
    "of collectives that no tuner is asked about": cells.tuned,
    "of shared nodes, MIG instances or the plugin's default": cells.comparable,
    "of a placement without NCCL's default": cells.beside_default,
    "of a config that is not known": lambda rows: rows.filter(_IS_KNOWN),
    "of a size without a bin": with_split,
}
#: Minimum number of measured forced configs of a scored task.
MIN_FORCED: Final = 2


@dataclass(frozen=True, slots=True)
class TaskGrid:
    """T tasks and A actions, with measured times."""

    #: (T rows) task, environment, `bin` and `split` columns.
    tasks: pl.DataFrame
    #: (T, A) median time in us; NaN where the action was not measured.
    times_us: npt.NDArray[np.float64]
    #: (T, A) independent repeats behind each time.
    repeats: npt.NDArray[np.int64]
    #: Tasks that are listed and not scored, with the reason in `unscored`.
    unscored: pl.DataFrame
    #: (task, action) -> times in us of the independent repeats behind each measured time.
    samples: Mapping[tuple[int, int], npt.NDArray[np.float64]]
    #: The same keys -> the number of the run that each was measured in, where it is told.
    runs: Mapping[tuple[int, int], npt.NDArray[np.int64]] = field(default_factory=dict)
    #: (T, A) channels that were read back, of a config the most and of NCCL's own choice the
    #: fewest, NaN where none were; None: not asked for.
    channels: npt.NDArray[np.float64] | None = None

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """(T, A) whether each action was measured."""
        return ~np.isnan(self.times_us)

    @property
    def oracle_us(self) -> npt.NDArray[np.float64]:
        """(T,) best measured time, us."""
        best: npt.NDArray[np.float64] = np.nanmin(self.times_us, axis=1)
        return best

    @property
    def default_us(self) -> npt.NDArray[np.float64]:
        """(T,) measured time of NCCL's own choice, us."""
        return self.times_us[:, ABSTAIN_ACTION]

    def cells(
        self,
        rows: Ints,
        at: Ints,
        actions: Ints,
        log2_sizes: Sequence[float],
        left_out: Sequence[int] = (),
    ) -> tuple[Ints, Floats, Floats, Floats, Ints]:
        """What some tasks say of a table of sizes and actions, ascending by place.

        `rows` are the tasks and `at` the numbers of their sizes; runs that are `left_out` say
        nothing. Returns (n,) places, size x actions + number of the action; ln us, its variance,
        how many repeats; and the task.
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

    def take(self, rows: npt.NDArray[np.int64]) -> Self:
        """The tasks `rows`, without the samples behind their times."""
        parts = {"times_us": self.times_us[rows], "repeats": self.repeats[rows]}
        return self._without_samples(tasks=self.tasks[rows], **parts)

    def joined(self, other: Self) -> Self:
        """The tasks of both, without the samples behind their times."""
        return self._without_samples(
            tasks=pl.concat([self.tasks, other.tasks]),
            times_us=np.vstack([self.times_us, other.times_us]),
            repeats=np.vstack([self.repeats, other.repeats]),
        )

    def _without_samples(self, **parts: Any) -> Self:
        return replace(self, samples={}, runs={}, channels=None, **parts)

    def chosen_us(self, actions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """(T,) us of each chosen action; raises ValueError when one was not measured."""
        times = self.times_us[np.arange(len(actions)), actions]
        if np.isnan(times).any():
            raise ValueError("a policy chose an action that was not measured: its mask was ignored")
        return times

    def regret(self, actions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """(T,) regret of each chosen action: time / oracle - 1."""
        return self.chosen_us(actions) / self.oracle_us - 1.0


def rows_left_out(frame: pl.DataFrame) -> dict[str, int]:
    """How many rows of a data set are in no task of `task_grid`, by its first reason."""
    beside = cells.interfered(frame)["interference_kind"].replace(QUIET, "other communicators")
    kinds = beside.value_counts().sort("count", "interference_kind", descending=True)
    counts = {f"beside {kind}": rows for kind, rows in kinds.rows()}
    rows = cells.quiet(frame)
    for reason, keep in _LEFT_OUT.items():
        kept = keep(rows)
        counts[reason], rows = rows.height - kept.height, kept
    return {reason: count for reason, count in counts.items() if count}


def task_grid(frame: pl.DataFrame, catalogue: Catalogue, splits: Sequence[Split]) -> TaskGrid:
    """The scored tasks of some splits of a data set, in a stable order."""
    wanted = [split.value for split in splits]
    rows = with_split(cells.comparable(cells.quiet(cells.tuned(frame))))
    rows = cells.one_placement(rows.filter(pl.col("split").is_in(wanted)))
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
