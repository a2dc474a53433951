"""AlltoAll and SendRecv: a latency and a bandwidth, for the stand-in of nccl-tests alone.

Nothing is tuned about them (NCCL asks a tuner about five collectives only), so no cell, protocol or
channel count is modelled. AlltoAll has the measured latencies and bandwidths of ORIGIN.md; SendRecv
is one hop of a ring, with the cost model's constants for it.
"""

from functools import cache
from typing import Final

import numpy as np

from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.tables import lines, read_csv

#: What one 400 Gb/s network card of a GPU moves.
_NIC_GBYTES_PER_S: Final = 50.0


def point_to_point_us(group: Group, collective: Collective, size_bytes: int) -> float:
    """Time of one AlltoAll or SendRecv in us; `size_bytes` is one rank's whole buffer.

    Raises ValueError for another collective and KeyError for a group that is not in the tables.
    """
    if collective is Collective.SendRecv:
        line = lines()[group][Collective.Broadcast, Algorithm.Ring, Protocol.Simple]
        hop_us = line.latency_us if group.num_nodes == 1 else line.latency_us / group.num_ranks
        return hop_us + size_bytes / (1000.0 * line.algbw_gbytes_per_s)
    if collective is Collective.AlltoAll:
        return _alltoall_latency_us(group) + size_bytes / (1000.0 * _alltoall_algbw(group))
    raise ValueError(f"{collective.wire} is neither AlltoAll nor SendRecv")


def _alltoall_latency_us(group: Group) -> float:
    if group.num_nodes == 1:
        return _value("alltoall_ce_latency")
    rows = [row for row in read_csv("h100_corrections.csv") if row["table"] == "alltoall_latency"]
    nodes = [float(row["index_value"]) for row in rows]
    latencies = [float(row["factor_or_value"]) for row in rows]
    return float(np.interp(np.log2(group.num_nodes), np.log2(nodes), latencies))


def _alltoall_algbw(group: Group) -> float:
    if group.num_nodes == 1:
        return _value("alltoall_ce_algbw")
    away = (group.num_ranks - group.ranks_per_node) / group.num_ranks
    return _NIC_GBYTES_PER_S * (1.0 - _value("alltoall_nic_overhead") / group.num_nodes) / away


@cache
def _value(table: str) -> float:
    [row] = [row for row in read_csv("h100_corrections.csv") if row["table"] == table]
    return float(row["factor_or_value"])
