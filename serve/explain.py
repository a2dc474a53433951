"""`dynamiccl-deploy explain` and `table`: what an artifact would change, and by what evidence.

Gains are those of the gate's fresh runs (gate.json), fractions of NCCL's own time with 95 %
intervals: {"mean", "low", "high"}. An inferred bin has the least of the bins of its collective and
config that passed.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Final

import polars as pl
import typer

from dynamiccl import cli
from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.manifest import GATE_NAME, KILL_NAME, Support
from dynamiccl.datasets.objective import with_nodes
from dynamiccl.datasets.questions import count_of, read_back_channels
from dynamiccl.datasets.store import read_calls
from dynamiccl.errors import NotEnoughData, UnknownName
from dynamiccl.nccl import ABSTAIN, Collective, Config
from dynamiccl.serve.artifact import Artifact, ArtifactDir, Group, System, open_artifact
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import bin_center_bytes, bin_first_byte
from dynamiccl.train.options import Json, folding_table, stderr, stdout, tell, wide_stdout

_SHOWN: Final = 15
Gain = Mapping[str, float]
#: System, nodes, ranks, collective, size bin.
Place = tuple[str, int, int, str, int]


def look_ahead(artifact: Artifact, calls: pl.DataFrame, system: str | None) -> dict[str, Any]:
    """What an artifact would do with calls of `with_nodes`, as `--json` shows it.

    `saved` is a share of all recorded time; it and gains are null where unknown. Raises UserError
    where `system` is to be named.
    """
    keys = ("collective", "bin", "num_nodes", "num_ranks")
    ran = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    groups = calls.group_by(keys).agg(
        calls=pl.len(),
        median_us=pl.col("time_us").median(),
        ran=ran.drop_nulls().mode().sort().first(),
    )
    gains, changes, without = gate_gains(artifact), [], 0
    total_us, saved_us = 0.0, dict.fromkeys(("mean", "low", "high"), 0.0)
    for row in groups.sort(keys).to_dicts():
        time_us = _time_us(row)
        total_us += time_us
        try:
            support, table = artifact.pick(row["num_nodes"], row["num_ranks"], system)
        except UnknownName:
            without += row["calls"]
            continue
        collective = Collective.parse(row["collective"])
        index = row.pop("bin")
        config = table.at(collective, index)
        if config is None:
            continue
        shape = support.system, table.num_nodes, table.num_ranks
        gain = gains.get((*shape, collective.wire, index))
        for end, value in (gain or {}).items():
            # All ends together: gains of one gate are not independent.
            saved_us[end] += time_us * (1.0 - 1.0 / (1.0 + value))
        what = {"size_bytes": bin_center_bytes(index), "config": config.key, "gain": gain}
        changes.append({**row, **what, **channels_of(artifact, support, collective, index, config)})
    changes.sort(key=lambda change: -(_time_us(change) or change["calls"]))
    known = any(change["gain"] and change["median_us"] is not None for change in changes)
    is_saved = known and total_us > 0.0
    return {
        "calls": calls.height,
        "calls_without_table": without,
        "calls_changed": sum(change["calls"] for change in changes),
        "saved": {end: us / total_us for end, us in saved_us.items()} if is_saved else None,
        "changes": changes,
    }


def _time_us(row: Mapping[str, Any]) -> float:
    """All its calls at their median; 0: unknown."""
    return float(row["calls"] * (row["median_us"] or 0.0))


def gate_gains(artifact: Artifact) -> dict[Place, Gain]:
    """Gains of size bins in the gate's runs; {} without a gate."""
    path = artifact.directory / GATE_NAME
    if not path.is_file():
        return {}
    shape = ("system", "num_nodes", "num_ranks", "collective")
    gains: dict[Place, Gain] = {}
    measured = defaultdict[tuple[Any, ...], list[Gain]](list)
    cells = json.loads(path.read_bytes())["cells"]  # by its hash it is what a gate wrote
    for cell in (c for c in cells if c["verdict"] == "passed" and c.get("low") is not None):
        key = tuple(cell[name] for name in shape)
        gain = {"mean": cell["gain"], "low": cell["low"], "high": cell["high"]}
        gains[*key, cell["bin"]] = gain
        measured[*key, cell["config"]].append(gain)
    for cell in (cell for cell in cells if cell["verdict"] == "inferred"):
        key = tuple(cell[name] for name in shape)
        if beside := measured[*key, cell["config"]]:
            gains.setdefault((*key, cell["bin"]), min(beside, key=lambda gain: gain["low"]))
    return gains


def channels_of(
    artifact: Artifact, support: Support, collective: Collective, index: int, config: Config | None
) -> dict[str, int | None]:
    """`channels` of an answer, `own_channels` of NCCL's choice; None: not read back."""
    [used] = read_back_channels(artifact.manifest, support, collective, [index])
    action = artifact.manifest.actions().configs.index(config or ABSTAIN)
    return {"channels": count_of(used[action]), "own_channels": count_of(used[0])}


