"""The queries from which a decision table is made: a cold observation per (collective, bin).

Tables act only near measured bins, below the size at which a config failed, with none that computed
wrong values, and, after a gate, with what passed. They never ask for more
channels than NCCL was seen to use: NVLS over several nodes, CollNet and, from 2.29 on, AllGatherV
take a number as it is, and index by it (2.29.7 `allgatherv_sched.cc:65`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import TUNED, Observations, cold_observations
from dynamiccl.datasets.history import Float32Array
from dynamiccl.datasets.manifest import JobTask, Manifest, Place, Slack, Support
from dynamiccl.datasets.objective import (
    change_of_task_us,
    fewest_within,
    losses_at,
    may_take,
    priced,
)
from dynamiccl.datasets.schema import DEFAULT_PROFILE, MEASUREMENTS
from dynamiccl.drawn_worlds import Floats, Ints
from dynamiccl.nccl import Collective, Config, NcclVersion, invalid_reason
from dynamiccl.sizes import BINS_PER_OCTAVE, bin_center_bytes

REACH_BINS: Final = BINS_PER_OCTAVE
#: From this release on jobs leave the channels of an AllGather alone (serve/plugin/table.h).
ALLGATHER_DROPS_CHANNELS: Final = NcclVersion(2, 29)
CHANNELS_UNREAD: Final = (
    "NCCL's own channels were not read back: import a log of its default with "
    "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING, and train again"
)


def table_supports(manifest: Manifest) -> list[Support]:
    """Supports that get a table: untouched environment, newest NCCL of each shape."""
    newest: dict[tuple[str, int, int], Support] = {}
    for support in manifest.supports:
        if support.launch_profile != DEFAULT_PROFILE:
            continue
        key = (support.system, support.num_nodes, support.num_ranks)
        if key not in newest or _version(newest[key]) < _version(support):
            newest[key] = support
    return [newest[key] for key in sorted(newest)]


@dataclass(frozen=True, slots=True)
class ChannelRule:
    """How channels count in N answers, of A actions."""

    #: None: not at all.
    slack: Slack | None
    #: (N,) whether compute hides the call.
    hidden: npt.NDArray[np.bool_]
    #: (N, A) `read_back_channels`.
    channels: npt.NDArray[np.float64]
    #: (N,) ln gain that a policy without spreads must see; NaN: noise unknown.
    margin: npt.NDArray[np.float64]
    #: Row -> a job's task and its `losses_at`.
    tasks: dict[int, tuple[JobTask, Floats, Floats]]

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        places: Sequence[Place],
        channels: npt.NDArray[np.float64],
        noise_bands: Sequence[float | None],
    ) -> Self:
        """The rule for N places with these noise bands."""
        slack = manifest.slack
        hidden = () if slack is None else places if slack.hidden == "all" else slack.hidden
        told, noise = set(hidden), np.array(noise_bands, dtype=np.float64)
        margin = np.log1p(np.maximum(noise, manifest.abstain_margin))
        by_place = {task.place: task for task in slack.job} if slack is not None else {}
        configs = manifest.actions().configs
        tasks = dict[int, tuple[JobTask, Floats, Floats]]()
        for row, place in enumerate(places):
            if slack is not None and (task := by_place.get(place)):
                by_price = priced(channels[row], slack.sm_price)
                terms = losses_at(task.losses, configs) if task.losses else by_price
                tasks[row] = (task, *terms)
        is_hidden = np.array([each in told for each in places])
        return cls(slack, is_hidden, channels, margin, tasks)

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """(N, A) of its time that an answer with fewer channels may lose; 0 for an exposed call."""
        share = 0.0 if self.slack is None else self.slack.share
        shares = np.where(self.hidden[:, None], share, np.zeros(self.channels.shape))
        for row, (task, lost, _) in self.tasks.items():
            # Without measured losses the slack bounds it.
            most = np.inf if task.losses else share
            shares[row] = np.minimum(may_take(lost, task) - 1.0, most)
        return shares

    def least_change(
        self, surely: npt.NDArray[np.float64], within: npt.NDArray[np.bool_], fewest: Ints
    ) -> Ints:
        """(N,) actions that surely shorten a job's step most within the terms; else `fewest`."""
        chosen = fewest.copy()
        for row, (task, lost, beside) in self.tasks.items():
            longer = np.maximum(np.exp(surely[row]), beside)
            change = change_of_task_us(longer, lost, task)
            usable = within[row] & (change <= 0.0)
            if not task.losses:
                # Free channels give nothing back: decide by the most that they cost.
                change = change_of_task_us(longer[1:], lost[1:], task)
            too_many = self.channels[row, ABSTAIN_ACTION] > self.most
            usable[ABSTAIN_ACTION] = not (too_many and usable[1:].any())
            chosen[row] = np.where(usable, change, np.inf).argmin()
        return chosen

    @property
    def most(self) -> float:
        """Infinite without a bound."""
        most = None if self.slack is None else self.slack.max_channels
        return np.inf if most is None else most

    @property
    def counts(self) -> npt.NDArray[np.bool_]:
        """(N,) whether fewer channels may cost time."""
        return self.hidden | (self.channels[:, ABSTAIN_ACTION] > self.most)


