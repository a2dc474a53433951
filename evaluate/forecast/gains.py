"""Gains of each config over NCCL's own choice, for one kind of call: measured, or of a model.

A gain is log(default / config), run by run: what a run does to all its times alike cancels. What a
size in a job's trace gains comes from sizes at most an octave away, as in a decision table
(`datasets/questions.py`); `between.py` says how.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import comparable, independent, quiet, tuned
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.errors import NotEnoughData, UnknownName, UserError
from dynamiccl.evaluate.forecast.between import MIN_RUNS, AtSize, between
from dynamiccl.evaluate.forecast.job import Kind
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call, System

Floats = npt.NDArray[np.float64]
_SHAPE: Final = ("collective", "num_nodes", "ranks_per_node")
#: How many spreads (as of a normal) from its config's median a gain counts in full.
_REACH: Final = 3.0
#: What is farther off in a smaller share of the times than this happens seldom.
_SELDOM: Final = 0.1
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
    #: Usual standard deviation of a gain between runs, of its collective and shape; 0 of a model.
    usual: float

    @property
    def means(self) -> Floats:
        """(A,) mean gain over runs; -inf of a config that fewer than MIN_RUNS runs have."""
        count = np.sum(~np.isnan(self.logs), axis=1)
        total = np.nansum(self.logs, axis=1)
        enough = count >= (MIN_RUNS if self.runs else 1)
        found: Floats = np.where(enough, total / np.maximum(count, 1), -np.inf)
        return found


class Measured:
    """Gains from a sweep's measurements on one system, in the default environment."""

    def __init__(self, frame: pl.DataFrame, system: str | None, version: str | None) -> None:
        """Take the rows that may be compared; `version` is the job's NCCL, where it is known.

        Raises UserError where the data hold several systems and none is named, UnknownName for one
        that they do not hold, and NotEnoughData without a row.
        """
        names = frame["system"].unique().sort().to_list()
        if system is None and len(names) > 1:
            raise UserError(
                f"the data hold {len(names)} systems; name one: --system {' or '.join(names)}"
            )
        if system is not None and system not in names:
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
            log=pl.col("time_us").log(),
            launch=pl.concat_str("sweep", "run", separator="/"),
        ).drop_nulls("action")
        self._tasks: dict[tuple[str, int, int], list[AtSize]] = {}
        for key, part in rows.group_by([*_SHAPE, "size_bytes"], maintain_order=True):
            task = _task(part, len(self.catalogue))
            if task is not None:
                collective, nodes, per_node = str(key[0]), int(str(key[1])), int(str(key[2]))
                self._tasks.setdefault((collective, nodes, per_node), []).append(task)
        for place, tasks in self._tasks.items():
            self._tasks[place] = sorted(_steadied(tasks), key=lambda task: task.size_bytes)
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
        found = between(tasks, kind.size_bytes, self.catalogue.configs, _parsed(kind.ran))
        if isinstance(found, str):
            return found
        # As it is at the ends, where the sweep ends before the job's size.
        default_us = np.exp(
            np.interp(
                np.log(kind.size_bytes),
                np.log([task.size_bytes for task in tasks]),
                np.log([task.default_us for task in tasks]),
            )
        )
        return Gains(
            self.catalogue.configs,
            found.logs,
            found.runs,
            found.blur,
            float(default_us),
            found.sizes,
            found.usual,
        )


