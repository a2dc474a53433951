"""The observation: ordered features with units, cold and warm.

The one definition of what a policy sees; training, evaluation, export and tables read it.

An observation is three arrays: window (k = 8 calls x WINDOW_FEATURES), context (one value a
feature) and mask (one flag an action). In a **cold** observation the window is all padding and
every feature that needs history is marked unknown; static data is evaluated on it and tables are
made from it.

Shapes: N rows, K = WINDOW_LENGTH calls, W = len(WINDOW_FEATURES), F = features of the context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol

Float32Array = npt.NDArray[np.float32]

#: Calls of the same task key that an observation looks back on.
WINDOW_LENGTH: Final = 8
#: Kinds of NIC that are told apart; anything else is unknown.
NIC_KINDS: Final = ("infiniband", "roce", "efa", "socket", "none")
CPU_VENDORS: Final = ("intel", "amd", "arm")
TUNED: Final = tuple(c for c in Collective if c.tunable)


@dataclass(frozen=True, slots=True)
class Feature:
    """One number that a policy sees: name, unit, and what it is."""

    name: str
    unit: str
    meaning: str


def _one_hot(prefix: str, names: Sequence[str], meaning: str) -> tuple[Feature, ...]:
    return tuple(Feature(f"{prefix}_{name}", "0/1", meaning) for name in names)


#: The config of a call, as the window and the history hold it.
CONFIG_USED: Final = (
    *_one_hot("algorithm", [a.wire for a in Algorithm], "algorithm of the call"),
    *_one_hot("protocol", [p.wire for p in Protocol], "protocol of the call"),
    Feature("log2_channels", "log2", "channels of the call; 0 = unknown or one"),
)

WINDOW_FEATURES: Final = (
    Feature("valid", "0/1", "0 = padding"),
    Feature("log2_time", "log2 us", "completion time"),
    Feature("log2_channel_throughput", "log2 GB/s", "algbw per channel; 0 when unknown"),
    *CONFIG_USED,
    Feature("changed", "0/1", "the config differs from the call before"),
    Feature("interference", "", "interference level then"),
)

#: Known from the workload, the system and the launch: the same for cold and warm.
STATIC_FEATURES: Final = (
    Feature("log2_size", "log2 B", "NCCL's nBytes"),
    Feature("log2_bytes_per_rank", "log2 B", "nBytes / ranks"),
    *_one_hot("collective", [c.wire for c in TUNED], "the collective"),
    Feature("log2_ranks", "log2", "ranks of the communicator"),
    Feature("log2_nodes", "log2", "NCCL's own nNodes"),
    Feature("log2_ranks_per_node", "log2", "ranks / nodes"),
    Feature("gpu_known", "0/1", "compute capability is known"),
    Feature("compute_capability", "", "of the GPU; 0 when unknown"),
    Feature("nvlink_known", "0/1", "the NVLink facts are known"),
    Feature("nvlink_generation", "", "0 = none or unknown"),
    Feature("log2_nvlinks", "log2", "log2(1 + links of one GPU)"),
    Feature("nvswitch", "0/1", "an NVSwitch joins the node (NVLS)"),
    *_one_hot("nic", NIC_KINDS, "kind of NIC; all 0 = unknown"),
    Feature("log2_nic_speed", "log2 Gbit/s", "log2(1 + rate of one NIC)"),
    Feature("log2_nics", "log2", "log2(1 + NICs of a node)"),
    *_one_hot("cpu", CPU_VENDORS, "CPU vendor; all 0 = unknown"),
    Feature("nccl_known", "0/1", "the NCCL release is known"),
    Feature("nccl_minor", "", "(minor + patch/100) of NCCL 2.x, over 10; 0 when unknown"),
    Feature("noise_known", "0/1", "repeats were measured, so the noise band is known"),
    Feature("noise_band", "", "log(1 + noise_band) of the collective on the system; 0 = unknown"),
)
#: Column of `noise_band` in the context: a policy abstains from gains that do not exceed it.
NOISE_FEATURE: Final = len(STATIC_FEATURES) - 1

#: Known from history: all zero in a cold observation.
HISTORY_FEATURES: Final = (
    Feature("last_known", "0/1", "there is a last call"),
    *tuple(Feature(f"last_{f.name}", f.unit, f.meaning) for f in CONFIG_USED),
    Feature("interference_known", "0/1", "an interference level is known"),
    Feature("interference", "", "interference level now"),
    Feature("skew_known", "0/1", "compute skew is known"),
    Feature("log2_skew", "log2 us", "log2(1 + spin of the earliest rank)"),
    Feature("sense_known", "0/1", "the four below are known"),
    Feature("log2_ebb", "log2 GB/s", "effective bandwidth of the last call: size / time"),
    Feature("log2_btlbw", "log2 GB/s", "bottleneck bandwidth: windowed maximum of it"),
    Feature("log2_rtprop", "log2 us", "round-trip propagation: windowed minimum time"),
    Feature("inflight_over_bdp", "", "nBytes / (BtlBw x RTprop), at most 8"),
)

FEATURES: Final = (*STATIC_FEATURES, *HISTORY_FEATURES)
#: Where the history stands in the context.
HISTORY_SLICE: Final = slice(len(STATIC_FEATURES), len(FEATURES))
MAX_INFLIGHT: Final = 8.0


@dataclass(frozen=True, slots=True)
class Observations:
    """N observations without their masks: `window` (N, K, W) and `context` (N, F + profiles)."""

    window: Float32Array
    context: Float32Array

    @classmethod
    def cold(cls, context: Float32Array) -> Self:
        """Observations without a history: all of the window is padding."""
        shape = (len(context), WINDOW_LENGTH, len(WINDOW_FEATURES))
        return cls(np.zeros(shape, dtype=np.float32), context)


def feature_table(profiles: Sequence[str]) -> list[dict[str, str]]:
    """The context's features in order, for a manifest; launch profiles come last, one a name."""
    known = [{"name": f.name, "unit": f.unit, "meaning": f.meaning} for f in FEATURES]
    extra = [{"name": f"profile:{p}", "unit": "0/1", "meaning": "launch profile"} for p in profiles]
    return known + extra