def explain_command(
    artifact: ArtifactDir,
    calls: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Data directory with a job's calls.")
    ] = None,
    system: System = None,
    as_json: Json = False,
) -> None:
    """Show what an artifact would change in your calls, and on what evidence.

    Example: dynamiccl-deploy explain artifact --calls data
    """
    opened = open_artifact(artifact)
    outlook, left_out, notes = None, 0, list[str]()
    if calls is not None:
        recorded = read_calls(calls)
        asked, notes = with_nodes(recorded, opened.manifest)
        left_out = recorded.height - asked.height
        if asked.is_empty():
            raise NotEnoughData(
                f"none of the {recorded.height} calls in {calls} is one that a table could decide, "
                "of a collective about which NCCL asks a tuner, and with its size"
            )
        outlook = look_ahead(opened, asked, system)
    for note in notes:
        tell(stderr, note)
    if as_json:
        cli.print_json({**opened.to_json(), "outlook": outlook, "calls_left_out": left_out})
        return
    if left_out:
        left = "calls are left out: NCCL asks no tuner about them, or no size is told"
        tell(stderr, f"{left_out} {left}")
    evidence = "none; no fresh run stands behind it"
    if gains := gate_gains(opened):
        least = min(gains.values(), key=lambda gain: gain["low"])
        evidence = (
            f"{GATE_NAME}, fresh runs paired with NCCL's own choice; of {len(gains)} size bins "
            f"the least gain is {_text(least)}"
        )
    machines = "; ".join(sorted(opened.index.systems)) or "no machine yet (dynamiccl-deploy bind)"
    tell(
        stdout,
        f"{artifact}: {opened.in_short}\nevidence: {evidence}\nacts on: {machines}",
    )
    if outlook is not None:
        _show_outlook(outlook)
    tell(
        stdout,
        "in your process: one library (libnccl-tuner-dynamiccl.so) without threads, files or "
        "messages of its own once a communicator is made; each collective is a look-up in a table "
        "(docs/plugin.md)\n"
        f"off: touch {artifact / KILL_NAME}, for communicators made from then on "
        "(in mode adaptive at once); for one job: DYNAMICCL_DISABLE=1",
    )


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
        tell(stdout, f"... and {len(changes) - _SHOWN} more (--json has all)")
    tell(
        stdout,
        f"of {outlook['calls']} calls it would decide {outlook['calls_changed']}; NCCL's own "
        f"choice stands for the others, {outlook['calls_without_table']} of them on shapes without "
        "a table",
    )
    if saved := outlook["saved"]:
        ends = f"{saved['low']:.1%} to {saved['high']:.1%}"
        tell(stdout, f"expected: {saved['mean']:.1%} of the recorded time saved ({ends})")
    if known := [change for change in changes if change["gain"]]:
        worst = min(known, key=lambda change: float(change["gain"]["low"]))
        size = worst["size_bytes"]
        tell(stdout, f"worst case: {worst['collective']} of {size} bytes, {_text(worst['gain'])}")


def _text(gain: Gain) -> str:
    return f"{gain['mean']:+.1%} ({gain['low']:+.1%} to {gain['high']:+.1%})"


def table_command(
    artifact: ArtifactDir,
    group: Group,
    system: System = None,
    as_json: Json = False,
) -> None:
    """Print the decisions of an artifact's table by message size.

    Example: dynamiccl-deploy table out/artifact --group 4x8
    """
    nodes, per_node = cli.parse_group(group)
    opened, ranks = open_artifact(artifact), nodes * per_node
    support, table = opened.pick(nodes, ranks, system)
    bins = range(table.first_bin, table.first_bin + table.num_bins)
    decisions = {
        collective.wire: [_decision(opened, support, table, collective, index) for index in bins]
        for collective in TUNED
    }
    if as_json:
        shape = {"system": support.system, "num_nodes": nodes, "num_ranks": ranks}
        cli.print_json({**shape, "decisions": decisions})
        return
    columns = ("collective", "from bytes", "to bytes", "config", "channels", "NCCL's own")
    shown = folding_table(*columns, title=f"{support.system}, {ranks} ranks on {nodes} nodes")
    for collective, rows in decisions.items():
        for key, same in groupby(rows, key=_shown):
            first, *_, last = [*same] * 2
            ends = str(first["first_byte"]), str(last["last_byte"])
            shown.add_row(collective, *ends, *key)
    stdout.print(shown)


def _decision(
    artifact: Artifact, support: Support, table: DecisionTable, collective: Collective, index: int
) -> dict[str, Any]:
    config = table.at(collective, index)
    return {
        "bin": index,
        "size_bytes": bin_center_bytes(index),
        "first_byte": bin_first_byte(index),
        "last_byte": bin_first_byte(index + 1) - 1,
        "config": config.key if config else None,
        **channels_of(artifact, support, collective, index, config),
    }


def _shown(row: Mapping[str, Any]) -> tuple[str, str, str]:
    used, own = (str(row.get(name) or "-") for name in ("channels", "own_channels"))
    return row["config"] or "NCCL's own", used, own
