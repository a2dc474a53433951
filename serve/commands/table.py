"""`dynamiccl-deploy table`: what is decided, by message size."""

import sys
from typing import Annotated, Any, Final

import typer

from dynamiccl import cli
from dynamiccl.datasets.features import TUNED
from dynamiccl.errors import UnknownName
from dynamiccl.serve.artifact import TableInfo, open_artifact, pick_table
from dynamiccl.serve.commands.options import ArtifactDir, System
from dynamiccl.serve.nccl_csv import nccl_csv
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import bin_center_bytes

_FORMATS: Final = ("nccl-csv", "json")


def table_command(
    artifact: ArtifactDir,
    ranks: Annotated[int, typer.Option(help="Ranks of the communicator.", min=2)],
    nodes: Annotated[int, typer.Option(help="NCCL's nNodes.", min=1)],
    system: System = None,
    format_: Annotated[
        str, typer.Option("--format", help=f"One of {', '.join(_FORMATS)}.")
    ] = "json",
) -> None:
    """Print one decision table, for people's scripts or for NVIDIA's example tuner.

    Example: dynamiccl-deploy table out/artifact --ranks 32 --nodes 4 --format nccl-csv
    """
    if format_ not in _FORMATS:
        raise UnknownName("format", format_, _FORMATS)
    opened = open_artifact(artifact)
    info = pick_table(opened, nodes, ranks, system)
    table = DecisionTable.read(artifact / info.path)
    if format_ == "json":
        cli.print_json(_table_json(info, table))
        return
    written = nccl_csv(table)
    sys.stdout.write(written.text)
    lost = written.bins_abstaining + written.bins_with_auto
    if lost:
        print(
            f"warning: {written.bins_abstaining} size bins abstain and {written.bins_with_auto} "
            "leave a knob to NCCL; that format cannot say either, and NVIDIA's example tuner "
            "forces ONE channel where no line matches. Our own plugin abstains there.",
            file=sys.stderr,
        )


def _table_json(info: TableInfo, table: DecisionTable) -> dict[str, Any]:
    bins = range(table.first_bin, table.first_bin + table.num_bins)
    decisions: dict[str, list[dict[str, Any]]] = {}
    for collective in TUNED:
        rows = []
        for index in bins:
            size = bin_center_bytes(index)
            config = table.lookup(collective, size)
            rows.append(
                {"bin": index, "size_bytes": size, "config": config.key if config else None}
            )
        decisions[collective.wire] = rows
    return {
        "system": info.system,
        "num_nodes": table.num_nodes,
        "num_ranks": table.num_ranks,
        "decisions": decisions,
    }