@dataclass(frozen=True, slots=True)
class ColdQuestions:
    """Cold observations for C collectives x size bins of a shape, row-major."""

    support: Support
    first_bin: int
    num_bins: int
    #: (C x num_bins, F)
    context: Float32Array
    #: (C x num_bins, A) allowed actions.
    mask: npt.NDArray[np.bool_]
    rule: ChannelRule


def table_bins(support: Support) -> range:
    """From the smallest to the largest measured size bin."""
    bins = [b for actions in support.measured.values() for found in actions.values() for b in found]
    return range(min(bins), max(bins) + 1)


def cold_questions(
    manifest: Manifest,
    support: Support,
    collectives: Sequence[Collective] = TUNED,
    bins: Sequence[int] | None = None,
) -> ColdQuestions:
    """The queries for a shape's table, or for some adjacent `bins`."""
    asked = table_bins(support) if bins is None else bins
    sizes = [bin_center_bytes(index) for index in asked]
    tasks = pl.concat([cold_tasks(support, collective, sizes) for collective in collectives])
    masks = [allowed(manifest, support, collective, asked) for collective in collectives]
    channels = np.vstack([read_back_channels(manifest, support, c, asked) for c in collectives])
    shape = support.num_nodes, support.num_ranks
    places = [(c.wire, *shape, index) for c in collectives for index in asked]
    noise = [support.noise_bands.get(c.wire) for c in collectives for _ in asked]
    return ColdQuestions(
        support,
        asked[0],
        len(asked),
        cold_observations(tasks, manifest.launch_profiles, manifest.cost_table()).context,
        np.vstack(masks),
        ChannelRule.of(manifest, places, channels, noise),
    )


