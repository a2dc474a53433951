"""What a job saves, from draws of what its calls gain; and a verdict.

How a call's saving becomes a step's, and the interval: docs/job.md. What a hidden call gives back
is told by rows beside matrix products (objective.py) or by a price of a channel, of several kinds
of compute by the least and the most. Without either the interval is wider.

C calls of K kinds, A configs, D draws. Before the draws stands the middle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import polars as pl

from dynamiccl.collect.grid import RANK_GRAIN_BYTES
from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.objective import EARLY, OWN_LOSES
from dynamiccl.datasets.questions import cold_questions, decide, table_supports
from dynamiccl.drawn_worlds import Floats
from dynamiccl.errors import UnknownName
from dynamiccl.evaluate.job_calls import DRAWS, Gains, Job, Measured
from dynamiccl.evaluate.page import say
from dynamiccl.nccl import Collective

if TYPE_CHECKING:
    from dynamiccl.train.policy import TorchPolicy

POLICY: Final = "policy"
TABLE: Final = "table"
Verdict = Literal["gain", "nothing", "cannot-tell"]
#: A smaller saving is not worth a change.
LEAST: Final = 0.005
#: An interval that reaches so many times further says nothing, if it includes 0.
_WIDE: Final = 10.0
#: Share of what asks a tuner that may be unknown in an answer "nothing".
_DARK: Final = 0.1
_NINETY: Final = (0.05, 0.95)
#: Standard deviation of a gain per factor of e between a call's time in job and benchmark, up to a
#: factor of 2. Set on simulated congested networks (benchmarks/bench_job.py, other seeds).
_APART: Final = 0.08
_MOST_APART: Final = float(np.log(2.0))
#: 32 channels hold a quarter of the 132 multiprocessors of an H100 (simulator/system.py).
_TAKEN: Final = 0.25
#: Most that the job's compute gets back, over what was measured (chosen; the least is OWN_LOSES).
_MOST_BACK: Final = 1.3
#: (1 + D,) draws of the least, and of the most, that is saved.
_LOW: Final = (np.arange(1 + DRAWS) > 0) & (np.arange(1 + DRAWS) <= DRAWS // 2)
_HIGH: Final = np.arange(1 + DRAWS) > DRAWS // 2
NCCL_OWN: Final = "NCCL's own"
#: From a row of `Job.kinds` and its gains: the action, or why it is not known.
Choose = Callable[[dict[str, Any], Gains], int | str]


class Estimate(NamedTuple):
    """A share saved (> 0: faster) with its 90 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, mean: float, least: Floats, most: Floats) -> "Estimate":
        """Between draws of the least and of the most that it may be."""
        low, high = float(np.quantile(least, _NINETY[0])), float(np.quantile(most, _NINETY[1]))
        return cls(mean, min(low, mean), max(high, mean))


