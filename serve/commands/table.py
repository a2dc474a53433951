"""`dynamiccl-deploy table`: the decisions by message size."""

import os
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dynamiccl import cli
from dynamiccl.datasets.features import TUNED
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.serve.abi import OUR_NAME
from dynamiccl.serve.artifact import Artifact, TableInfo, channels_of, open_artifact, pick_table
from dynamiccl.serve.ask_tuner import ask_plugin, table_answers
from dynamiccl.serve.commands.options import System, folding_table, stdout, warn
from dynamiccl.serve.nccl_csv import nccl_csv
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import bin_center_bytes, bin_first_byte

_FORMATS: Final = ("nccl-csv", "json", "table")


def table_command(
    ranks: Annotated[int, typer.Option(help="Ranks of the communicator.", min=2)],
    nodes: Annotated[int, typer.Option(help="NCCL's nNodes.", min=1)],
    artifact: Annotated[
        Path | None, typer.Argument(metavar="[ARTIFACT]", help="Artifact directory.")
    ] = None,
    plugin: Annotated[
        Path | None, typer.Option(help="Query this tuner plugin, ours or another (.so).")
    ] = None,
    system: System = None,
    format_: Annotated[
        str, typer.Option("--format", help=f"One of {', '.join(_FORMATS)}.")
    ] = "json",
) -> None:
    """Print the decisions by message size: of an artifact's table, or of any tuner plugin.

    A plugin is loaded in a separate process, with this environment, and called through its newest
    tuner ABI (v4 to v6), once for each octave from 1 KiB to 16 GiB. The cost table that it gets is
    synthetic: every cell for which NCCL has a kernel is available, the first at 10 us and each
    next one 1 us more. A plugin that compares costs, or looks at the machine, may decide
    differently in a job. Ours acts only when all ranks agree, so for our plugin the decisions are
    those of the artifact's table (ARTIFACT, or DYNAMICCL_ARTIFACT) under these costs.

    Example: dynamiccl-deploy table out/artifact --ranks 32 --nodes 4 --format nccl-csv
    Example: dynamiccl-deploy table --plugin libnccl-tuner-example.so --ranks 8 --nodes 1
    """
    if format_ not in _FORMATS:
        raise UnknownName("format", format_, _FORMATS)
    if ranks % nodes != 0:
        raise UserError(f"{ranks} ranks do not divide into {nodes} nodes; check --ranks, --nodes")
    if plugin is not None:
        _print_plugin(plugin, ranks, nodes, artifact, system, format_)
        return
    if artifact is None:
        raise UserError("nothing to show: give an ARTIFACT directory, or --plugin PATH.so")
    opened, info, table = _read(artifact, ranks, nodes, system)
    if format_ == "nccl-csv":
        _print_csv(table)
        return
    document = {
        "system": info.system,
        "num_nodes": nodes,
        "num_ranks": ranks,
        "decisions": _decisions(opened, info, table),
    }
    _print(document, f"{info.system}, {ranks} ranks on {nodes} nodes", format_)


def _read(
    artifact: Path, ranks: int, nodes: int, system: str | None
) -> tuple[Artifact, TableInfo, DecisionTable]:
    opened = open_artifact(artifact)
    info = pick_table(opened, nodes, ranks, system)
    return opened, info, DecisionTable.read(artifact / info.path)


def _decisions(
    artifact: Artifact, info: TableInfo, table: DecisionTable
) -> dict[str, list[dict[str, Any]]]:
    decisions: dict[str, list[dict[str, Any]]] = {}
    for collective in TUNED:
        rows = []
        for index in range(table.first_bin, table.first_bin + table.num_bins):
            size = bin_center_bytes(index)
            config = table.lookup(collective, size)
            rows.append(
                {
                    "bin": index,
                    "size_bytes": size,
                    "first_byte": bin_first_byte(index),
                    "last_byte": bin_first_byte(index + 1) - 1,
                    "config": config.key if config else None,
                    **channels_of(artifact, info, collective, index, config),
                }
            )
        decisions[collective.wire] = rows
    return decisions


def _print_plugin(
    plugin: Path, ranks: int, nodes: int, artifact: Path | None, system: str | None, format_: str
) -> None:
    if format_ == "nccl-csv":
        raise UserError("nccl-csv is for an artifact's table; take --format json or table")
    asked = ask_plugin(plugin, ranks, nodes)
    document = {"plugin": str(plugin), **asked, "num_nodes": nodes, "num_ranks": ranks}
    if asked["name"] == OUR_NAME:
        named = os.environ.get("DYNAMICCL_ARTIFACT")
        place = artifact or (Path(named) if named else None)
        if place is None:
            raise UserError("our own plugin decides by an artifact: name it, as ARTIFACT")
        _, _, table = _read(place, ranks, nodes, system)
        document["decisions"] = table_answers(table)
    versions = ", ".join(f"v{version}" for version in asked["tuner_versions"])
    title = f"{asked['name']} (tuner {versions}), {ranks} ranks on {nodes} nodes, made-up costs"
    _print(document, title, format_)


def _print(document: Mapping[str, Any], title: str, format_: str) -> None:
    if format_ == "json":
        cli.print_json(document)
        return
    # A plugin was asked at single sizes; a table holds for every byte of its bins.
    heads = ("first size asked", "last") if "plugin" in document else ("from bytes", "to bytes")
    columns = ("collective", *heads, "config", "channels", "NCCL's own")
    shown = folding_table(*columns, title=title)
    for collective, rows in document["decisions"].items():
        for key, group in groupby(rows, key=_shown):
            same = list(group)
            first = same[0].get("first_byte", same[0]["size_bytes"])
            last = same[-1].get("last_byte", same[-1]["size_bytes"])
            shown.add_row(collective, str(first), str(last), *key)
    stdout.print(shown)


def _shown(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Config, its channels and NCCL's own, as people are shown them."""
    used, own = (str(row.get(name) or "-") for name in ("channels", "own_channels"))
    return row["config"] or "NCCL's own", used, own


def _print_csv(table: DecisionTable) -> None:
    written = nccl_csv(table)
    sys.stdout.write(written.text)
    warn(
        "NVIDIA's example tuner takes it from NCCL 2.30 on; those of 2.27 to 2.29 crash at the "
        "first line that matches (seen with 2.27.7 and 2.29.7)."
    )
    lost = written.bins_abstaining + written.bins_with_auto
    if lost:
        warn(
            f"{written.bins_abstaining} size bins abstain and {written.bins_with_auto} leave a "
            "knob to NCCL; that format cannot say either, and NVIDIA's example tuner forces ONE "
            "channel where no line matches. Our own plugin abstains there."
        )