def window_table() -> list[dict[str, str]]:
    """The window's features in order, for a manifest."""
    return [{"name": f.name, "unit": f.unit, "meaning": f.meaning} for f in WINDOW_FEATURES]


def cold_observations(tasks: pl.DataFrame, profiles: Sequence[str]) -> Observations:
    """Observations of tasks about which nothing but the job, the system and the launch is known.

    Args:
        tasks: rows with the workload and environment columns of the schema, and `noise_band`
            (unitless, of the training repeats; null = unknown).
        profiles: the launch profiles that the policy knows, in its order.
    """
    static = _static(tasks)
    history = np.zeros((tasks.height, len(HISTORY_FEATURES)), dtype=np.float32)
    return Observations.cold(np.hstack([static, history, _profiles(tasks, profiles)]))


def _static(tasks: pl.DataFrame) -> Float32Array:
    collectives = {c.wire for c in TUNED}
    unknown = set(tasks["collective"].unique()) - collectives
    if unknown:
        raise KeyError(f"collectives that no tuner is asked about: {sorted(unknown)}")
    columns: Mapping[str, pl.Expr] = {
        "log2_size": _log2("size_bytes"),
        "log2_bytes_per_rank": _log2("size_bytes") - _log2("num_ranks"),
        **{f"collective_{c.wire}": _equals("collective", c.wire) for c in TUNED},
        "log2_ranks": _log2("num_ranks"),
        "log2_nodes": _log2("num_nodes"),
        "log2_ranks_per_node": _log2("ranks_per_node"),
        "gpu_known": _known("compute_capability"),
        "compute_capability": _or_zero("compute_capability"),
        "nvlink_known": _known("nvlink_generation"),
        "nvlink_generation": _or_zero("nvlink_generation"),
        "log2_nvlinks": _log2_1p("nvlinks_per_gpu"),
        "nvswitch": _or_zero("nvswitch"),
        **{f"nic_{kind}": _equals("nic_kind", kind) for kind in NIC_KINDS},
        "log2_nic_speed": _log2_1p("nic_gbits_per_s"),
        "log2_nics": _log2_1p("nics_per_node"),
        **{f"cpu_{vendor}": _equals("cpu_vendor", vendor) for vendor in CPU_VENDORS},
        "nccl_known": _known("nccl_version"),
        "nccl_minor": pl.col("nccl_version").map_elements(_nccl_minor, return_dtype=pl.Float64),
        "noise_known": _known("noise_band"),
        "noise_band": pl.col("noise_band").cast(pl.Float64).log1p(),
    }
    ordered = [
        columns[f.name].cast(pl.Float32).fill_null(0.0).alias(f.name) for f in STATIC_FEATURES
    ]
    return tasks.select(ordered).to_numpy().astype(np.float32)


def _log2(name: str) -> pl.Expr:
    return pl.col(name).cast(pl.Float64).clip(lower_bound=1.0).log(2.0)


def _log2_1p(name: str) -> pl.Expr:
    return (pl.col(name).cast(pl.Float64) + 1.0).log(2.0)


def _equals(name: str, value: str) -> pl.Expr:
    return (pl.col(name) == value).fill_null(value=False)


def _known(name: str) -> pl.Expr:
    return pl.col(name).is_not_null()


def _or_zero(name: str) -> pl.Expr:
    return pl.col(name).cast(pl.Float64).fill_null(0.0)


def _nccl_minor(text: str) -> float:
    version = NcclVersion.parse(text)
    return (version.minor + version.patch / 100.0) / 10.0


def _profiles(tasks: pl.DataFrame, profiles: Sequence[str]) -> Float32Array:
    flags = [
        _equals("launch_profile", p).cast(pl.Float32).alias(f"p{i}") for i, p in enumerate(profiles)
    ]
    if not flags:
        return np.zeros((tasks.height, 0), dtype=np.float32)
    return tasks.select(flags).to_numpy().astype(np.float32)
