"""Builders of measurement rows: columns that a test does not name get default values."""

from typing import Any, Final

import polars as pl

from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.datasets.store import measurements_table

MIB: Final = 1 << 20
_PLAIN: Final[dict[str, Any]] = {
    "system": "box",
    "sweep": "grid",
    "run": "cycle-0",
    "repeat": 0,
    "source": "nccl-tests-text",
    "nccl_version": "2.27.5",
    "gpu": "H100",
    "collective": "AllReduce",
    "size_bytes": MIB,
    "datatype": "float",
    "num_ranks": 8,
    "num_nodes": 1,
    "ranks_per_node": 8,
    "in_place": False,
    "interference_level": 0.0,
}


def default(time_us: float | None = 100.0, **columns: Any) -> dict[str, Any]:
    """A row of NCCL's own choice."""
    return {**_PLAIN, "is_default": True, "time_us": time_us, **columns}


def forced(
    algorithm: str | None,
    protocol: str | None = None,
    time_us: float | None = 100.0,
    *,
    channels: int | None = None,
    **columns: Any,
) -> dict[str, Any]:
    """A row with a requested config; None = AUTO."""
    requested = {
        "requested_algorithm": algorithm,
        "requested_protocol": protocol,
        "requested_num_channels": channels,
    }
    return {**_PLAIN, "is_default": False, "time_us": time_us, **requested, **columns}


def frame(*rows: dict[str, Any]) -> pl.DataFrame:
    """The rows as read back from the store."""
    return pl.DataFrame(measurements_table(rows))


def split_of(size_bytes: int) -> Split:
    """The usual split of one message size."""
    return Split(with_split(pl.DataFrame({"size_bytes": [size_bytes]}))["split"].item())
