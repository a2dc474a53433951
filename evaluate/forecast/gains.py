"""What a sweep says each config gains over NCCL's own choice, for one kind of a job's calls.

A gain is log(default / config), run by run: what a run does to all its times alike cancels. A size
between two that were measured has the mean of their gains by distance, on a log scale; at most an
octave from a measured size, as a decision table (`datasets/questions.py`). How much gains differ
between neighbouring sizes says how far such a gain may be off: `blur`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import comparable, independent, quiet, tuned
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.errors import NotEnoughData, UnknownName
from dynamiccl.evaluate.forecast.job import Kind
from dynamiccl.nccl import Config, NcclVersion
from dynamiccl.sizes import size_bin

Floats = npt.NDArray[np.float64]
#: Independent runs from which on a gain has an interval.
MIN_RUNS: Final = 3
#: How far a measured size may be, octaves.
_REACH: Final = 1.0
#: Sizes at most so many octaves apart say how gains change by size; and what is taken without any.
_NEIGHBOURS: Final = 2.0
_UNKNOWN_SLOPE: Final = 0.25
_SHAPE: Final = ("collective", "num_nodes", "ranks_per_node")
#: What must be alike for two times to be compared.
_LIKE: Final = (*_SHAPE, "size_bytes", "in_place", "datatype", "gpu")


@dataclass(frozen=True, slots=True)
class Gains:
    """A configs, the first of them NCCL's own choice, over R runs."""

    configs: tuple[Config, ...]
    #: (A, R) log(default / config); NaN = not measured in the run. R is 1 where a model says it.
    logs: Floats
    #: Names of the runs; empty of a model.
    runs: tuple[str, ...]
    #: (A,) standard deviation of what the sizes between measured ones add.
    blur: Floats
    #: us of NCCL's own choice, the median over runs.
    default_us: float
    #: The sizes that it rests on.
    sizes: tuple[int, ...]

    @property
    def means(self) -> Floats:
        """(A,) mean gain over runs; -inf of a config that fewer than MIN_RUNS runs have."""
        count = np.sum(~np.isnan(self.logs), axis=1)
        total = np.nansum(self.logs, axis=1)
        enough = count >= (MIN_RUNS if self.runs else 1)
        found: Floats = np.where(enough, total / np.maximum(count, 1), -np.inf)
        return found


class Source(Protocol):
    """Where gains come from."""

    @property
    def system(self) -> str:
        """Its name."""

    @property
    def nccl_version(self) -> str | None:
        """The release that they are of."""

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        """(nodes, ranks a node) that it knows."""

    def gains(self, kind: Kind) -> Gains | str:
        """The gains of a kind of calls, or why it has none."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One measured size of one collective and shape."""

    size_bytes: int
    logs: Floats
    runs: tuple[str, ...]
    default_us: float


