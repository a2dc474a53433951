"""The time that NCCL's own model gives each (algorithm, protocol).

It is of the latency and bandwidth that NCCL logs once for a communicator (table `costs`).

N tasks, C = 21 cells of the cost table, row-major (7 algorithms, 3 protocols)
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl import nccl
from dynamiccl.datasets.schema import COSTS, MODELLED_SWEEP
from dynamiccl.datasets.store import part_paths, read
from dynamiccl.drawn_worlds import Floats
from dynamiccl.nccl import NUM_ALGORITHMS, NUM_PROTOCOLS, Algorithm, Collective, Protocol

COST_KEY: Final = (
    *("system", "nccl_version", "num_nodes", "ranks_per_node"),
    *("launch_profile", "collective"),
)
_COST_COLUMNS: Final = (
    *(*COST_KEY, "algorithm", "protocol"),
    *("latency_us", "bandwidth_gbytes_per_s"),
)
COST_TYPES: Final = pl.Schema({name: pl.Schema(COSTS)[name] for name in _COST_COLUMNS})
NUM_CELLS: Final = NUM_ALGORITHMS * NUM_PROTOCOLS
#: Where rings between nodes become slower (nccl.plateau). The table of costs does not hold the
#: channels; with 4 or 64 the step is two octaves off, where NCCL's rings run LL or LL128.
_RING_CHANNELS: Final = 16


def read_costs(data_dir: Path) -> pl.DataFrame:
    """The costs of a data set, one row a cell; empty where NCCL's log was not kept.

    A group with several values of a cell (another topology) is left out, since which cell is the
    cheapest would be wrong. Logged costs replace modelled ones.
    """
    if not part_paths(data_dir, "costs"):
        return pl.DataFrame(schema=COST_TYPES)
    cell = [*COST_KEY, "algorithm", "protocol"]
    is_modelled = pl.col("sweep") == MODELLED_SWEEP
    everything = read(data_dir, "costs").filter(~is_modelled | is_modelled.all().over(COST_KEY))
    found = everything.select(*COST_TYPES).cast(COST_TYPES).unique()
    alone = found.filter((pl.len() == 1).over(cell).all().over(COST_KEY)).filter(
        pl.col("latency_us").is_not_null() & pl.col("bandwidth_gbytes_per_s").is_not_null()
    )
    return alone.sort(cell)


def log_costs(tasks: pl.DataFrame, costs: pl.DataFrame) -> Floats:
    """(N, C) ln us that NCCL predicts for each cell; NaN where it does not take it, or unknown."""
    if not tasks.height:
        return np.empty((0, NUM_CELLS))
    key = [*COST_KEY, "size_bytes"]
    asked = tasks.select(key).unique(maintain_order=True).with_row_index("row")
    numbers = tasks.select(key).join(
        asked, on=key, how="left", nulls_equal=True, maintain_order="left"
    )
    return np.take(_of_each(asked, costs), numbers["row"].to_numpy(), axis=0)


def _of_each(asked: pl.DataFrame, costs: pl.DataFrame) -> Floats:
    found = np.full((asked.height, NUM_CELLS), np.nan)
    held = costs.filter(pl.col("bandwidth_gbytes_per_s") > 0.0)
    counts = [pl.col(name).cast(asked.schema[name]) for name in ("num_nodes", "ranks_per_node")]
    joined = asked.join(held.with_columns(counts), on=COST_KEY, how="inner", nulls_equal=True)
    for row in joined.iter_rows(named=True):
        algorithm, protocol = Algorithm.parse(row["algorithm"]), Protocol.parse(row["protocol"])
        cell = algorithm * NUM_PROTOCOLS + protocol
        found[row["row"], cell] = math.log(_time_us(algorithm, protocol, row))
    return found


def _time_us(algorithm: Algorithm, protocol: Protocol, row: Mapping[str, Any]) -> float:
    latency_us, bandwidth = row["latency_us"], row["bandwidth_gbytes_per_s"]
    size_bytes, nodes = row["size_bytes"], row["num_nodes"]
    if row["collective"] == Collective.AllReduce.wire:
        if algorithm is Algorithm.Tree:
            bandwidth *= nccl.size_correction(protocol, size_bytes)
        elif (algorithm, protocol) == (Algorithm.Ring, Protocol.Simple) and nodes > 1:
            # The table does not tell the GPU; before Ampere the factor is 1.9.
            ranks = nodes * row["ranks_per_node"]
            latency_us *= nccl.plateau(size_bytes, _RING_CHANNELS, ranks, since_ampere=True)
    time_us: float = latency_us + max(size_bytes, 1) / (1e3 * bandwidth)
    return time_us
