"""The queries from which a decision table is made: a cold observation per (collective, bin).

A table acts only where the data set measured both the config and NCCL's default within one octave,
and, once a gate was passed, only with what passed there; everywhere else NCCL's own choice stands.
It asks for no more channels than NCCL was seen to use: NVLS over several nodes, CollNet and, from
2.29 on, AllGatherV take a number as it is, and index by it (2.29.7 `allgatherv_sched.cc:65`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import TUNED, Float32Array, Observations, cold_observations
from dynamiccl.datasets.manifest import Manifest, Support
from dynamiccl.datasets.schema import DEFAULT_PROFILE, MEASUREMENTS
from dynamiccl.nccl import Collective, NcclVersion, invalid_reason
from dynamiccl.sizes import BINS_PER_OCTAVE, bin_center_bytes

#: Configs measured at most this many bins away may be chosen.
REACH_BINS: Final = BINS_PER_OCTAVE


def table_supports(manifest: Manifest) -> list[Support]:
    """The supports that get a table: untouched environment, newest NCCL of each shape."""
    newest: dict[tuple[str, int, int], Support] = {}
    for support in manifest.supports:
        if support.launch_profile != DEFAULT_PROFILE:
            continue
        key = (support.system, support.num_nodes, support.num_ranks)
        if key not in newest or _version(newest[key]) < _version(support):
            newest[key] = support
    return [newest[key] for key in sorted(newest)]


@dataclass(frozen=True, slots=True)
class ColdQuestions:
    """A cold observation for each (collective, size bin) of a communicator shape, row-major."""

    support: Support
    first_bin: int
    num_bins: int
    #: (5 x num_bins, F) context of the cold observations.
    context: Float32Array
    #: (5 x num_bins, A) which actions may be chosen.
    mask: npt.NDArray[np.bool_]


def table_bins(support: Support) -> range:
    """The size bins of a support's table: from the smallest to the largest measured."""
    bins = [b for actions in support.measured.values() for found in actions.values() for b in found]
    return range(min(bins), max(bins) + 1)


def cold_questions(manifest: Manifest, support: Support) -> ColdQuestions:
    """The queries for the table of one communicator shape."""
    asked = table_bins(support)
    sizes = [bin_center_bytes(index) for index in asked]
    tasks = pl.concat([cold_tasks(support, collective, sizes) for collective in TUNED])
    masks = [allowed(manifest, support, collective, asked) for collective in TUNED]
    return ColdQuestions(
        support,
        asked.start,
        len(asked),
        cold_observations(tasks, manifest.launch_profiles, manifest.cost_table()).context,
        np.vstack(masks),
    )


class ActingPolicy(Protocol):
    """The interface of a policy that returns actions."""

    def act(self, observations: Observations, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """(N,) actions for N observations, each allowed by `mask` (N, A)."""
        ...


def decide(
    policy: ActingPolicy, observations: Observations, mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """(N,) actions that a table may hold.

    ABSTAIN where NCCL's default was not measured: no gain over it was ever shown there.
    """
    return np.where(mask[:, ABSTAIN_ACTION], policy.act(observations, mask), ABSTAIN_ACTION)


def allowed(
    manifest: Manifest, support: Support, collective: Collective, bins: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """(bins, A) whether each action is valid and was measured near each bin."""
    configs = manifest.actions().configs
    version = NcclVersion.parse(support.nccl_version) if support.nccl_version else None
    centres = np.asarray(bins)
    mask = np.zeros((len(centres), len(configs)), dtype=np.bool_)
    for name, found in support.measured.get(collective.wire, {}).items():
        action = int(name)
        reason = invalid_reason(
            configs[action], collective, version=version, num_nodes=support.num_nodes
        )
        asked_channels = configs[action].num_channels or 0
        if reason is None and asked_channels <= (support.most_channels or 0):
            distance = np.abs(centres[:, None] - np.asarray(found)[None, :]).min(axis=1)
            mask[:, action] = distance <= REACH_BINS
            if support.gated is not None:
                passed = support.gated.get(collective.wire, {}).get(name, [])
                mask[:, action] &= (action == ABSTAIN_ACTION) | np.isin(centres, passed)
    # Where nothing may be chosen, the policy still needs one allowed action: ABSTAIN.
    mask[~mask.any(axis=1), ABSTAIN_ACTION] = True
    return mask


def cold_tasks(support: Support, collective: Collective, sizes: Sequence[int]) -> pl.DataFrame:
    """Tasks of one support as feature code expects them: workload and environment columns."""
    shared: dict[str, Any] = {
        "system": support.system,
        "collective": collective.wire,
        "num_nodes": support.num_nodes,
        "ranks_per_node": support.ranks_per_node,
        "num_ranks": support.num_ranks,
        "launch_profile": support.launch_profile,
        "nccl_version": support.nccl_version,
        **support.environment,
    }
    types = column_types((*shared, "size_bytes"))
    types["noise_band"] = pl.Float64()
    shared["noise_band"] = support.noise_bands.get(collective.wire)
    return pl.DataFrame([{**shared, "size_bytes": size} for size in sizes], schema=types)


def column_types(names: Iterable[str]) -> dict[str, pl.DataType]:
    """The Polars types of some columns of the measurements table."""
    known = pl.Schema(MEASUREMENTS)
    return {name: known[name] for name in names}


def _version(support: Support) -> NcclVersion:
    return NcclVersion.parse(support.nccl_version) if support.nccl_version else NcclVersion(0, 0)
