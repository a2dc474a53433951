"""What an artifact would change in a job's calls, with the gate's evidence and the gains.

Gains are those of the gate's fresh runs (gate.json), each with its 95 % interval. A bin that was
inferred has the least of those bins of its collective and config that passed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from dynamiccl.datasets.manifest import GATE_NAME
from dynamiccl.errors import CorruptFile, UnknownName
from dynamiccl.serve.artifact import Artifact, channels_of, pick_table
from dynamiccl.serve.calls_seen import Called
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import bin_center_bytes

_PASSED: Final = "passed"


@dataclass(frozen=True, slots=True)
class Gain:
    """A gain as a fraction of NCCL's own time, with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Change:
    """Calls of one bin that an artifact would decide."""

    called: Called
    config: str
    #: None: no gate measured it.
    gain: Gain | None
    #: Of this config, and of NCCL's own choice; None: not read back.
    channels: int | None
    own_channels: int | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an artifact would change in one job."""

    calls: int
    #: Calls on communicators for which there is no table.
    calls_without_table: int
    changes: list[Change]
    #: Share of all recorded time that would be saved; None: no time, or no gain, is known.
    saved: Gain | None

    @property
    def calls_changed(self) -> int:
        """Number of calls whose config may differ from NCCL's own choice."""
        return sum(change.called.calls for change in self.changes)

    @property
    def worst(self) -> Change | None:
        """The change with the smallest lower bound of its gain; None if none is known."""
        known = [change for change in self.changes if change.gain is not None]
        return min(known, key=lambda change: change.gain.low, default=None)  # type: ignore[union-attr]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data for `json.dumps`."""
        return {
            "calls": self.calls,
            "calls_without_table": self.calls_without_table,
            "calls_changed": self.calls_changed,
            "saved": None if self.saved is None else asdict(self.saved),
            "changes": [
                {
                    "collective": change.called.collective.wire,
                    "size_bytes": bin_center_bytes(change.called.bin),
                    "num_nodes": change.called.num_nodes,
                    "num_ranks": change.called.num_ranks,
                    "calls": change.called.calls,
                    "median_us": change.called.median_us,
                    "ran": change.called.ran,
                    "config": change.config,
                    "channels": change.channels,
                    "own_channels": change.own_channels,
                    "gain": None if change.gain is None else asdict(change.gain),
                }
                for change in self.changes
            ],
        }


def look_ahead(artifact: Artifact, called: Sequence[Called], system: str | None) -> Outlook:
    """What an artifact would do with calls; raises UserError where `system` is to be named."""
    gains = gate_gains(artifact)
    changes, without = [], 0
    for each in called:
        try:
            info = pick_table(artifact, each.num_nodes, each.num_ranks, system)
        except UnknownName:
            without += each.calls
            continue
        config = DecisionTable.read(artifact.directory / info.path).at(each.collective, each.bin)
        if config is not None:
            place = (info.system, each.num_nodes, each.num_ranks, each.collective.wire, each.bin)
            used = channels_of(artifact, info, each.collective, each.bin, config)
            changes.append(Change(each, config.key, gains.get(place), **used))
    changes.sort(key=lambda change: -(change.called.time_us or change.called.calls))
    calls = sum(each.calls for each in called)
    return Outlook(calls, without, changes, _saved(called, changes))


def gate_gains(artifact: Artifact) -> dict[tuple[str, int, int, str, int], Gain]:
    """(system, nodes, ranks, collective, bin) -> gain in the gate's runs; {} without a gate."""
    path = artifact.directory / GATE_NAME
    if not path.is_file():
        return {}
    try:
        cells = json.loads(path.read_bytes())["cells"]
        places = {
            (c["system"], c["num_nodes"], c["num_ranks"], c["collective"], c["bin"]): c
            for c in cells
        }
        found = {
            place: Gain(cell["gain"], cell["low"], cell["high"])
            for place, cell in places.items()
            if cell["verdict"] == _PASSED and cell.get("low") is not None
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFile(f"{path} is not what a gate writes: {error}; gate again") from error
    for place, cell in places.items():
        if place not in found and cell["verdict"] == "inferred":
            beside = [
                gain
                for other, gain in found.items()
                if other[:4] == place[:4] and places[other]["config"] == cell["config"]
            ]
            if beside:
                found[place] = min(beside, key=lambda gain: gain.low)
    return found


def _saved(called: Sequence[Called], changes: Sequence[Change]) -> Gain | None:
    """Saved fraction of all recorded time; bins without a known gain count as 0."""
    total = sum(each.time_us or 0.0 for each in called)
    known = [
        (change.called.time_us, change.gain)
        for change in changes
        if change.called.time_us is not None and change.gain is not None
    ]
    if not total or not known:
        return None

    def share(of: Callable[[Gain], float]) -> float:
        return sum(time * (1.0 - 1.0 / (1.0 + of(gain))) for time, gain in known) / total

    # All ends together: gains of one gate are not independent.
    return Gain(share(lambda g: g.mean), share(lambda g: g.low), share(lambda g: g.high))