class Measured:
    """Gains of a sweep's measurements on one system, in the untouched environment."""

    def __init__(self, frame: pl.DataFrame, system: str | None, version: str | None) -> None:
        """Take the rows that may be compared; `version` is the job's NCCL, where it is known.

        Raises UnknownName where the data hold several systems and none is named, and NotEnoughData
        without a row.
        """
        names = frame["system"].unique().sort().to_list()
        if system is None and len(names) > 1 or system is not None and system not in names:
            raise UnknownName("system", system, names, where="--system")
        self.system = system or str(names[0])
        rows = independent(comparable(quiet(tuned(frame.filter(system=self.system)))))
        rows = rows.filter(launch_profile=DEFAULT_PROFILE)
        if rows.is_empty():
            raise NotEnoughData(
                f"the data hold no time of {self.system} in the untouched environment, alone on "
                "its nodes; measure with 'dynamiccl-collect run' or name other --data"
            )
        self.nccl_version, self._other_version = _version(rows, version)
        if self.nccl_version is not None:
            rows = rows.filter(nccl_version=self.nccl_version)
        self.catalogue = Catalogue.from_frame(rows)
        rows = rows.with_columns(
            self.catalogue.actions(rows),
            label=pl.concat_str("sweep", "run", "repeat", separator="/"),
            log=pl.col("time_us").log(),
        ).drop_nulls("action")
        self._tasks: dict[tuple[str, int, int], list[_Task]] = {}
        for key, part in rows.group_by([*_SHAPE, "size_bytes"], maintain_order=True):
            task = _task(part, len(self.catalogue))
            if task is not None:
                collective, nodes, per_node = str(key[0]), int(str(key[1])), int(str(key[2]))
                self._tasks.setdefault((collective, nodes, per_node), []).append(task)
        for tasks in self._tasks.values():
            tasks.sort(key=lambda task: task.size_bytes)
        self._slopes = {place: _slope(tasks) for place, tasks in self._tasks.items()}
        self._shapes = sorted({(nodes, per_node) for _, nodes, per_node in self._tasks})

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        """(nodes, ranks a node) with measured gains."""
        return self._shapes

    def gains(self, kind: Kind) -> Gains | str:
        """The gains of a kind of calls, or why there are none."""
        if self._other_version:
            return f"measured under NCCL {self.nccl_version}; the job ran another minor version"
        if kind.num_nodes is None or kind.num_ranks is None:
            return _unplaced(kind, self._shapes)
        per_node = kind.num_ranks // kind.num_nodes
        tasks = self._tasks.get((kind.collective, kind.num_nodes, per_node))
        if tasks is None:
            return f"{kind.collective} on {kind.num_nodes} x {per_node} was not measured"
        near = _near(tasks, kind.size_bytes)
        if not near:
            return "no size within an octave was measured in three runs"
        slope = self._slopes[kind.collective, kind.num_nodes, per_node]
        # As it is at the ends, where the sweep ends before the job's size.
        default_us = np.exp(
            np.interp(
                np.log(kind.size_bytes),
                np.log([task.size_bytes for task in tasks]),
                np.log([task.default_us for task in tasks]),
            )
        )
        logs, runs, blur, sizes = _between(near, kind.size_bytes, slope)
        return Gains(self.catalogue.configs, logs, runs, blur, float(default_us), sizes)


def _unplaced(kind: Kind, shapes: Sequence[tuple[int, int]]) -> str:
    if kind.num_ranks is None:
        return "the trace does not say how many ranks"
    known = [f"{n}x{per}" for n, per in shapes if n * per == kind.num_ranks]
    told = f"name it with --group, one of {', '.join(known)}" if known else "not measured"
    return f"the trace does not say on how many nodes its {kind.num_ranks} ranks are; {told}"


def _version(rows: pl.DataFrame, wanted: str | None) -> tuple[str | None, bool]:
    """The release whose rows are taken, and whether it is of another minor version than wanted."""
    held = sorted(rows["nccl_version"].drop_nulls().unique().to_list(), key=NcclVersion.parse)
    if not held:
        return None, False
    if wanted is None:
        return held[-1], False
    job = NcclVersion.parse(wanted)
    same = [v for v in held if _minor(v) == (job.major, job.minor)]
    return (wanted if wanted in same else same[-1], False) if same else (held[-1], True)


def _minor(text: str) -> tuple[int, int]:
    version = NcclVersion.parse(text)
    return version.major, version.minor


def _task(rows: pl.DataFrame, num_actions: int) -> _Task | None:
    """The gains of one task, paired by run; None without MIN_RUNS runs of NCCL's own choice."""
    own = rows.filter(action=ABSTAIN_ACTION)
    runs = tuple(own["label"].unique().sort())
    if len(runs) < MIN_RUNS:
        return None
    place = {label: column for column, label in enumerate(runs)}
    logs = np.full((num_actions, len(runs)), np.nan)
    logs[ABSTAIN_ACTION] = 0.0
    for (action,), part in rows.group_by("action", maintain_order=True):
        if action == ABSTAIN_ACTION:
            continue
        pairs = _pairs(own, part)
        columns = [place[label] for label in pairs["label"]]
        logs[int(str(action)), columns] = pairs["gain"].to_numpy()
    return _Task(
        int(rows["size_bytes"][0]), logs, runs, float(np.exp(float(str(own["log"].median()))))
    )


