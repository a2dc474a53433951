"""Writes a decision table as a config file of NVIDIA's example tuner.

The format is that of nccl v2.30.7 `plugins/tuner/example`:

`collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff`

That tuner sets one channel before it looks for a line, so both `channels=-1` and "no line matches"
force ONE channel (plugin.c:361). We therefore write 0, which leaves NCCL's own count, and never -1.
What that format cannot say is left out and counted: to abstain, and a config with an AUTO knob.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from dynamiccl.datasets.features import TUNED
from dynamiccl.nccl import Algorithm, Collective, Config
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import bin_first_byte

_ALGORITHMS: Final = {
    Algorithm.CollNetDirect: "collnet_direct",
    Algorithm.CollNetChain: "collnet_chain",
    Algorithm.NVLSTree: "nvls_tree",
}


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