class Arm(NamedTuple):
    """A way to choose configs, and the share of time that it saves."""

    #: As `Job.kinds`, with `better_config` (None: not known, for a `reason`), the `channels` asked
    #: for, `gain` of the calls' own time, and `lost_by` (None: not known).
    kinds: list[dict[str, Any]]
    communication: Estimate
    #: None: the trace has no steps.
    step: Estimate | None
    #: Of the step, what compute gets back; None: not known of any call, or no steps.
    given_back: Estimate | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What is in it for a job."""

    #: Shares are of the step, without steps (`step` is null) of communication.
    told: dict[str, Any]
    #: The verdict is about the first: the policy, else the table.
    arms: dict[str, Arm]


def answer(
    job: Job, source: Measured, policy: Choose | None = None, manifest: Manifest | None = None
) -> Answer:
    """`policy` chooses, beside the table; its `manifest` tells its runs and what it promises."""
    choices: dict[str, Choose] = {} if policy is None else {POLICY: policy}
    choices[TABLE] = lambda _, gains: gains.best
    gains = source.of(job.kinds)
    default_us = np.array([np.nan if isinstance(each, str) else each.default_us for each in gains])
    job = job.timed(default_us)
    arms = {name: _arm(job, gains, default_us, choose) for name, choose in choices.items()}
    arm, has_times = next(iter(arms.values())), job.lacks["times"] < job.calls.height
    dark = [k["kind"] for k in arm.kinds if k["reason"] and not k["why_not"]]
    told = {
        "system": source.system,
        "modelled": source.is_simulated,
        "nccl_version": source.nccl_version,
        "job_nccl_version": job.nccl_version,
        "sources": job.sources,
        "calls": int(job.kinds["calls"].sum()),
        "step": job.steps,
        "lacks": job.lacks,
        "unread": job.unread,
        # A trace without times is weighed by the benchmark's times or by bytes, which are no whole.
        "whole_us": job.whole_us if job.steps or has_times else None,
        "exposed_share": job.share_of([*range(job.kinds.height)]),
        "asks_tuner_share": job.share_of([k["kind"] for k in arm.kinds if not k["why_not"]]),
        "not_covered_share": job.share_of(dark),
        "arms": {name: _saved_by(each) for name, each in arms.items()},
        "kinds": sorted(arm.kinds, key=lambda kind: -float(kind["time_us"])),
        "sm_price": source.sm_price,
        "seen": manifest is not None and not set(manifest.runs).isdisjoint(source.runs),
        "promise": manifest.slack.promise if manifest and manifest.slack else None,
    }
    told["verdict"], told["why"] = _judge(arm, told)
    facts = {"least": LEAST, "grain_bytes": RANK_GRAIN_BYTES, "found": arm, **told}
    told |= {part: say("job", part, facts) for part in ("sentence", "sweep")}
    told["notes"] = say("job", "notes", facts).splitlines()
    return Answer(told, arms)


def _judge(arm: Arm, told: dict[str, Any]) -> tuple[Verdict, str]:
    found, back = arm.step or arm.communication, arm.given_back
    reach, dark = told["asks_tuner_share"], told["not_covered_share"]
    if all(kind["why_not"] for kind in arm.kinds):
        return "nothing", "no tuner"
    if arm.step and reach < LEAST and (back is None or back.high < LEAST):
        return "nothing", "hidden"
    if found.low > 0.0 and found.high >= LEAST:
        return "gain", "gain"
    if dark >= max(LEAST, _DARK * reach):
        return "cannot-tell", "not covered"
    if found.high > _WIDE * LEAST:
        return "cannot-tell", "wide"
    return "nothing", "small"


def _saved_by(arm: Arm) -> dict[str, Any]:
    parts = {"communication": arm.communication, "step": arm.step, "given_back": arm.given_back}
    known = any(kind["better_config"] for kind in arm.kinds)
    return {name: part._asdict() if part and known else None for name, part in parts.items()}


def policy_choice(policy: "TorchPolicy", system: str) -> Choose:
    """What a policy's table has for a kind of calls on a system."""
    manifest = policy.manifest
    supports, configs = table_supports(manifest), manifest.actions().configs

    def choose(kind: dict[str, Any], gains: Gains) -> int | str:
        shape = kind["num_nodes"], kind["num_ranks"]
        same = [s for s in supports if (s.num_nodes, s.num_ranks) == shape]
        fitting = [s for s in same if s.system == system] or same
        if len(fitting) > 1:
            raise UnknownName("system", system, [s.system for s in fitting], where="--system")
        if not fitting:
            return ABSTAIN_ACTION  # the plugin has no table there
        collective = Collective.parse(kind["collective"])
        asked = cold_questions(manifest, fitting[0], [collective], [kind["bin"]])
        observations = Observations.cold(asked.context)
        wanted = configs[int(decide(policy, observations, asked.mask, asked.rule)[0])]
        action = gains.configs.index(wanted) if wanted in gains.configs else None
        if action is None or np.isnan(gains.draws[0, action]):
            return f"the policy wants {wanted.key}, which was not measured near this size"
        return action

    return choose


def _arm(job: Job, told: Sequence[Gains | str], default_us: Floats, choose: Choose) -> Arm:
    kinds = job.kinds.to_dicts()
    # (D,) and (K,) how far job and benchmark are apart; the benchmark's share of a call's time.
    apart = _APART * np.random.default_rng(1).standard_normal(DRAWS)
    ratio = default_us / job.kinds["mean_us"].to_numpy()
    off = np.nan_to_num(np.minimum(np.abs(np.log(ratio)), _MOST_APART))
    surely = np.nan_to_num(np.minimum(1.0, ratio), nan=1.0)
    # (1 + D, K) shares of a call's time saved, and what each hidden us gives back.
    shares, given = np.full((2, 1 + DRAWS, len(kinds)), np.nan)
    for k, (kind, gains) in enumerate(zip(kinds, told, strict=True)):
        action = gains if isinstance(gains, str) else choose(kind, gains)
        kind.update(dict.fromkeys(("better_config", "channels", "gain", "lost_by")), reason="")
        if isinstance(gains, str) or isinstance(action, str):
            kind["reason"] = str(action)
            continue
        config = gains.configs[action]
        kind["better_config"] = NCCL_OWN if action == ABSTAIN_ACTION else config.key
        kind["channels"] = config.num_channels
        # NCCL's own choice gains 0 in the job, too.
        drawn = gains.draws[:, action]
        in_job = drawn + off[k] * apart * (drawn != 0.0)
        shares[0, k], shares[1:, k] = -np.expm1(-drawn).mean(), -np.expm1(-in_job)
        if gains.lost is not None and not np.isnan(gains.lost[:, [0, action]]).any():
            kind["lost_by"] = gains.lost_by
            given[:, k] = _given(shares[:, k], gains.lost, action)
        gain = Estimate.of(float(shares[0, k]), shares[1:, k], shares[1:, k])
        kind["gain"] = gain._asdict()
    saved = _saved(job, shares, given, surely)
    found = [Estimate.of(float(row[0]), row[_LOW], row[_HIGH]) for row in saved]
    step, back = found[1:] if job.steps else (None, None)
    return Arm(kinds, found[0], step, None if np.isnan(given).all() else back)


