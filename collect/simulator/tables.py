"""The tables that the simulator ships, and the lines of NCCL's model that they hold."""

import csv
from collections.abc import Mapping
from functools import cache
from importlib import resources

from dynamiccl.collect.simulator.cost_model import one_node_groups, one_node_lines, rooted_lines
from dynamiccl.collect.simulator.group import Cell, Group, Line
from dynamiccl.nccl import Algorithm, Collective, Protocol


def read_csv(name: str) -> list[dict[str, str]]:
    """Rows of a table that lies beside this module."""
    text = resources.files("dynamiccl.collect.simulator").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def lines() -> Mapping[Group, Mapping[Cell, Line]]:
    """NCCL's model by group: several nodes from the table, the rest from NCCL's formulas."""
    known: dict[Group, dict[Cell, Line]] = {
        group: one_node_lines(group.num_ranks) for group in one_node_groups()
    }
    for row in read_csv("h100_ib_nccl2.27.5.csv"):
        group = Group(int(row["nodes"]), int(row["ranks_per_node"]))
        cell = (
            Collective.parse(row["collective"]),
            Algorithm.parse(row["algorithm"]),
            Protocol.parse(row["protocol"]),
        )
        line = Line(float(row["latency_us"]), float(row["algbw_gbytes_per_s"]))
        known.setdefault(group, {})[cell] = line
    return {group: {**held, **rooted_lines(group, held)} for group, held in known.items()}
