"""Output of an upgrade comparison: sentences, a table, a page, JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl.evaluate.blocks import Section, TableBlock
from dynamiccl.evaluate.figures.drawing import size_label
from dynamiccl.evaluate.gate.evidence import passing
from dynamiccl.evaluate.page import write_page
from dynamiccl.evaluate.upgrade.changes import Changed, Decisions, Range
from dynamiccl.evaluate.upgrade.measured import Measured
from dynamiccl.nccl import Config

#: Columns of the table; the two releases stand after the sizes.
HEADS: Final = ("call, nodes x ranks", "sizes", "modelled", "measured")
#: False discovery rate among measured ranges that are called slower, as `compare` has it.
_Q: Final = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as slower, as fractions of the old time."""

    #: The least measured change, and the least modelled one where nothing was measured.
    least: float
    model_error: float


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Two releases on one system, with measured effects."""

    versions: tuple[str, str]
    system: str
    decisions: Decisions
    #: One for each range; None: not measured.
    measured: Sequence[Measured | None]
    #: NCCL releases that the times were measured under.
    measured_under: Sequence[str]
    limits: Limits

    @property
    def slower(self) -> list[bool]:
        """Whether each range gets slower, by measurement, else by model."""
        p_values = np.array(
            [1.0 if m is None or m.p_value is None else m.p_value for m in self.measured]
        )
        passed = passing(p_values, _Q)
        return [
            (one.modelled or 0.0) > self.limits.model_error
            if measured is None
            else bool(real) and measured.mean >= self.limits.least
            for one, measured, real in zip(
                self.decisions.ranges, self.measured, passed, strict=True
            )
        ]

    @property
    def verdicts(self) -> list[str]:
        """The result, one sentence each."""
        decisions, changed = self.decisions, self.decisions.changed
        cells = sum(1 for each in changed if not _channels_alone(each))
        points = sum(measured.points for measured in self.measured if measured is not None)
        said = [
            f"{self.versions[0]} -> {self.versions[1]} on {self.system}: NCCL chooses otherwise at "
            f"{len(changed)} of {decisions.asked} (shape, size) points"
            + (f" (in channels alone at {len(changed) - cells})" if changed else "")
            + f"; {points} of them have measured times{self._measured_text(points)}."
        ]
        if decisions.calls:
            share = sum(each.point.calls for each in changed) / decisions.calls
            said.append(f"These are {share:.1%} of the job's {decisions.calls} calls.")
        if changed:
            said.append(self._slower_text())
        said += [f"Left out: {count} x {why}." for why, count in decisions.left_out.items()]
        return said

    def _measured_text(self, points: int) -> str:
        """The mean measured change of the points that have one."""
        if not points:
            return ""
        held = [m for m in self.measured if m is not None]
        mean = np.expm1(sum(m.points * np.log1p(m.mean) for m in held) / points)
        under = ", ".join(self.measured_under)
        return f": {mean:+.1%} on average, under NCCL {under}"

    def _slower_text(self) -> str:
        by_time = [m for m, slow in zip(self.measured, self.slower, strict=True) if slow]
        known = sum(1 for m in by_time if m is not None)
        return (
            f"{len(by_time)} of {len(self.decisions.ranges)} ranges would get slower: {known} as "
            f"measured, {len(by_time) - known} as modelled by over {self.limits.model_error:.0%}."
        )

    def table(self, rows: int | None = None) -> TableBlock:
        """The ranges, those that get slower first, then by size of the change."""
        slower = self.slower

        def key(i: int) -> tuple[bool, float]:
            return not slower[i], -abs(self._change(i))

        order = sorted(range(len(slower)), key=key)
        return TableBlock(
            "Where NCCL chooses otherwise",
            [*HEADS[:2], *self.versions, *HEADS[2:]],
            [
                [
                    *_place(self.decisions.ranges[i]),
                    _configs([each.old for each in self.decisions.ranges[i].points]),
                    _configs([each.new for each in self.decisions.ranges[i].points]),
                    _percent(self.decisions.ranges[i].modelled),
                    "not measured" if (held := self.measured[i]) is None else held.text,
                ]
                for i in order[:rows]
            ],
        )

    def _change(self, index: int) -> float:
        measured = self.measured[index]
        modelled = self.decisions.ranges[index].modelled or 0.0
        return modelled if measured is None else measured.mean

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in us, changes as fractions of the old time."""
        return {
            "from": self.versions[0],
            "to": self.versions[1],
            "system": self.system,
            "points": self.decisions.asked,
            "calls": self.decisions.calls,
            "points_changed": len(self.decisions.changed),
            "is_slower": any(self.slower),
            "left_out": self.decisions.left_out,
            "measured_under": list(self.measured_under),
            "ranges": [
                {
                    "modelled": one.modelled,
                    "measured": None if measured is None else asdict(measured),
                    "is_slower": slow,
                    "points": [_plain(each) for each in one.points],
                }
                for one, measured, slow in zip(
                    self.decisions.ranges, self.measured, self.slower, strict=True
                )
            ],
        }


def write(found: Upgrade, out: Path) -> Path:
    """Write page and JSON into `out`; returns the page's path."""
    blocks = list(_blocks(found))
    section = Section("What NCCL chooses otherwise", blocks, verdicts=found.verdicts)
    header = {"versions": found.versions, "system": found.system, "limits": found.limits}
    return write_page(out, "upgrade", found.to_json(), [section], header)


def _blocks(found: Upgrade) -> Iterator[TableBlock]:
    if found.decisions.ranges:
        yield found.table()


def _place(one: Range) -> list[str]:
    first, last = one.points[0].point.call, one.points[-1].point.call
    ends = [size_label(call.size_bytes) for call in (first, last)]
    group = f"{first.group.num_nodes} x {first.group.ranks_per_node}"
    return [f"{first.collective.wire} {group}", " to ".join(dict.fromkeys(ends))]


def _configs(configs: Sequence[Config]) -> str:
    """Configs of one algorithm and protocol, with their range of channels."""
    channels = sorted(config.num_channels or 0 for config in configs)
    span = "-".join(dict.fromkeys(str(end) for end in (channels[0], channels[-1])))
    return f"{configs[0].key.rpartition('/')[0]} {span}ch"


def _channels_alone(each: Changed) -> bool:
    return (each.old.algorithm, each.old.protocol) == (each.new.algorithm, each.new.protocol)


def _percent(fraction: float | None) -> str:
    return "not modelled" if fraction is None else f"{fraction:+.1%}"


def _plain(each: Changed) -> dict[str, Any]:
    call = each.point.call
    return {
        "collective": call.collective.wire,
        "num_nodes": call.group.num_nodes,
        "ranks_per_node": call.group.ranks_per_node,
        "size_bytes": call.size_bytes,
        "calls": each.point.calls,
        "old": each.old.key,
        "new": each.new.key,
        "nccl_old_us": each.nccl_old_us,
        "nccl_new_us": each.nccl_new_us,
        "modelled_old_us": each.old_us,
        "modelled_new_us": each.new_us,
    }