def _given(share: Floats, lost: Floats, action: int) -> Floats:
    """(1 + D,) what compute gets back of each us of a hidden call; `lost` (E, A) as in Gains."""
    if action == ABSTAIN_ACTION:  # an unchanged call loses what it lost
        return np.zeros(len(share))
    each = lost[:, :1] - (1.0 - share) * lost[:, [action]]
    # The least: less of NCCL's own than measured, all of the other; the most: more of both.
    least = each - (1.0 - OWN_LOSES) * lost[:, :1]
    most = np.maximum(_MOST_BACK * each, each)
    found = np.where(_LOW, least.min(axis=0), most.max(axis=0))
    found[0] = each[:, 0].mean()
    return np.asarray(found)


def _saved(job: Job, shares: Floats, given: Floats, surely: Floats) -> Floats:
    """(3, 1 + D) shares saved of communication, of the step, and of that what compute gets back.

    `shares` and `given` (1 + D, K), NaN where not known, are of calls' and hidden times; `surely`
    (K,) is the benchmark's part of a call's time.
    """
    kind = job.calls["kind"].to_numpy()
    floats = job.calls.select(pl.col("time_us", "weight", "exposed", "compute_ratio").cast(float))
    time, weight, exposed, ratio = (column.to_numpy() for column in floats)
    out, hidden = exposed * time, (1.0 - exposed) * time
    all_us, out_us, hidden_us = (
        np.bincount(kind, weight * us, job.kinds.height) for us in (time, out, hidden)
    )
    # (G, K) kinds of one process group, whose calls follow one another.
    group = job.kinds.select(pl.struct("group", "num_ranks").rank("dense")).to_series().to_numpy()
    of_group = np.equal.outer(np.unique(group), group)
    # How much longer a call may be before compute waits for it; unknown: none at least.
    room = np.nan_to_num(np.maximum(ratio - 1.0, 0.0) * time, nan=np.inf)
    least_room = np.nan_to_num(np.maximum(EARLY * ratio - 1.0, 0.0) * time)
    found = np.zeros((3, 1 + DRAWS))
    for draw, is_least, is_most in zip(range(1 + DRAWS), _LOW, _HIGH, strict=True):
        share, back = np.nan_to_num(shares[draw]), given[draw]
        # The least is of the benchmark's time alone.
        saved = share * np.where(is_least & (share > 0.0), surely, 1.0)
        sooner, later = np.maximum(saved, 0.0), np.minimum(share, 0.0)
        us = sooner[kind] * time
        kept = np.maximum(us - hidden, 0.0) if is_least else np.minimum(us, out)
        late = -later[kind] * hidden - (least_room if is_least else room)
        step = weight @ (kept - np.maximum(late, 0.0)) + later @ out_us
        # What compute takes or gets where that is not known, and what it surely gets.
        bound = float(np.where(np.isnan(back), share, 0.0) @ hidden_us)
        got = np.nan_to_num(back) @ hidden_us
        if is_most:
            # Each group's savings, up to its exposed time.
            able_us = of_group @ (out_us * ~np.isnan(shares[draw]))
            top = np.minimum(of_group @ (sooner * all_us), able_us).sum()
            step = max(step, top) + _TAKEN * max(bound, 0.0)
        elif is_least:
            step += _TAKEN * min(bound, 0.0)
        found[:, draw] = saved @ all_us, step + got, got
    wholes = np.array([[all_us.sum()], *[[job.whole_us if job.steps else 0.0]] * 2])
    return np.asarray(np.divide(found, wholes, out=np.zeros_like(found), where=wholes > 0.0))