class Modelled:
    """Quiet times of a simulated system."""

    def __init__(self, system: System, configs: Sequence[Config] = ()) -> None:
        """Take a system; beside its own algorithms and protocols, it is asked for `configs`."""
        self.system = system.name
        self.nccl_version = str(system.nccl_version)
        self._system, self._configs = system, tuple(configs)

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        """(nodes, ranks a node) of the system."""
        return [(group.num_nodes, group.ranks_per_node) for group in self._system.groups()]

    def gains(self, kind: Kind) -> Gains | str:
        """The gains of a kind of calls, or why there are none."""
        if kind.num_nodes is None or kind.num_ranks is None:
            return _unplaced(kind, self.shapes)
        group = Group(kind.num_nodes, kind.num_ranks // kind.num_nodes)
        collective = Collective.parse(kind.collective)
        if group not in self._system.groups() or collective not in self._system.collectives():
            shape = f"{group.num_nodes} x {group.ranks_per_node}"
            return f"the model has no {kind.collective} on {shape}"
        call = Call(group, collective, kind.size_bytes)
        cells = [Config(*cell) for cell in self._system.cells(group, collective)]
        configs = tuple(dict.fromkeys((ABSTAIN, *cells, *self._configs)))
        times = np.array([self._quiet_us(call, config) for config in configs])
        logs = (np.log(times[0]) - np.log(times))[:, None]
        return Gains(
            configs, logs, (), np.zeros(len(configs)), float(times[0]), (kind.size_bytes,), 0.0
        )

    def _quiet_us(self, call: Call, config: Config) -> float:
        try:
            return self._system.parts(call, config).quiet_us
        except KeyError:
            return float("nan")


#: What tells gains.
Source = Measured | Modelled


def _unplaced(kind: Kind, shapes: Sequence[tuple[int, int]]) -> str:
    """Why gains are unknown for a kind whose shape the trace does not tell, and the fix."""
    if kind.num_ranks is None:
        return "the trace does not say how many ranks"
    known = [
        f"{nodes}x{per_node}" for nodes, per_node in shapes if nodes * per_node == kind.num_ranks
    ]
    if not known:
        told = f"no group of {kind.num_ranks} ranks is known"
        return f"{told}; --group NODESxRANKS tells their placement, for a sweep of it"
    told = f"--group {known[0]}" if len(known) == 1 else f"--group, one of {', '.join(known)}"
    return f"the trace does not say on how many nodes its {kind.num_ranks} ranks are: {told}"


def _version(rows: pl.DataFrame, wanted: str | None) -> tuple[str | None, bool]:
    """The release whose rows are used, and whether its minor version differs from `wanted`."""
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


def _task(rows: pl.DataFrame, num_actions: int) -> AtSize | None:
    """The gains of one task, paired by run; None without MIN_RUNS runs of NCCL's own choice."""
    rows = rows.with_columns(label=_labels(rows))
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
    ran = own.select(pl.concat_str("actual_algorithm", "actual_protocol", separator="/"))
    names = {_parsed(name) for name in ran.to_series().drop_nulls().unique()}
    return AtSize(
        int(rows["size_bytes"][0]),
        logs,
        runs,
        float(np.exp(float(str(own["log"].median())))),
        0.0,
        names.pop() if len(names) == 1 else None,
    )


def _steadied(tasks: Sequence[AtSize]) -> list[AtSize]:
    """Tasks with outliers pulled in, and the usual variance between runs.

    One launch in a hundred takes twice as long as the others; that says little of its config. Where
    it happens often it belongs to the machine, and stays.
    """
    rests = [_rest(task.logs) for task in tasks]
    every = np.concatenate([rest.ravel() for rest in rests])
    every = every[~np.isnan(every)]
    far = np.abs(every[every != 0.0])
    # The middle of few runs is one of them: its distance, 0, is left out.
    reach = _REACH * 1.4826 * float(np.median(far)) if len(far) else 0.0
    if len(every) and np.mean(np.abs(every) > reach) > _SELDOM:
        reach = np.inf
    steadied = []
    for task, rest in zip(tasks, rests, strict=True):
        logs = task.logs.copy()
        logs[ABSTAIN_ACTION + 1 :] += np.clip(rest, -reach, reach) - rest
        steadied.append(replace(task, logs=logs))
    rows = [row[~np.isnan(row)] for task in steadied for row in task.logs[ABSTAIN_ACTION + 1 :]]
    squares = [float(np.var(row, ddof=1)) for row in rows if len(row) > 1]
    usual = float(np.sqrt(np.mean(squares))) if squares else 0.0
    return [replace(task, usual=usual) for task in steadied]


def _rest(logs: Floats) -> Floats:
    """(A-1, R) of forced configs what lies apart from the config's median; NaN where unmeasured."""
    forced = logs[ABSTAIN_ACTION + 1 :]
    known = np.where(np.isnan(forced).all(axis=1, keepdims=True), 0.0, forced)
    found: Floats = forced - np.nanmedian(known, axis=1, keepdims=True)
    return found


def _labels(rows: pl.DataFrame) -> pl.Series:
    """Pair labels of times: the run where enough have both configs, else the launch."""
    own = rows.filter(action=ABSTAIN_ACTION)["launch"].unique()
    others = rows.filter(
        (pl.col("action") != ABSTAIN_ACTION) & pl.col("launch").is_in(own.implode())
    )
    most = others.group_by("action").agg(pl.col("launch").n_unique())["launch"].max()
    if others.height and int(str(most)) >= MIN_RUNS:
        return rows["launch"]
    return rows.select(pl.concat_str("launch", "repeat", separator="/")).to_series()


def _parsed(name: str | None) -> tuple[Algorithm, Protocol] | None:
    """Algorithm and protocol of a text such as `RING/LL`; None if unknown."""
    if name is None:
        return None
    algorithm, _, protocol = name.partition("/")
    return Algorithm.parse(algorithm), Protocol.parse(protocol)


def _pairs(own: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """`gain` by the label of the default's run.

    Where too few runs measured both, independent times are paired in their order: that is as good a
    sample of the difference, without what a run has in common.
    """
    by_label = [*_LIKE, "label"]
    means = [
        frame.group_by(by_label, maintain_order=True).agg(pl.col("log").mean())
        for frame in (own, other)
    ]
    joined = means[0].join(means[1], on=by_label, nulls_equal=True, suffix="_other")
    if joined["label"].n_unique() < MIN_RUNS:
        numbered = [
            frame.sort("label").with_columns(rank=pl.int_range(pl.len()).over(_LIKE))
            for frame in means
        ]
        joined = numbered[0].join(
            numbered[1], on=[*_LIKE, "rank"], nulls_equal=True, suffix="_other"
        )
    gain = (pl.col("log") - pl.col("log_other")).mean()
    return joined.group_by("label", maintain_order=True).agg(gain=gain)
