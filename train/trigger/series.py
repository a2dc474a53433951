"""Quiet call times of a site: the data that a Trigger is trained and calibrated on.

A *series* is calls of one task key under one config, in order: from the `calls` of jobs, and from
the per-iteration times of sweeps that ran alone. Averages of nccl-tests say less, since they vary
less than calls do; they are used only where there is nothing else, and that is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.cells import CELL_COLUMNS, REPEAT_COLUMNS, quiet, tuned, usable
from dynamiccl.datasets.steps import CALLS_USED, STREAM_COLUMNS, timed_calls
from dynamiccl.datasets.store import part_paths, read, scan
from dynamiccl.errors import NotEnoughData

FloatArray = npt.NDArray[np.float32]

#: Calls below which a series says nothing of its own.
SHORTEST: Final = 8
#: Quiet calls that a Trigger needs, all in all.
FEWEST: Final = 256
#: Repeats of a cell that make a series of averages.
FEWEST_REPEATS: Final = 3
#: A stretch whose running median over so many calls exceeds the series' median by so much of the
#: time, and by its scale, was not quiet.
_STRETCH: Final = 33
_NOT_QUIET: Final = 0.10
#: Calls that are drawn in a row: what they have in common stays.
BLOCK: Final = 64
_MAD: Final = 0.6745


@dataclass(frozen=True, slots=True)
class SeriesCounts:
    """How many times of a data set were used, and why others were not."""

    calls: int
    iterations: int
    #: Averages of nccl-tests, used only without the two above.
    averages: int
    #: Calls in stretches that were not quiet, left out.
    disturbed: int
    #: Calls without a time from all ranks, or of traces that do not tell what ran; left out.
    unusable: int
    series: int


@dataclass(frozen=True, slots=True)
class Series:
    """Standardised quiet calls: (log time - median) / robust sigma; series are concatenated."""

    values: FloatArray
    #: Log size less its mean, per call.
    sizes: FloatArray
    #: First call of each series, and the end of the last.
    starts: npt.NDArray[np.int64]
    #: Robust sigma of log time of each series.
    scales: FloatArray

    @classmethod
    def of(cls, times: Sequence[FloatArray], sizes: Sequence[FloatArray]) -> Self:
        """Standardise series of log times, with their log sizes."""
        middles = [np.median(each) for each in times]
        scales = [
            max(float(np.median(np.abs(each - middle))) / _MAD, 1e-4)
            for each, middle in zip(times, middles, strict=True)
        ]
        values = [(t - m) / s for t, m, s in zip(times, middles, scales, strict=True)]
        return cls(
            np.concatenate(values).astype(np.float32),
            np.concatenate([each - each.mean() for each in sizes]).astype(np.float32),
            np.cumsum([0, *map(len, times)]),
            np.array(scales, dtype=np.float32),
        )

    @property
    def usual_scale(self) -> float:
        """The scale of the median call."""
        lengths = np.diff(self.starts)
        order = np.argsort(self.scales)
        middle = np.searchsorted(np.cumsum(lengths[order]), lengths.sum() / 2)
        return float(self.scales[order][middle])

    def split(self, share: float) -> tuple["Series", "Series"]:
        """The first fraction `share` of every series, and the rest."""
        lengths = np.diff(self.starts)
        ends = self.starts[:-1] + np.maximum((lengths * share).astype(np.int64), 1)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        is_first = np.arange(len(self.values)) < ends[owner]
        return self._where(is_first, owner), self._where(~is_first, owner)

    def _where(self, kept: npt.NDArray[np.bool_], owner: npt.NDArray[np.int64]) -> "Series":
        counts = np.bincount(owner[kept], minlength=len(self.scales))
        starts = np.concatenate([[0], np.cumsum(counts[counts > 0])])
        return Series(self.values[kept], self.sizes[kept], starts, self.scales[counts > 0])

    def draw(
        self, random: np.random.Generator, count: int, steps: int
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Streams by moving blocks: values and sizes (steps, count), and scales (count,).

        A stream keeps to one series where that has some blocks; short ones are mixed among
        themselves. Within a block everything stays as it was.
        """
        lengths = np.diff(self.starts)
        blocks = -(-steps // BLOCK)
        whole = random.choice(len(lengths), size=count, p=lengths / lengths.sum())
        owner = np.repeat(whole[None], blocks, axis=0)
        short = lengths[whole] < 4 * BLOCK
        others = random.choice(len(lengths), size=(blocks, count), p=lengths / lengths.sum())
        owner[:, short] = others[:, short]
        begin = (random.random((blocks, count)) * lengths[owner]).astype(np.int64)
        # Around the end of a series it goes on with its beginning.
        at = (begin[:, None] + np.arange(BLOCK)[None, :, None]) % lengths[owner][:, None]
        index = (self.starts[owner][:, None] + at).reshape(blocks * BLOCK, count)[:steps]
        return self.values[index], self.sizes[index], self.scales[whole]


def read_series(data_dir: Path) -> tuple[Series, SeriesCounts]:
    """The quiet series of a data directory.

    Raises what reading raises, and NotEnoughData with fewer than FEWEST calls.
    """
    calls, unusable = _call_series(data_dir) if part_paths(data_dir, "calls") else ([], 0)
    frame = quiet(tuned(usable(read(data_dir)))) if part_paths(data_dir) else None
    iterations = [] if frame is None else _iteration_series(frame)
    times = [pair[0] for pair in [*calls, *iterations]]
    sizes = [pair[1] for pair in [*calls, *iterations]]
    averages: list[FloatArray] = []
    if sum(map(len, times)) < FEWEST and frame is not None:
        averages = _average_series(frame)
        times, sizes = averages, [np.zeros_like(each) for each in averages]
    kept = [_quiet_calls(each) for each in times]
    pairs = [
        (t[k], s[k])
        for t, s, k in zip(times, sizes, kept, strict=True)
        if k.sum() >= (FEWEST_REPEATS if averages else SHORTEST)
    ]
    total = sum(len(each) for each, _ in pairs)
    if total < FEWEST:
        raise NotEnoughData(
            f"{data_dir} holds {total} quiet calls in series and {FEWEST} are needed"
            f"{f' ({unusable} calls have no time or config)' if unusable else ''}; import a "
            "job's recorded calls (DYNAMICCL_CALLS_DIR, 'dynamiccl-collect import'), or sweep with "
            "nccl-tests that report each iteration"
        )
    counts = SeriesCounts(
        calls=sum(len(each) for each, _ in calls),
        iterations=sum(len(each) for each, _ in iterations),
        averages=sum(map(len, averages)),
        disturbed=sum(int((~each).sum()) for each in kept),
        series=len(pairs),
        unusable=unusable,
    )
    return Series.of([t for t, _ in pairs], [s for _, s in pairs]), counts


def _call_series(data_dir: Path) -> tuple[list[tuple[FloatArray, FloatArray]], int]:
    """Log times and log sizes of each series, and how many calls could not be used."""
    recorded = tuned(scan(data_dir, "calls").select(CALLS_USED).collect())
    rows = timed_calls(recorded)
    groups = rows.group_by(STREAM_COLUMNS, maintain_order=True).agg(
        pl.col("time_us").log(), pl.col("size_bytes").cast(pl.Float64).log()
    )
    found = [
        (np.asarray(time, dtype=np.float32), np.asarray(size, dtype=np.float32))
        for time, size in groups.select("time_us", "size_bytes").iter_rows()
        if len(time) >= SHORTEST
    ]
    return found, recorded.height - rows.height


def _iteration_series(frame: pl.DataFrame) -> list[tuple[FloatArray, FloatArray]]:
    found = frame["iteration_times_us"].drop_nulls()
    arrays = [np.log(np.asarray(each, dtype=np.float32)) for each in found if len(each)]
    return [(a, np.zeros_like(a)) for a in arrays if len(a) >= SHORTEST]


def _average_series(frame: pl.DataFrame) -> list[FloatArray]:
    ordered = frame.sort(REPEAT_COLUMNS).group_by(CELL_COLUMNS, maintain_order=True)
    cells = ordered.agg(pl.col("time_us").log())["time_us"]
    arrays = [np.asarray(each, dtype=np.float32) for each in cells]
    return [each for each in arrays if len(each) >= FEWEST_REPEATS]


def _quiet_calls(log_time: FloatArray) -> npt.NDArray[np.bool_]:
    """Which calls of a series are outside of slow stretches."""
    if len(log_time) < 2 * _STRETCH:
        return np.ones(len(log_time), dtype=np.bool_)
    middle = np.median(log_time)
    scale = np.median(np.abs(log_time - middle)) / _MAD
    running = pl.Series(log_time).rolling_median(_STRETCH, center=True).to_numpy()
    limit = middle + max(np.log1p(_NOT_QUIET), float(scale))
    slow = np.nan_to_num(running, nan=float(middle)) > limit
    # The median turns half a window late on both sides.
    reach = np.convolve(slow, np.ones(_STRETCH, dtype=np.int64), mode="same") > 0
    quiet_calls: npt.NDArray[np.bool_] = ~reach
    return quiet_calls
