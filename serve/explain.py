"""`dynamiccl-deploy explain`: what an artifact would change in a job's calls, by what evidence.

Gains are those of the gate's fresh runs (gate.json), fractions of NCCL's own time, each with its
95 % interval: {"mean", "low", "high"}. A bin that was inferred has the least of those bins of its
collective and config that passed.
"""

import json
from collections.abc import Mapping, Sequence
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

#: Rows that people are shown; --json has all.
_SHOWN: Final = 15
_LEFT_OUT: Final = "NCCL asks no tuner about them, or the trace does not tell size, ranks or nodes"

Gain = Mapping[str, float]
#: System, nodes, ranks, collective, size bin.
Place = tuple[str, int, int, str, int]


def calls_of(
    data_dir: Path, num_nodes: int | None, num_ranks: int | None
) -> tuple[list[dict[str, Any]], int]:
    """The calls of a data directory's table `calls`, and how many are left out.

    A row is those of one collective, size bin and group shape: their number, the median of their
    times (null: none was recorded) and the algorithm and protocol that ran most (null: not
    recorded). What NCCL asks no tuner about is left out, and what does not tell size, ranks or
    nodes; the last two may be given for calls that do not tell. Raises MissingPath and
    NotEnoughData where none is left.
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
    return groups.sort(keys).to_dicts(), recorded.height - frame.height


def look_ahead(
    artifact: Artifact, called: Sequence[Mapping[str, Any]], system: str | None
) -> dict[str, Any]:
    """What an artifact would do with rows of `calls_of`, as `--json` shows it.

    `saved` is the share of all recorded time (null: no time, or no gain, is known); a gain is null
    where no gate measured it. Raises UserError where `system` is to be named.
    """
    gains = gate_gains(artifact)
    changes, without, saved_us = [], 0, dict.fromkeys(("mean", "low", "high"), 0.0)
    for row in called:
        try:
            info = pick_table(artifact, row["num_nodes"], row["num_ranks"], system)
        except UnknownName:
            without += row["calls"]
            continue
        collective = Collective.parse(row["collective"])
        config = DecisionTable.read(artifact.directory / info.path).at(collective, row["bin"])
        if config is None:
            continue
        shape = info.num_nodes, info.num_ranks
        gain = gains.get((info.system, *shape, collective.wire, row["bin"]))
        if gain is not None:
            for end, value in gain.items():
                # All ends together: gains of one gate are not independent.
                saved_us[end] += _time_us(row) * (1.0 - 1.0 / (1.0 + value))
        changes.append(
            {
                "collective": collective.wire,
                "size_bytes": bin_center_bytes(row["bin"]),
                **{name: row[name] for name in ("num_nodes", "num_ranks", "calls")},
                **{name: row[name] for name in ("median_us", "ran")},
                "config": config.key,
                **channels_of(artifact, info, collective, row["bin"], config),
                "gain": gain,
            }
        )
    changes.sort(key=lambda change: -(_time_us(change) or change["calls"]))
    total_us = sum(map(_time_us, called))
    known = any(change["gain"] and change["median_us"] is not None for change in changes)
    return {
        "calls": sum(row["calls"] for row in called),
        "calls_without_table": without,
        "calls_changed": sum(change["calls"] for change in changes),
        "saved": {end: us / total_us for end, us in saved_us.items()}
        if known and total_us
        else None,
        "changes": changes,
    }


def _time_us(row: Mapping[str, Any]) -> float:
    """Of all its calls, at the median; 0 where unknown."""
    return float(row["calls"] * (row["median_us"] or 0.0))


def gate_gains(artifact: Artifact) -> dict[Place, Gain]:
    """The gain of each size bin in the gate's runs; {} without a gate."""
    path = artifact.directory / GATE_NAME
    if not path.is_file():
        return {}
    names = ("system", "num_nodes", "num_ranks", "collective", "bin")
    try:
        cells = json.loads(path.read_bytes())["cells"]
        places = {tuple(cell[name] for name in names): cell for cell in cells}
        found: dict[Place, Gain] = {
            place: {"mean": cell["gain"], "low": cell["low"], "high": cell["high"]}
            for place, cell in places.items()
            if cell["verdict"] == "passed" and cell.get("low") is not None
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFile(f"{path} is not what a gate writes: {error}; gate again") from error
    measured = list(found.items())
    for place, cell in places.items():
        beside = [
            gain
            for other, gain in measured
            if other[:4] == place[:4] and places[other]["config"] == cell["config"]
        ]
        if cell["verdict"] == "inferred" and beside:
            found.setdefault(place, min(beside, key=lambda gain: gain["low"]))
    return found


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
        cli.print_json({**opened.to_json(), "outlook": outlook, "calls_left_out": left_out})
        return
    if left_out:
        stderr.print(f"{left_out} calls are left out: {_LEFT_OUT}", soft_wrap=True)
    _say(*_about(opened))
    if outlook is not None:
        _show_outlook(outlook)
    _say(
        "in your process: one library (libnccl-tuner-dynamiccl.so) without threads, files or "
        "messages of its own once a communicator is made; each collective is a look-up in a table "
        "(docs/plugin.md)",
        f"off: touch {opened.directory / KILL_NAME}, for communicators made from then on "
        "(in mode adaptive at once); for one job: DYNAMICCL_DISABLE=1",
    )


def _say(*lines: str) -> None:
    for line in lines:
        stdout.print(line, soft_wrap=True, highlight=False, markup=False)


def _about(artifact: Artifact) -> list[str]:
    evidence = "none; no fresh run stands behind it"
    if gains := gate_gains(artifact):
        least = min(gains.values(), key=lambda gain: gain["low"])
        evidence = (
            f"{GATE_NAME}, fresh runs paired with NCCL's own choice; of {len(gains)} size bins "
            f"the least gain is {_text(least)}"
        )
    machines = "; ".join(sorted(artifact.index.systems)) or "no machine yet (dynamiccl-deploy bind)"
    return [
        f"{artifact.directory}: {artifact.in_short}",
        f"evidence: {evidence}",
        f"acts on: {machines}",
    ]


def _show_outlook(outlook: Mapping[str, Any]) -> None:
    table = folding_table(
        "collective", "bytes", "nodes x ranks", "calls", "ran", "would run", "channels", "gain"
    )
    changes = outlook["changes"]
    for change in changes[:_SHOWN]:
        table.add_row(
            change["collective"],
            str(change["size_bytes"]),
            f"{change['num_nodes']} x {change['num_ranks'] // change['num_nodes']}",
            str(change["calls"]),
            change["ran"] or "not known",
            change["config"],
            f"{change['channels'] or '?'}, NCCL's {change['own_channels'] or '?'}",
            "not measured" if change["gain"] is None else _text(change["gain"]),
        )
    if changes:
        wide_stdout().print(table)
    if len(changes) > _SHOWN:
        _say(f"... and {len(changes) - _SHOWN} more (--json has all)")
    _say(
        f"of {outlook['calls']} calls it would decide {outlook['calls_changed']}; NCCL's own "
        f"choice stands for the others, {outlook['calls_without_table']} of them on shapes without "
        "a table"
    )
    if saved := outlook["saved"]:
        ends = f"{saved['low']:.1%} to {saved['high']:.1%}"
        _say(f"expected: {saved['mean']:.1%} of the recorded time saved ({ends})")
    if known := [change for change in changes if change["gain"]]:
        worst = min(known, key=lambda change: float(change["gain"]["low"]))
        size = worst["size_bytes"]
        _say(f"worst case: {worst['collective']} of {size} bytes, {_text(worst['gain'])}")


def _text(gain: Gain) -> str:
    return f"{gain['mean']:+.1%} ({gain['low']:+.1%} to {gain['high']:+.1%})"
