"""Builders of rows of `calls`: columns that a test does not name get default values."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow as pa

from dynamiccl.datasets.history import (
    WINDOW_LENGTH,
    Call,
    CallColumns,
    Float32Array,
    history_features,
)
from dynamiccl.datasets.schema import CALLS

_PLAIN: Final[dict[str, Any]] = {
    "system": "box",
    "sweep": "deployed",
    "source": "plugin",
    "run": "job-1",
    "comm": "00000000000000aa",
    "sequence": 0,
    "replay": 0,
    "timestamp": datetime(2026, 1, 1, tzinfo=UTC),
    "gpu": "NVIDIA H100 80GB HBM3",
    "nccl_version": "2.27.5",
    "collective": "AllReduce",
    "size_bytes": 1 << 20,
    "num_ranks": 8,
    "num_nodes": 1,
    "ranks_per_node": 8,
    "actual_algorithm": "RING",
    "actual_protocol": "LL",
    "actual_num_channels": 8,
    "actual_num_warps": 16,
    "table": 1,
    "decided": True,
    "probe": False,
    "time_us": 100.0,
    "skew_us": 1.5,
    "ranks_seen": 8,
    "ranks_timed": 8,
    "ranks_agree": True,
    "graph_captured": False,
    "sampled": True,
    "incomplete": False,
}


def call(sequence: int, time_us: float | None = 100.0, **columns: Any) -> dict[str, Any]:
    """A call that our table decided."""
    return {**_PLAIN, "sequence": sequence, "time_us": time_us, **columns}


def traced(sequence: int, time_us: float | None = 100.0, **columns: Any) -> dict[str, Any]:
    """A call as a PyTorch trace has it: without NCCL's choice, nodes, and our decision."""
    not_told = (
        *("comm", "sequence", "replay", "num_nodes", "ranks_per_node", "actual_algorithm"),
        *("actual_protocol", "actual_num_channels", "actual_num_warps", "table", "decided"),
        *("probe", "graph_captured", "sampled", "incomplete"),
    )
    nulls = dict.fromkeys(not_told, None)
    told = {"source": "kineto", "group_sequence": sequence, "asks_tuner": True}
    return {**call(sequence, time_us), **nulls, **told, **columns}


def calls_table(*rows: dict[str, Any]) -> pa.Table:
    """The rows as an Arrow table."""
    return pa.Table.from_pylist([{n: row.get(n) for n in CALLS.names} for row in rows], CALLS)


def calls_frame(*rows: dict[str, Any]) -> pl.DataFrame:
    """The rows as read back from the store."""
    return pl.DataFrame(calls_table(*rows))


def history_arrays(
    calls: Sequence[Call],
) -> tuple[Float32Array, Float32Array]:
    """Window (K, W) and history features (H,) of the last calls of one task key, oldest first."""
    recent = list(calls)[-WINDOW_LENGTH:]
    slots = np.arange(WINDOW_LENGTH) - (WINDOW_LENGTH - len(recent))
    # Any call for the padding, which is ignored.
    padded = CallColumns.of(recent or [Call(1, 1.0, None, None, None)])
    window, history = history_features(padded.take(np.maximum(slots, 0)[None]), slots[None] >= 0)
    return window[0], history[0]
