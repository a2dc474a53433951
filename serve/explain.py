"""`dynamiccl-deploy explain`: what an artifact would change in a job's calls, by what evidence.

Gains are those of the gate's fresh runs (gate.json), each with its 95 % interval. A bin that was
inferred has the least of those bins of its collective and config that passed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import polars as pl
import typer

from dynamiccl import cli
from dynamiccl.datasets.cells import asking
from dynamiccl.datasets.manifest import GATE_NAME, KILL_NAME
from dynamiccl.datasets.store import read_calls
from dynamiccl.errors import CorruptFile, NotEnoughData, UnknownName
from dynamiccl.nccl import Collective
from dynamiccl.serve.artifact import Artifact, channels_of, open_artifact, pick_table
from dynamiccl.serve.options import (
    ArtifactDir,
    Json,
    System,
    folding_table,
    stderr,
    stdout,
    wide_stdout,
)
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import bin_center_bytes

_PASSED: Final = "passed"
#: Rows that people are shown; --json has all.
_SHOWN: Final = 15
_LEFT_OUT: Final = "NCCL asks no tuner about them, or the trace does not tell size, ranks or nodes"


@dataclass(frozen=True, slots=True)
class Called:
    """Calls of one collective and size bin on communicators of one shape."""

    collective: Collective
    bin: int
    num_nodes: int
    num_ranks: int
    calls: int
    #: Of those with a time, its median; None: no time was recorded.
    median_us: float | None = None
    #: The algorithm and protocol that ran most; None: not recorded.
    ran: str | None = None

    @property
    def time_us(self) -> float | None:
        """Total time in us, at the median; None where unknown."""
        return None if self.median_us is None else self.calls * self.median_us


def calls_of(
    data_dir: Path, num_nodes: int | None, num_ranks: int | None
) -> tuple[list[Called], int]:
    """The calls of a data directory's table `calls`, and how many are left out.

    What NCCL asks no tuner about is, and what does not tell size, ranks or nodes; the last two may
    be given for calls that do not tell. Raises MissingPath and NotEnoughData where none is left.
    """
    recorded = read_calls(data_dir).with_columns(
        pl.col("num_nodes").fill_null(pl.lit(num_nodes, pl.Int64)),
        pl.col("num_ranks").fill_null(pl.lit(num_ranks, pl.Int64)),
    )
    frame = asking(recorded).drop_nulls(["num_nodes", "num_ranks"])
    if frame.is_empty():
        raise NotEnoughData(
            f"none of the {recorded.height} calls in {data_dir} is one that a table could decide, "
            "with size, ranks and nodes; give --nodes (and --ranks) for traces that do not tell"
        )
    keys = ("collective", "bin", "num_nodes", "num_ranks")
    ran = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    groups = frame.group_by(keys).agg(
        calls=pl.len(),
        median_us=pl.col("time_us").median(),
        ran=ran.drop_nulls().mode().sort().first(),
    )
    found = [
        Called(Collective.parse(collective), *others)
        for collective, *others in groups.sort(keys).iter_rows()
    ]
    return found, recorded.height - frame.height


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


# --- The command ---


def explain_command(
    artifact: ArtifactDir,
    calls: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Data directory with a job's calls.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks, where the calls do not say.", min=2)
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="NCCL's nNodes, where the calls do not say.", min=1)
    ] = None,
    system: System = None,
    as_json: Json = False,
) -> None:
    """Show what an artifact would change in your calls, and on what evidence.

    Example: dynamiccl-deploy explain artifact --calls data
    """
    opened = open_artifact(artifact)
    outlook, left_out = None, 0
    if calls is not None:
        called, left_out = calls_of(calls, nodes, ranks)
        outlook = look_ahead(opened, called, system)
    if as_json:
        found = None if outlook is None else outlook.to_json()
        cli.print_json({**opened.to_json(), "outlook": found, "calls_left_out": left_out})
        return
    if left_out:
        stderr.print(f"{left_out} calls are left out: {_LEFT_OUT}", soft_wrap=True)
    for line in _about(opened):
        stdout.print(line, soft_wrap=True, highlight=False, markup=False)
    if outlook is not None:
        _show_outlook(outlook)
    for line in _in_the_process(opened):
        stdout.print(line, soft_wrap=True, highlight=False, markup=False)


def _about(artifact: Artifact) -> list[str]:
    lines = [f"{artifact.directory}: {artifact.in_short}"]
    gains = gate_gains(artifact)
    if gains:
        least = min(gains.values(), key=lambda gain: gain.low)
        lines.append(
            f"evidence: {GATE_NAME}, fresh runs paired with NCCL's own choice; of {len(gains)} "
            f"size bins the least gain is {_text(least)}"
        )
    else:
        lines.append("evidence: none; no fresh run stands behind it")
    machines = [m for name in artifact.index.system_names for m in artifact.index.machines_of(name)]
    lines.append(f"acts on: {'; '.join(machines) or 'no machine yet (dynamiccl-deploy bind)'}")
    return lines


def _show_outlook(outlook: Outlook) -> None:
    table = folding_table(
        "collective", "bytes", "nodes x ranks", "calls", "ran", "would run", "channels", "gain"
    )
    for change in outlook.changes[:_SHOWN]:
        called = change.called
        table.add_row(
            called.collective.wire,
            str(bin_center_bytes(called.bin)),
            f"{called.num_nodes} x {called.num_ranks // called.num_nodes}",
            str(called.calls),
            called.ran or "not known",
            change.config,
            f"{change.channels or '?'}, NCCL's {change.own_channels or '?'}",
            "not measured" if change.gain is None else _text(change.gain),
        )
    if outlook.changes:
        wide_stdout().print(table)
    lines = [f"... and {len(outlook.changes) - _SHOWN} more (--json has all)"]
    lines = lines if len(outlook.changes) > _SHOWN else []
    lines.append(
        f"of {outlook.calls} calls it would decide {outlook.calls_changed}; NCCL's own choice "
        f"stands for the others, {outlook.calls_without_table} of them on shapes without a table"
    )
    if outlook.saved is not None:
        saved = outlook.saved
        lines.append(
            f"expected: {saved.mean:.1%} of the recorded time saved ({saved.low:.1%} to "
            f"{saved.high:.1%})"
        )
    if outlook.worst is not None and outlook.worst.gain is not None:
        called, gain = outlook.worst.called, outlook.worst.gain
        size = bin_center_bytes(called.bin)
        lines.append(f"worst case: {called.collective.wire} of {size} bytes, {_text(gain)}")
    for line in lines:
        stdout.print(line, soft_wrap=True, highlight=False, markup=False)


def _text(gain: Gain) -> str:
    return f"{gain.mean:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"


def _in_the_process(artifact: Artifact) -> list[str]:
    return [
        "in your process: one library (libnccl-tuner-dynamiccl.so) without threads, files or "
        "messages of its own once a communicator is made; each collective is a look-up in a table "
        "(docs/plugin.md)",
        f"off: touch {artifact.directory / KILL_NAME}, for communicators made from then on "
        "(in mode adaptive at once); for one job: DYNAMICCL_DISABLE=1",
    ]
