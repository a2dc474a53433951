"""Measurements of made-up clusters with slow parts, paired up as by examples/health.toml."""

import itertools
from typing import Any

import numpy as np
import polars as pl

from dynamiccl.collect.grid import communicators
from tests.rows import MIB, default, frame


def rows(nodes: int, *slow: str, gpus: int = 8, seed: int = 0) -> pl.DataFrame:
    """Nine a launch; slow parts are gpu:3:1:1.3, nic:3:1:2, node:3:2 or link:0:3:2.

    What is slow slows every communicator that it is in by its factor, and no other. Noise of 1.5 %
    has a heavy tail. `gpus` is a power of two.
    """
    ranks, random = nodes * gpus, np.random.default_rng(seed)
    bits = (ranks - 1).bit_length()
    splits = [f"AND {(1 << bits) - 1 - (1 << bit):#x}" for bit in range(bits)]
    if nodes & (nodes - 1):
        splits += [f"MOD {apart * gpus}" for apart in range((nodes + 1) // 2, nodes)]
    found = []
    for split, octave in itertools.product(splits, range(9)):
        pairs = communicators(split, nodes, gpus, spare=True)
        spans = len({process // gpus for process in pairs[0]})
        # Some are in no pair.
        times_us: list[float | None] = [None] * ranks
        for members in pairs:
            time_us = 100.0 * spans * 2.0**octave * np.exp(0.015 * random.standard_t(3))
            time_us *= max((slowdown(part, members, gpus) for part in slow), default=1.0)
            for process in members:
                times_us[process] = time_us
        row: dict[str, Any] = {"run": split, "comm_split": split, "num_hosts": nodes}
        row |= {"num_nodes": spans, "num_ranks": 2, "ranks_per_node": 2 // spans}
        row |= {"size_bytes": MIB << octave, "process_times_us": times_us}
        found.append(default(system="cluster", **row))
    return frame(*found)


def slowdown(part: str, members: tuple[int, ...], gpus: int) -> float:
    """How many times as long the communicator of these processes takes for a slow part."""
    kind, *rest, factor = part.split(":")
    node, other = int(rest[0]), int(rest[-1])
    places = [divmod(process, gpus) for process in members]
    nodes = {place[0] for place in places}
    uses = {
        "gpu": (node, other) in places and len(nodes) == 1,
        "nic": (node, other) in places and len(nodes) > 1,
        "node": node in nodes,
        "link": nodes == {node, other},
    }
    return float(factor) if uses[kind] else 1.0
