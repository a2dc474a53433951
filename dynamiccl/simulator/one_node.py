"""Corrections of NCCL's model of one H100 node from measurements.

The figures (ORIGIN.md) are a bandwidth of 1 GB messages and a latency for 2, 4 and 8 GPUs, linear
between these, for whatever NCCL chose. Nothing tells the cells of a collective apart, so all of
them get the same correction: the factor and the extra latency that make the chosen cell's line go
through the measured points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from dynamiccl.nccl import Collective
from dynamiccl.simulator.group import CostLine, Group
from dynamiccl.simulator.tables import default_model, read_csv

_LARGE_BYTES: Final = 10**9


@dataclass(frozen=True, slots=True)
class Correction:
    """Measured over predicted: a factor of the bandwidth, and a difference of latencies in us."""

    bandwidth_factor: float = 1.0
    extra_latency_us: float = 0.0


@cache
def correction(collective: Collective, num_ranks: int) -> Correction:
    """The correction for `num_ranks` GPUs of one node; none where nothing was measured."""
    model = default_model().lines(Group(1, num_ranks))
    lines = [line for cell, line in model.items() if cell[0] is collective]
    algbw = _points("one_node_algbw").get(collective.wire.lower())
    latency = _points("one_node_latency").get(collective.wire.lower())
    if algbw is None or latency is None:
        return Correction()
    large = min(lines, key=_large_us)
    small = min(lines, key=lambda line: line.latency_us)
    return Correction(
        float(np.interp(num_ranks, *algbw)) / large.algbw_gbytes_per_s,
        float(np.interp(num_ranks, *latency)) - small.latency_us,
    )


def _large_us(line: CostLine) -> float:
    return line.latency_us + _LARGE_BYTES / (1000.0 * line.algbw_gbytes_per_s)


@cache
def _points(table: str) -> Mapping[str, tuple[Sequence[float], Sequence[float]]]:
    """(GPU counts, values) by collective."""
    points: dict[str, tuple[list[float], list[float]]] = {}
    for row in read_csv("h100_corrections.csv"):
        if row["table"] == table:
            counts, values = points.setdefault(row["applies_to"], ([], []))
            counts.append(float(row["index_value"]))
            values.append(float(row["factor_or_value"]))
    return points