def _pairs(own: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """`gain` by the label of the default's run.

    Where too few runs measured both, independent times are paired in their order: that is as good a
    sample of the difference, without what a run has in common.
    """
    by_label = [*_LIKE, "label"]
    joined = own.join(other, on=by_label, nulls_equal=True, suffix="_other")
    if joined["label"].n_unique() < MIN_RUNS:
        numbered = [
            frame.sort("label").with_columns(rank=pl.int_range(pl.len()).over(_LIKE))
            for frame in (own, other)
        ]
        joined = numbered[0].join(
            numbered[1], on=[*_LIKE, "rank"], nulls_equal=True, suffix="_other"
        )
    gain = (pl.col("log") - pl.col("log_other")).mean()
    return joined.group_by("label", maintain_order=True).agg(gain=gain)


def _near(tasks: Sequence[_Task], size_bytes: int) -> list[_Task]:
    """The measured size of the same bin, else the next to each side within reach."""
    same = [task for task in tasks if size_bin(task.size_bytes) == size_bin(size_bytes)]
    if same:
        return [min(same, key=lambda task: abs(task.size_bytes - size_bytes))]
    within = [t for t in tasks if abs(np.log2(t.size_bytes / size_bytes)) <= _REACH]
    below = [t for t in within if t.size_bytes < size_bytes]
    above = [t for t in within if t.size_bytes > size_bytes]
    return [*below[-1:], *above[:1]]


def _between(
    near: Sequence[_Task], size_bytes: int, slope: float
) -> tuple[Floats, tuple[str, ...], Floats, tuple[int, ...]]:
    """The gains at a size from those of its neighbours: `logs`, `runs`, `blur` and `sizes`."""
    distances = [abs(float(np.log2(task.size_bytes / size_bytes))) for task in near]
    if len(near) == 2 and near[0].runs == near[1].runs:
        share = distances[0] / sum(distances)
        logs = (1.0 - share) * near[0].logs + share * near[1].logs
        apart = np.abs(_means(near[1]) - _means(near[0]))
        blur = share * (1.0 - share) * np.nan_to_num(apart)
        return logs, near[0].runs, blur, tuple(task.size_bytes for task in near)
    nearest = int(np.argmin(distances))
    task = near[nearest]
    is_same = size_bin(task.size_bytes) == size_bin(size_bytes)
    blur = np.full(len(task.logs), 0.0 if is_same else distances[nearest] * slope)
    blur[ABSTAIN_ACTION] = 0.0
    return task.logs, task.runs, blur, (task.size_bytes,)


def _means(task: _Task) -> Floats:
    """(A,) mean gain over the runs that have it; NaN without one."""
    count = np.sum(~np.isnan(task.logs), axis=1)
    found: Floats = np.where(count > 0, np.nansum(task.logs, axis=1) / np.maximum(count, 1), np.nan)
    return found


def _slope(tasks: Sequence[_Task]) -> float:
    """By how much a gain differs from that an octave on: the root of the mean square."""
    squares = []
    for one, other in zip(tasks, tasks[1:], strict=False):
        octaves = float(np.log2(other.size_bytes / one.size_bytes))
        apart = (_means(other) - _means(one))[ABSTAIN_ACTION + 1 :] / octaves
        apart = apart[~np.isnan(apart)]
        if octaves <= _NEIGHBOURS and len(apart):
            squares.append(float(np.mean(apart**2)))
    return float(np.sqrt(np.mean(squares))) if squares else _UNKNOWN_SLOPE
