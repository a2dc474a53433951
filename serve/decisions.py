"""`dynamiccl-deploy table`: a table's decisions by message size, also for NVIDIA's example tuner.

The format of that tuner's config file is that of nccl v2.30.7 `plugins/tuner/example`:

`collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff`

It sets one channel before it looks for a line, so both `channels=-1` and "no line matches" force
ONE channel (plugin.c:361). We therefore write 0, which leaves NCCL's own count, and never -1. What
that format cannot say is left out and counted: to abstain, and a config with an AUTO knob.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Final

import typer

from dynamiccl import cli
from dynamiccl.datasets.features import TUNED
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.nccl import Algorithm, Collective, Config
from dynamiccl.serve.artifact import Artifact, TableInfo, channels_of, open_artifact, pick_table
from dynamiccl.serve.options import ArtifactDir, System, folding_table, stdout, warn
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import bin_center_bytes, bin_first_byte

_FORMATS: Final = ("nccl-csv", "json", "table")
_ALGORITHMS: Final = {
    Algorithm.CollNetDirect: "collnet_direct",
    Algorithm.CollNetChain: "collnet_chain",
    Algorithm.NVLSTree: "nvls_tree",
}


def table_command(
    artifact: ArtifactDir,
    ranks: Annotated[int, typer.Option(help="Ranks of the communicator.", min=2)],
    nodes: Annotated[int, typer.Option(help="NCCL's nNodes.", min=1)],
    system: System = None,
    format_: Annotated[
        str, typer.Option("--format", help=f"One of {', '.join(_FORMATS)}.")
    ] = "json",
) -> None:
    """Print the decisions of an artifact's table by message size.

    Example: dynamiccl-deploy table out/artifact --ranks 32 --nodes 4 --format nccl-csv
    """
    if format_ not in _FORMATS:
        raise UnknownName("format", format_, _FORMATS)
    if ranks % nodes != 0:
        raise UserError(f"{ranks} ranks do not divide into {nodes} nodes; check --ranks, --nodes")
    opened = open_artifact(artifact)
    info = pick_table(opened, nodes, ranks, system)
    table = DecisionTable.read(artifact / info.path)
    if format_ == "nccl-csv":
        _print_csv(table)
        return
    decisions = _decisions(opened, info, table)
    if format_ == "json":
        shape = {"system": info.system, "num_nodes": nodes, "num_ranks": ranks}
        cli.print_json({**shape, "decisions": decisions})
        return
    columns = ("collective", "from bytes", "to bytes", "config", "channels", "NCCL's own")
    shown = folding_table(*columns, title=f"{info.system}, {ranks} ranks on {nodes} nodes")
    for collective, rows in decisions.items():
        for key, group in groupby(rows, key=_shown):
            same = list(group)
            ends = str(same[0]["first_byte"]), str(same[-1]["last_byte"])
            shown.add_row(collective, *ends, *key)
    stdout.print(shown)


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


@dataclass(frozen=True, slots=True)
class NcclCsv:
    """The file's text, and the number of size bins that the format cannot express."""

    text: str
    bins_abstaining: int
    bins_with_auto: int


def nccl_csv(table: DecisionTable) -> NcclCsv:
    """Write a table in NVIDIA's format, neighbouring bins of one config as one line."""
    lines = [
        "# DynamICCL decision table for NVIDIA's example tuner plugin (NCCL_TUNER_CONFIG_FILE).",
        "# Sizes without a line get ONE channel from that plugin, not NCCL's own choice.",
    ]
    abstaining = auto = 0
    for collective in TUNED:
        for first, last, config in _ranges(table, collective):
            bins = last - first + 1
            if config is None:
                abstaining += bins
            elif config.algorithm is None or config.protocol is None:
                auto += bins
            else:
                lines.append(_line(table, collective, first, last, config))
    return NcclCsv("\n".join(lines) + "\n", abstaining, auto)


def _ranges(
    table: DecisionTable, collective: Collective
) -> Iterator[tuple[int, int, Config | None]]:
    bins = range(table.first_bin, table.first_bin + table.num_bins)
    for config, group in groupby(bins, key=lambda index: table.at(collective, index)):
        same = list(group)
        yield same[0], same[-1], config


def _line(
    table: DecisionTable, collective: Collective, first: int, last: int, config: Config
) -> str:
    assert config.algorithm is not None
    assert config.protocol is not None
    fields = (
        collective.wire.lower(),
        bin_first_byte(first),
        bin_first_byte(last + 1) - 1,
        _ALGORITHMS.get(config.algorithm, config.algorithm.wire.lower()),
        config.protocol.wire.lower(),
        config.num_channels or 0,
        table.num_nodes,
        table.num_ranks,
        -1,
        -1,
    )
    return ",".join(str(field) for field in fields)
