"""Predicted time of every cell for each task, from the cost tables that NCCL logged.

NCCL logs latency and bandwidth of each (algorithm, protocol) once for a communicator; `collect`
keeps them in the table `costs`. Of a size it makes a time (dynamiccl/nccl_costs.py), and it takes
the cell of the least.

N tasks, C = 21 cells of the cost table, row-major (7 algorithms, 3 protocols).
"""

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.history_columns import Feature
from dynamiccl.datasets.schema import MODELLED_SWEEP
from dynamiccl.datasets.store import part_paths, read
from dynamiccl.nccl import NUM_ALGORITHMS, NUM_PROTOCOLS, Algorithm, Collective, Protocol
from dynamiccl.nccl_costs import plateau, size_correction

#: Columns that identify the communicators of a cost.
COST_KEY: Final = (
    "system",
    "nccl_version",
    "num_nodes",
    "ranks_per_node",
    "launch_profile",
    "collective",
)
#: The columns of a table of costs.
COST_TYPES: Final = pl.Schema(
    {
        "system": pl.String,
        "nccl_version": pl.String,
        "num_nodes": pl.Int64,
        "ranks_per_node": pl.Int64,
        "launch_profile": pl.String,
        "collective": pl.String,
        "algorithm": pl.String,
        "protocol": pl.String,
        "latency_us": pl.Float64,
        "bandwidth_gbytes_per_s": pl.Float64,
    }
)
NUM_CELLS: Final = NUM_ALGORITHMS * NUM_PROTOCOLS
#: Channels of a communicator where rings between nodes become slower (nccl_costs.plateau). The
#: table of costs does not hold them; with 4 or 64 the step is two octaves off, at sizes where
#: NCCL's rings run LL or LL128.
_RING_CHANNELS: Final = 16
#: The context's columns with costs, one a cell.
COST_FEATURES: Final = tuple(
    Feature(
        f"log_cost:{algorithm.wire}/{protocol.wire}",
        "ln us",
        "NCCL's own prediction; 0 = NCCL does not take the cell, or unknown",
    )
    for algorithm in Algorithm
    for protocol in Protocol
)


def read_costs(data_dir: Path) -> pl.DataFrame:
    """The costs of a data set, COST_TYPES, one row a cell; empty where NCCL's log was not kept.

    Where a group logged several tables (another topology, say), none is taken: which was whose is
    not known. What a log says comes before what a model does. Raises what `store.read` raises.
    """
    if not part_paths(data_dir, "costs"):
        return pl.DataFrame(schema=COST_TYPES)
    cell = [*COST_KEY, "algorithm", "protocol"]
    is_modelled = pl.col("sweep") == MODELLED_SWEEP
    everything = read(data_dir, "costs").filter(~is_modelled | is_modelled.all().over(COST_KEY))
    found = everything.select(*COST_TYPES).cast(COST_TYPES).unique()
    alone = found.filter((pl.len() == 1).over(cell)).filter(
        pl.col("latency_us").is_not_null() & pl.col("bandwidth_gbytes_per_s").is_not_null()
    )
    return alone.sort(cell)


def log_costs(tasks: pl.DataFrame, costs: pl.DataFrame) -> npt.NDArray[np.float32]:
    """(N, C) ln of NCCL's predicted time in us of each cell of each task; 0 as in COST_FEATURES."""
    if not tasks.height:
        return np.zeros((0, NUM_CELLS), dtype=np.float32)
    key = [*COST_KEY, "size_bytes"]
    asked = tasks.select(key).unique(maintain_order=True).with_row_index("row")
    numbers = tasks.select(key).join(
        asked, on=key, how="left", nulls_equal=True, maintain_order="left"
    )
    return np.take(_of_each(asked, costs), numbers["row"].to_numpy(), axis=0)


def _of_each(asked: pl.DataFrame, costs: pl.DataFrame) -> npt.NDArray[np.float32]:
    found = np.zeros((asked.height, NUM_CELLS), dtype=np.float32)
    held = costs.filter(pl.col("bandwidth_gbytes_per_s") > 0.0)
    counts = [pl.col(name).cast(asked.schema[name]) for name in ("num_nodes", "ranks_per_node")]
    joined = asked.join(held.with_columns(counts), on=COST_KEY, how="inner", nulls_equal=True)
    if joined.is_empty():
        return found
    rows = joined["row"].to_numpy()
    cell = ("collective", "algorithm", "protocol", "size_bytes")
    bandwidths = [_bandwidth_correction(*each) for each in joined.select(cell).iter_rows()]
    shape = ("num_nodes", "ranks_per_node")
    latencies = [_latency_correction(*each) for each in joined.select(cell + shape).iter_rows()]
    cells = [
        Algorithm.parse(algorithm) * NUM_PROTOCOLS + Protocol.parse(protocol)
        for algorithm, protocol in joined.select("algorithm", "protocol").iter_rows()
    ]
    bandwidth = joined["bandwidth_gbytes_per_s"].to_numpy() * np.array(bandwidths)
    latency_us = joined["latency_us"].to_numpy() * np.array(latencies)
    time_us = latency_us + joined["size_bytes"].to_numpy() / (1e3 * bandwidth)
    found[rows, cells] = np.log(time_us)
    return found


def _bandwidth_correction(collective: str, algorithm: str, protocol: str, size_bytes: int) -> float:
    if collective != Collective.AllReduce.wire or algorithm != Algorithm.Tree.wire:
        return 1.0
    return size_correction(Protocol.parse(protocol), size_bytes)


def _latency_correction(
    collective: str, algorithm: str, protocol: str, size_bytes: int, nodes: int, ranks: int
) -> float:
    rings = (Collective.AllReduce.wire, Algorithm.Ring.wire, Protocol.Simple.wire)
    if nodes <= 1 or (collective, algorithm, protocol) != rings:
        return 1.0
    # The table does not tell the GPU; before Ampere the factor is 1.9.
    return plateau(size_bytes, _RING_CHANNELS, nodes * ranks, since_ampere=True)