class ActingPolicy(Protocol):
    """What tables need of a policy."""

    def act(self, observations: Observations, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """(N,) actions, each allowed by `mask` (N, A)."""

    def values(
        self, observations: Observations, mask: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.floating]:
        """(N, A) minus the expected times over the reference."""

    def least_gains(self, observations: Observations) -> npt.NDArray[np.float64] | None:
        """(N, A) ln gains over NCCL's own choice that must be exceeded; or None."""


def decide(
    policy: ActingPolicy,
    observations: Observations,
    mask: npt.NDArray[np.bool_],
    rule: ChannelRule | None = None,
) -> npt.NDArray[np.int64]:
    """(N,) actions that a table may hold; ABSTAIN where the default was not measured."""
    if rule is None or rule.slack is None:
        chosen = policy.act(observations, mask)
    else:
        chosen = _with_few_channels(policy, observations, mask, rule)
    return np.where(mask[:, ABSTAIN_ACTION], chosen, ABSTAIN_ACTION)


def _with_few_channels(
    policy: ActingPolicy,
    observations: Observations,
    mask: npt.NDArray[np.bool_],
    rule: ChannelRule,
) -> npt.NDArray[np.int64]:
    """(N,) actions with the fewest channels on hidden calls within the slack, never above NCCL's.

    Surely within it: by caution x spread, or by margin and noise. With as many channels as NCCL,
    only the policy's own choice counts. Other calls keep their answer, unless NCCL's own choice
    breaks the bound on channels: then the fastest that is surely no slower.
    """
    own = rule.channels[:, :1]
    may = mask & ((rule.channels <= rule.most) | np.isinf(rule.most))
    may &= ~rule.hidden[:, None] | (rule.channels <= own)
    may[:, ABSTAIN_ACTION] = True
    acts = policy.act(observations, may)
    q, least = policy.values(observations, may).astype(np.float64), policy.least_gains(observations)
    log_ratio = np.log(q / q[:, :1])
    surely = log_ratio + (rule.margin[:, None] if least is None else least)
    shares = rule.shares
    within = may & (rule.channels < own) & (surely <= np.log1p(shares))
    within[np.arange(len(acts)), acts] = True
    times = np.where(within, np.exp(log_ratio), np.nan)
    must = own[:, 0] > rule.most
    times[:, ABSTAIN_ACTION] = np.where(must & within[:, 1:].any(axis=1), np.inf, 1.0)
    fewest = fewest_within(times, np.nan_to_num(rule.channels), shares.max(axis=1, keepdims=True))
    surely[:, ABSTAIN_ACTION] = 0.0
    return np.where(rule.counts, rule.least_change(surely, within, fewest), acts)


def count_of(channels: float) -> int | None:
    """None where not known."""
    return None if np.isnan(channels) else int(channels)


def read_back_channels(
    manifest: Manifest, support: Support, collective: Collective, bins: Sequence[int]
) -> npt.NDArray[np.float64]:
    """(bins, A) channels that NCCL used, by the nearest bins read back within an octave; else NaN.

    The larger for a config, the smaller for NCCL's own; NaN where jobs drop those of AllGather.
    """
    found = np.full((len(bins), len(manifest.catalogue)), np.nan)
    configs, measured = manifest.actions().configs, support.measured.get(collective.wire, {})
    dropped = collective is Collective.AllGather and _version(support) >= ALLGATHER_DROPS_CHANNELS
    for name, counts in support.channels.get(collective.wire, {}).items():
        action = int(name)
        if dropped and configs[action].num_channels is not None:
            continue
        known = [(b, n) for b, n in zip(measured[name], counts, strict=True) if n is not None]
        at = [index for index, _ in known]
        for row, asked in enumerate(bins):
            beside = known[max(bisect_right(at, asked) - 1, 0) : bisect_left(at, asked) + 1]
            near = [n for index, n in beside if abs(index - asked) <= REACH_BINS]
            if near:
                found[row, action] = min(near) if action == ABSTAIN_ACTION else max(near)
    return found


def allowed(
    manifest: Manifest, support: Support, collective: Collective, bins: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """(bins, A) valid, and measured nearby."""
    configs = manifest.actions().configs
    centres = np.asarray(bins)
    mask = np.zeros((len(centres), len(configs)), dtype=np.bool_)
    for name, found in support.measured.get(collective.wire, {}).items():
        action = int(name)
        if why_not(support, collective, configs[action]) is None:
            distance = np.abs(centres[:, None] - np.asarray(found)[None, :]).min(axis=1)
            mask[:, action] = distance <= REACH_BINS
            mask[:, action] &= centres < support.refused_from(collective.wire, action)
            if support.gated is not None:
                passed = support.gated.get(collective.wire, {}).get(name, [])
                mask[:, action] &= (action == ABSTAIN_ACTION) | np.isin(centres, passed)
    # The policy needs one allowed action.
    mask[~mask.any(axis=1), ABSTAIN_ACTION] = True
    return mask


def why_not(support: Support, collective: Collective, config: Config) -> str | None:
    """Why no table of a support may hold a config, wherever it was measured; None: it may."""
    version = NcclVersion.parse(support.nccl_version) if support.nccl_version else None
    reason = invalid_reason(config, collective, version=version, num_nodes=support.num_nodes)
    if reason is None and (config.num_channels or 0) > (support.most_channels or 0):
        if support.most_channels is None:
            return CHANNELS_UNREAD
        return f"more channels than NCCL was seen to use ({support.most_channels})"
    return reason


def cold_tasks(support: Support, collective: Collective, sizes: Sequence[int]) -> pl.DataFrame:
    """Tasks of a support, with the workload and environment columns of the features."""
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
    """Polars types of measurement columns."""
    known = pl.Schema(MEASUREMENTS)
    return {name: known[name] for name in names}


def _version(support: Support) -> NcclVersion:
    return NcclVersion.parse(support.nccl_version) if support.nccl_version else NcclVersion(0, 0)
