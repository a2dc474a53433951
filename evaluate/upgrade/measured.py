"""Measured effect of the changed choices: old config against new, from a sweep of the system.

Which release the sweep ran under does not matter for who chose: only what ran is looked at, as it
was read back, or else as it was asked for by name. Two configs are compared within runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy import stats

from dynamiccl.datasets.cells import comparable, independent, quiet
from dynamiccl.errors import UserError
from dynamiccl.evaluate.compare.changes import Change
from dynamiccl.evaluate.upgrade.changes import Changed, Range
from dynamiccl.nccl import Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator.default import CostModel
from dynamiccl.simulator.default.constants import READ
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from dynamiccl.sizes import size_bin

_KNOBS: Final = ("algorithm", "protocol", "num_channels")
_PLACE: Final = ("collective", "num_nodes", "ranks_per_node")
#: Collective, nodes, ranks of each, size bin, what ran.
Key = tuple[str, int, int, int, Config]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured change, as a fraction of the old time."""

    #: Points of the range that were measured.
    points: int
    mean: float
    #: 95 % interval and two-sided p-value against no change; None: fewer than two common runs.
    low: float | None = None
    high: float | None = None
    p_value: float | None = None

    @property
    def text(self) -> str:
        """The change as text."""
        if self.low is None or self.high is None:
            return f"{self.mean:+.1%} (no interval)"
        return f"{self.mean:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


class MeasuredTimes:
    """Quiet, independent times of a system by config that ran, and by run."""

    def __init__(
        self, frame: pl.DataFrame, system: str, model_of: Callable[[NcclVersion], CostModel]
    ) -> None:
        """Take the rows of `system`, or of the one system that there is.

        `model_of` says how many channels ran where a sweep left them to NCCL and did not read them
        back, for the releases that were read.

        Raises UserError where several systems are there and none has that name.
        """
        names = frame["system"].unique().sort().to_list()
        if len(names) > 1 and system not in names:
            raise UserError(
                f"--data holds {', '.join(names)}, and none of them is called {system}; give a "
                "directory that holds sweeps of one system"
            )
        rows = frame if len(names) == 1 else frame.filter(system=system)
        self.versions: list[str] = rows["nccl_version"].drop_nulls().unique().sort().to_list()
        read = [version for version in self.versions if NcclVersion.parse(version) in READ]
        models = {version: model_of(NcclVersion.parse(version)) for version in read}
        self._logs = _logs(independent(comparable(quiet(rows))), models)

    def of(self, one: Range) -> Measured | None:
        """The measured change of a range, the mean over its points; None if not measured."""
        found = [logs for each in one.points if (logs := self._change(each))]
        if not found:
            return None
        common = sorted(set.intersection(*(set(logs) for logs in found)) - {""})
        if len(common) < 2:
            # Each point by all that there is of it: a mean, and nobody knows how sure.
            means = [np.mean([*logs.values()]) for logs in found]
            return Measured(len(found), float(np.expm1(np.mean(means))))
        by_run = np.array([np.mean([logs[run] for logs in found]) for run in common])
        return _interval(len(found), by_run)

    def _change(self, changed: Changed) -> dict[str, float]:
        """ln(new / old) by run; key "" for all runs together where no run has both."""
        call = changed.point.call
        place = (call.collective.wire, call.group.num_nodes, call.group.ranks_per_node)
        old, new = (
            self._logs.get((*place, size_bin(call.size_bytes), each), {})
            for each in (changed.old, changed.new)
        )
        if not old or not new:
            return {}
        both = old.keys() & new.keys()
        if not both:
            medians = [np.median([np.mean(x) for x in side.values()]) for side in (old, new)]
            return {"": float(medians[1] - medians[0])}
        return {run: float(np.mean(new[run]) - np.mean(old[run])) for run in both}


def _interval(points: int, logs: npt.NDArray[np.float64]) -> Measured:
    error = float(stats.sem(logs))
    change = Change.of(float(np.mean(logs)), error, len(logs) - 1, against=0.0)
    p_value = change.p if error > 0.0 else None
    return Measured(points, change.mean, change.low, change.high, p_value)


def _logs(
    rows: pl.DataFrame, models: Mapping[str, CostModel]
) -> Mapping[Key, dict[str, list[float]]]:
    """Log times by place, config that ran, and run; rows without a known config are dropped."""
    ran = [pl.coalesce(f"actual_{knob}", f"requested_{knob}").alias(knob) for knob in _KNOBS]
    known = (
        rows.filter(pl.col("requested_chunk_bytes").is_null())
        .with_columns(*ran, by=pl.concat_str(["sweep", "run", "launch_profile"], separator="/"))
        .drop_nulls(_KNOBS[:2])
        .group_by(*_PLACE, "size_bytes", "nccl_version", *_KNOBS, "by", maintain_order=True)
        .agg(pl.col("time_us").log().mean())
    )
    found: dict[Key, dict[str, list[float]]] = {}
    for collective, nodes, ranks, size, version, *knobs, run, log in known.iter_rows():
        config = Config(Algorithm.parse(knobs[0]), Protocol.parse(knobs[1]), knobs[2])
        call = Call(Group(nodes, ranks), Collective.parse(collective), size)
        if config.num_channels is None:
            if version not in models or not _has(models[version], call, config):
                continue
            config = models[version].resolve(call, config)
        key = (collective, nodes, ranks, size_bin(size), config)
        found.setdefault(key, {}).setdefault(run, []).append(log)
    return found


def _has(model: CostModel, call: Call, config: Config) -> bool:
    if not call.collective.tunable or not model.machine.holds(call.group):
        return False
    return (config.algorithm, config.protocol) in model.cells(call.group, call.collective)
