"""The observation of a policy: ordered features with units, cold and warm.

Features of past calls are defined in `datasets/history.py`, all others here, each once. A policy
may see the time that NCCL's own model gives each (algorithm, protocol) (`datasets/costs.py`).

An observation is three arrays: window (k = 8 calls x WINDOW_FEATURES), context (one value a
feature) and mask (one flag an action). In a **cold** observation the window is all padding, and
features of the history are marked unknown; static data are evaluated with cold observations, and
tables are made from them.

Shapes: N rows, K = WINDOW_LENGTH calls, W = len(WINDOW_FEATURES), F = features of the context,
C = 21 cells of the cost table, row-major (7 algorithms, 3 protocols).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl import nccl
from dynamiccl.datasets.costs import log_costs
from dynamiccl.datasets.history import (
    HISTORY_FEATURES,
    WINDOW_FEATURES,
    WINDOW_LENGTH,
    Feature,
    Float32Array,
    one_hot,
    positions,
)
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.nccl import Algorithm, Collective, Protocol

NIC_KINDS: Final = ("infiniband", "roce", "efa", "socket", "none")
CPU_VENDORS: Final = ("intel", "amd", "arm")
TUNED: Final = tuple(c for c in Collective if c.tunable)


def _log2(name: str) -> pl.Expr:
    return pl.col(name).cast(pl.Float64).clip(lower_bound=1.0).log(2.0)


def _log2_1p(name: str) -> pl.Expr:
    return (pl.col(name).cast(pl.Float64) + 1.0).log(2.0)


def _equals(name: str, value: str) -> pl.Expr:
    return (pl.col(name) == value).fill_null(value=False)


def _known(name: str) -> pl.Expr:
    return pl.col(name).is_not_null()


def _value(name: str) -> pl.Expr:
    return pl.col(name).cast(pl.Float64)


def _nccl_minor(text: str) -> float:
    version = nccl.NcclVersion.parse(text)
    return (version.minor + version.patch / 100.0) / 10.0


def _each(
    prefix: str, column: str, values: Sequence[str], meaning: str
) -> list[tuple[Feature, pl.Expr]]:
    features = one_hot(prefix, values, meaning)
    return [(f, _equals(column, value)) for f, value in zip(features, values, strict=True)]


#: The same cold and warm: each feature, and its value from a task's columns. Null becomes 0.
_STATIC: Final = (
    (Feature("log2_size", "log2 B", "NCCL's nBytes"), _log2("size_bytes")),
    (
        Feature("log2_bytes_per_rank", "log2 B", "nBytes / ranks"),
        _log2("size_bytes") - _log2("num_ranks"),
    ),
    *_each("collective", "collective", [c.wire for c in TUNED], "the collective"),
    (Feature("log2_ranks", "log2", "ranks of the communicator"), _log2("num_ranks")),
    (Feature("log2_nodes", "log2", "NCCL's own nNodes"), _log2("num_nodes")),
    (Feature("log2_ranks_per_node", "log2", "ranks / nodes"), _log2("ranks_per_node")),
    (Feature("gpu_known", "0/1", "compute capability is known"), _known("compute_capability")),
    (Feature("compute_capability", "", "of the GPU; 0 when unknown"), _value("compute_capability")),
    (Feature("nvlink_known", "0/1", "the NVLink facts are known"), _known("nvlink_generation")),
    (Feature("nvlink_generation", "", "0 = none or unknown"), _value("nvlink_generation")),
    (Feature("log2_nvlinks", "log2", "log2(1 + links of one GPU)"), _log2_1p("nvlinks_per_gpu")),
    (Feature("nvswitch", "0/1", "an NVSwitch joins the node (NVLS)"), _value("nvswitch")),
    *_each("nic", "nic_kind", NIC_KINDS, "kind of NIC; all 0 = unknown"),
    (
        Feature("log2_nic_speed", "log2 Gbit/s", "log2(1 + rate of one NIC)"),
        _log2_1p("nic_gbits_per_s"),
    ),
    (Feature("log2_nics", "log2", "log2(1 + NICs of a node)"), _log2_1p("nics_per_node")),
    *_each("cpu", "cpu_vendor", CPU_VENDORS, "CPU vendor; all 0 = unknown"),
    (Feature("nccl_known", "0/1", "the NCCL release is known"), _known("nccl_version")),
    (
        Feature("nccl_minor", "", "(minor + patch/100) of NCCL 2.x, over 10; 0 when unknown"),
        pl.col("nccl_version").map_elements(_nccl_minor, return_dtype=pl.Float64),
    ),
    (
        Feature("noise_known", "0/1", "repeats were measured, so the noise band is known"),
        _known("noise_band"),
    ),
    (
        Feature(
            "noise_band", "", "log(1 + noise_band) of the collective on the system; 0 = unknown"
        ),
        _value("noise_band").log1p(),
    ),
)

#: Columns read besides TASK_COLUMNS: where it ran.
ENVIRONMENT_COLUMNS: Final = tuple(
    name
    for name in dict.fromkeys(n for _, value in _STATIC for n in value.meta.root_names())
    if name not in {*TASK_COLUMNS, "noise_band"}
)
STATIC_FEATURES: Final = tuple(feature for feature, _ in _STATIC)
FEATURES: Final = (*STATIC_FEATURES, *HISTORY_FEATURES)
CONTEXT_COLUMN: Final = positions(FEATURES)
HISTORY_SLICE: Final = slice(len(STATIC_FEATURES), len(FEATURES))
COST_FEATURES: Final = tuple(
    Feature(
        f"log_cost:{algorithm.wire}/{protocol.wire}",
        "ln us",
        "NCCL's own prediction; 0 = NCCL does not take the cell, or unknown",
    )
    for algorithm in Algorithm
    for protocol in Protocol
)


@dataclass(frozen=True, slots=True)
class Observations:
    """`window` (N, K, W) and `context` (N, F + profiles)."""

    window: Float32Array
    context: Float32Array

    @classmethod
    def cold(cls, context: Float32Array) -> Self:
        """The window is all padding."""
        shape = (len(context), WINDOW_LENGTH, len(WINDOW_FEATURES))
        return cls(np.zeros(shape, dtype=np.float32), context)


def set_sizes(context: Float32Array, log2_size: npt.NDArray[np.floating]) -> None:
    """Set the sizes (N,) of contexts (N, F) in place: a task key covers a bin of sizes."""
    context[:, CONTEXT_COLUMN["log2_size"]] = log2_size
    size, ranks = (context[:, CONTEXT_COLUMN[name]] for name in ("log2_size", "log2_ranks"))
    context[:, CONTEXT_COLUMN["log2_bytes_per_rank"]] = size - ranks


def feature_table(profiles: Sequence[str], *, costs: bool = False) -> list[dict[str, str]]:
    """The context's features in order, for a manifest; launch profiles, then costs, come last."""
    extra = [Feature(f"profile:{name}", "0/1", "launch profile") for name in profiles]
    told = (*FEATURES, *extra, *(COST_FEATURES if costs else ()))
    return [{"name": f.name, "unit": f.unit, "meaning": f.meaning} for f in told]


def window_table() -> list[dict[str, str]]:
    """The window's features in order, for a manifest."""
    return [{"name": f.name, "unit": f.unit, "meaning": f.meaning} for f in WINDOW_FEATURES]


def cold_observations(
    tasks: pl.DataFrame, profiles: Sequence[str], costs: pl.DataFrame | None = None
) -> Observations:
    """Observations without history; `profiles` in the policy's order, `noise_band` may be null."""
    unknown = set(tasks["collective"].unique()) - {c.wire for c in TUNED}
    if unknown:
        raise KeyError(f"collectives that no tuner is asked about: {sorted(unknown)}")
    static = [value.alias(feature.name) for feature, value in _STATIC]
    history = [pl.lit(0.0).alias(feature.name) for feature in HISTORY_FEATURES]
    flags = [_equals("launch_profile", name).alias(f"profile:{name}") for name in profiles]
    columns = tasks.select(each.cast(pl.Float32) for each in (*static, *history, *flags))
    found = [columns.fill_null(0.0).to_numpy()]
    if costs is not None:
        found.append(np.nan_to_num(log_costs(tasks, costs)).astype(np.float32))
    return Observations.cold(np.hstack(found))
