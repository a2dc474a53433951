"""Ranges of sizes where two NCCL releases choose differently, by their cost models.

The times of both choices are the simulated system's: what a config takes on the machines, whoever
chose it, since its physics are of no release. NCCL's own predictions stand beside them, each
release's of its own choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynamiccl.errors import NotEnoughData
from dynamiccl.evaluate.upgrade.points import Point, Points, by_line
from dynamiccl.nccl import ABSTAIN, Config
from dynamiccl.simulator.default import CostModel
from dynamiccl.simulator.system import System


@dataclass(frozen=True, slots=True)
class Changed:
    """A point at which the new release chooses differently."""

    point: Point
    old: Config
    new: Config
    #: What each release predicts for its own choice.
    nccl_old_us: float
    nccl_new_us: float
    #: What the system takes under each choice; None: it has no times of such a config.
    old_us: float | None
    new_us: float | None

    @property
    def modelled(self) -> float | None:
        """ln(new / old modelled time); None if not modelled."""
        if self.old_us is None or self.new_us is None:
            return None
        return float(np.log(self.new_us / self.old_us))


@dataclass(frozen=True, slots=True)
class Range:
    """Neighbouring points of one collective and group with the same change."""

    points: Sequence[Changed]

    @property
    def modelled(self) -> float | None:
        """The mean modelled change, as a fraction of the old time; None if not modelled."""
        known = [each.modelled for each in self.points if each.modelled is not None]
        return float(np.expm1(np.mean(known))) if known else None


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions of two releases at the same points."""

    asked: int
    calls: int
    ranges: Sequence[Range]
    #: Reason -> calls, or points of a grid, that are left out.
    left_out: dict[str, int]

    @property
    def changed(self) -> list[Changed]:
        """All points that change."""
        return [each for one in self.ranges for each in one.points]


@dataclass(frozen=True, slots=True)
class Release:
    """An NCCL release on a system's machines."""

    model: CostModel
    #: The system under that release, which has the times.
    system: System


def decide(points: Points, old: Release, new: Release) -> Decisions:
    """Ask both releases about every point, and merge neighbours with the same change.

    Raises NotEnoughData when there is no point that can be asked about.
    """
    ranges: list[Range] = []
    left_out, asked, calls = dict(points.left_out), 0, 0
    for line in by_line(points.points):
        group = line[0].call.group
        if not old.model.machine.holds(group):
            shape = f"{group.num_nodes} x {group.ranks_per_node}"
            reason = f"{shape} is no shape of {old.model.machine.name}"
            left_out[reason] = left_out.get(reason, 0) + sum(max(p.calls, 1) for p in line)
            continue
        asked += len(line)
        calls += sum(point.calls for point in line)
        run: list[Changed] = []
        for each in [*(_changed(point, old, new) for point in line), None]:
            if run and (each is None or _cells(each) != _cells(run[-1])):
                ranges.append(Range(run))
                run = []
            if each is not None:
                run.append(each)
    if not asked:
        reasons = "; ".join(f"{reason} ({count} calls)" for reason, count in left_out.items())
        raise NotEnoughData(
            f"nothing to ask the releases about: {reasons or 'no calls at all'}; "
            "take a shape that the system has, by --nodes and --ranks-per-node"
        )
    return Decisions(asked, calls, ranges, left_out)


def _changed(point: Point, old: Release, new: Release) -> Changed | None:
    before, after = (release.model.resolve(point.call, ABSTAIN) for release in (old, new))
    if before == after:
        return None
    return Changed(
        point,
        before,
        after,
        _predicted_us(old.model, point, before),
        _predicted_us(new.model, point, after),
        _time_us(old.system, point, before),
        _time_us(new.system, point, after),
    )


def _predicted_us(model: CostModel, point: Point, config: Config) -> float:
    assert config.algorithm is not None
    assert config.protocol is not None
    return model.cost_us(point.call, config.algorithm, config.protocol)


def _time_us(system: System, point: Point, config: Config) -> float | None:
    group, collective = point.call.group, point.call.collective
    if group not in system.groups() or collective not in system.collectives():
        return None
    if (config.algorithm, config.protocol) not in system.cells(group, collective):
        return None
    return system.parts(point.call, config).quiet_us


def _cells(changed: Changed) -> tuple[object, ...]:
    old, new = changed.old, changed.new
    return old.algorithm, old.protocol, new.algorithm, new.protocol
