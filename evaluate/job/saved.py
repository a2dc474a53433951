"""The share of its time that a job saves, from draws of what its calls gain; and a verdict.

A gain is of a call alone on its machine, in a benchmark. Of a job's call it saves the same share
of the call's time; where the call took longer in the job than in the benchmark (it waited for
another rank, or shared its links), at least the share of the benchmark's time.

Of a step, a call saves at most what no compute hid of it. The *central* figure counts the whole
saving up to that, since as a rule compute waits for the end of a call. The interval allows for
overlap that shifts: at least what the hidden part of the call cannot take up, and at most all of
its process group's savings up to all that is exposed of that group in the step, since the calls of
a group follow one another on one stream. A longer call is longer in all of its exposed part, and of
the hidden one in what compute does not go on for (`compute_ratio`).

A hidden call slows the compute beside it: what it gives back, by fewer multiprocessors or by being
shorter, is told by rows beside matrix products (job_tasks.py), of several kinds of compute by the
least and the most of them, and by how far these are from the job's. Without such rows a longer call
takes more from compute, and a shorter one gives some back, which widens the interval.

The interval, 90 %, is between quantiles of draws: of the least and of the most that overlap leaves
of the gains (gains.py), each with how far the job is from the benchmark, in which calls were alone,
and with the blocks of the trace (the Bayesian bootstrap: Rubin 1981).

C calls of K kinds in B blocks, A configs, D draws, the first half of them of the least. Before the
draws stands the middle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.objective import EARLY, OWN_LOSES
from dynamiccl.datasets.questions import cold_questions, decide, table_supports
from dynamiccl.drawn_worlds import Floats
from dynamiccl.errors import UnknownName
from dynamiccl.evaluate.job.calls import Job
from dynamiccl.evaluate.job.gains import DRAWS, Gains, Source, gains_of
from dynamiccl.nccl import Collective

if TYPE_CHECKING:
    from dynamiccl.train.policy import TorchPolicy

_NINETY: Final = (0.05, 0.95)
#: Standard deviation of a gain for each factor of e between a call's time in the job and in the
#: benchmark, counted up to a factor of 2. Set on simulated congested networks
#: (benchmarks/bench_job.py; other seeds than it judges by).
_APART: Final = 0.08
_MOST_APART: Final = float(np.log(2.0))
#: The most that a call takes of the speed of compute beside it: a channel holds a multiprocessor,
#: and 32 channels are a quarter of the 132 of an H100 (simulator/system.py has more of it).
_TAKEN: Final = 0.25
#: Of what compute was measured to get back, the most that the job's does (chosen; of what it loses
#: to NCCL's own choice, the least is OWN_LOSES).
_MOST_BACK: Final = 1.3
#: Blocks of a trace from which on they say how it varies.
_LEAST_BLOCKS: Final = 3
#: (1 + D,) which draws are of the least, and of the most, that is saved.
_LOW: Final = (np.arange(1 + DRAWS) > 0) & (np.arange(1 + DRAWS) <= DRAWS // 2)
_HIGH: Final = np.arange(1 + DRAWS) > DRAWS // 2
#: A saving below this share is nothing that is worth a change.
LEAST: Final = 0.005
#: A part of a saving below this share of the step is not told.
_TOLD: Final = 0.0005
#: Calls of which at most this share is exposed count as hidden.
_HIDDEN: Final = 0.05
#: An interval that reaches so many times further says nothing, if it includes 0.
_WIDE: Final = 10.0
#: Of what asks a tuner, the share of which nothing may be known where the answer is "nothing".
_DARK: Final = 0.1
POLICY: Final = "policy"
TABLE: Final = "table"
#: Kinds of calls about which a tuner is asked.
ASKS: Final = pl.col("why_not") == ""
Verdict = Literal["gain", "nothing", "cannot-tell"]
#: By a row of `Job.kinds` and its gains the action, or why it is not known.
Choose = Callable[[dict[str, Any], Gains], int | str]


class Estimate(NamedTuple):
    """A share saved (> 0: faster) with its 90 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, mean: float, least: Floats, most: Floats) -> "Estimate":
        """With the interval between draws of the least and of the most that it may be."""
        low, high = float(np.quantile(least, _NINETY[0])), float(np.quantile(most, _NINETY[1]))
        return cls(mean, min(low, mean), max(high, mean))

    @property
    def text(self) -> str:
        """The estimate as text."""
        return f"{self.mean:.1%} ({self.low:.1%} to {self.high:.1%})"


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to choose configs, and the share of time that it saves."""

    #: By kind: the config's key, "" for NCCL's own; what its calls save of their time.
    configs: dict[int, str]
    calls: dict[int, Estimate]
    #: Kind -> why nothing is known of it, though it asks a tuner; those of most time first.
    unknown: dict[int, str]
    communication: Estimate
    #: None: the trace has no steps.
    step: Estimate | None
    #: Of the step, what compute gets back; None: not known of any call, or no steps.
    given_back: Estimate | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What is in it for a job."""

    verdict: Verdict
    #: The verdict as a sentence.
    sentence: str
    job: Job
    #: The arms by name: that which the verdict is about, the policy or the table, is the first.
    arms: dict[str, Arm]
    source: Source
    notes: list[str]

    @property
    def deciding(self) -> Arm:
        """The arm that the verdict is about."""
        return next(iter(self.arms.values()))


def answer(
    job: Job,
    source: Source,
    *,
    groups: Sequence[tuple[int, int]] = (),
    policy: Choose | None = None,
    seen: bool = False,
) -> Answer:
    """What a job saves under the gains of `source`.

    `groups` are (nodes, ranks a node) of process groups where the trace does not say; `policy`
    chooses, beside the table, and `seen` says that it was trained on the runs that the gains are
    of.
    """
    job = job.placed(groups, source.shapes)
    told = gains_of(source, job.kinds)
    default_us = np.array([np.nan if isinstance(each, str) else each.default_us for each in told])
    job = job.timed(default_us)
    choices: dict[str, Choose] = {} if policy is None else {POLICY: policy}
    choices[TABLE] = lambda _, gains: gains.best
    arms = {name: _arm(job, told, default_us, choose) for name, choose in choices.items()}
    name, arm = next(iter(arms.items()))
    verdict, sentence = _judge(job, name, arm, source)
    notes = [*job.notes, *_notes(job, name, arm, source, seen=seen)]
    return Answer(verdict, sentence, job, arms, source, notes)


def policy_choice(policy: "TorchPolicy", system: str) -> Choose:
    """A function: what a policy's table has for a kind of calls on a system."""
    manifest = policy.manifest
    supports, configs = table_supports(manifest), manifest.actions().configs

    def choose(kind: dict[str, Any], gains: Gains) -> int | str:
        shape = kind["num_nodes"], kind["num_ranks"]
        same = [s for s in supports if (s.num_nodes, s.num_ranks) == shape]
        fitting = [s for s in same if s.system == system] or same
        if not fitting:
            # The plugin has no table there, and leaves the choice to NCCL.
            return ABSTAIN_ACTION
        if len(fitting) > 1:
            names = [s.system for s in fitting]
            raise UnknownName("system", system, names, where="the policy; name one with --system")
        support, collective = fitting[0], Collective.parse(kind["collective"])
        asked = cold_questions(manifest, support, [collective], [kind["bin"]])
        observations = Observations.cold(asked.context)
        wanted = configs[int(decide(policy, observations, asked.mask, asked.rule)[0])]
        action = gains.configs.index(wanted) if wanted in gains.configs else None
        if action is None or np.isnan(gains.draws[0, action]):
            return f"the policy wants {wanted.key}, which was not measured near this size"
        return action

    return choose


def _arm(job: Job, told: Sequence[Gains | str], default_us: Floats, choose: Choose) -> Arm:
    """`told` (K,) are gains or why they are not known, `default_us` (K,) the benchmark's times."""
    random, kinds = np.random.default_rng(1), job.kinds.to_dicts()
    # (D,) and (K,) how far the job is from the benchmark; what of a call's time is the latter's.
    apart = _APART * random.standard_normal(DRAWS)
    count = job.calls["block"].n_unique() if job.step_us is None else len(job.step_us)
    # (1 + D, B) weights of the blocks.
    blocks = np.ones((1 + DRAWS, count))
    if count >= _LEAST_BLOCKS:
        blocks[1:] = count * random.dirichlet(np.ones(count), DRAWS)
    ratio = default_us / job.kinds["mean_us"].to_numpy()
    off = np.nan_to_num(np.minimum(np.abs(np.log(ratio)), _MOST_APART))
    surely = np.nan_to_num(np.minimum(1.0, ratio), nan=1.0)
    # (1 + D, K) shares of a call's time that are saved, and of each us hidden what is given back.
    shares, given = np.full((2, 1 + DRAWS, len(kinds)), np.nan)
    configs, unknown = dict[int, str](), dict[int, str]()
    for k, (kind, gains) in enumerate(zip(kinds, told, strict=True)):
        action = gains if isinstance(gains, str) else choose(kind, gains)
        if isinstance(gains, str) or isinstance(action, str):
            unknown |= {} if kind["why_not"] else {k: str(action)}
            continue
        configs[k] = "" if action == ABSTAIN_ACTION else gains.configs[action].key
        # What is NCCL's own choice gains 0 in the job, too.
        drawn = gains.draws[:, action]
        in_job = drawn + off[k] * apart * (drawn != 0.0)
        shares[0, k], shares[1:, k] = -np.expm1(-drawn).mean(), -np.expm1(-in_job)
        given[:, k] = _given(shares[:, k], gains.lost, action)
    calls = {k: Estimate.of(shares[0, k], shares[1:, k], shares[1:, k]) for k in configs}
    saved = _saved(job, shares, given, surely, blocks)
    found = [Estimate.of(float(row[0]), row[_LOW], row[_HIGH]) for row in saved]
    unknown = dict(sorted(unknown.items(), key=lambda each: -kinds[each[0]]["time_us"]))
    has_steps, is_told = job.step_us is not None, not np.isnan(given).all()
    step, back = found[1] if has_steps else None, found[2] if has_steps and is_told else None
    return Arm(configs, calls, unknown, found[0], step, back)


def _given(share: Floats, lost: Floats | None, action: int) -> Floats:
    """(1 + D,) of each us of a hidden call, what compute gets back; NaN: not known.

    `share` (1 + D,) of the call's time is saved, `lost` (E, A) is that of its gains.
    """
    if lost is None or np.isnan(lost[:, action]).any():
        return np.full(len(share), np.nan)
    each = lost[:, :1] - (1.0 - share) * lost[:, [action]]
    # The least: of NCCL's own less than measured, and of the other all; the most: more of both.
    least = each - (1.0 - OWN_LOSES) * lost[:, :1]
    most = np.maximum(_MOST_BACK * each, each)
    found = np.where(_LOW, least.min(axis=0), most.max(axis=0))
    found[0] = each[:, 0].mean()
    return np.asarray(found)


def _saved(job: Job, shares: Floats, given: Floats, surely: Floats, blocks: Floats) -> Floats:
    """(3, 1 + D) shares saved of communication, of the step, and of that what compute gets back.

    `shares` and `given` (1 + D, K), NaN where not known, are of calls' times and of hidden times;
    `surely` (K,) is what of a call's time is the benchmark's, `blocks` (1 + D, B) weigh them.
    Without steps the step's are 0.
    """
    kind, block = (job.calls[name].to_numpy() for name in ("kind", "block"))
    floats = job.calls.select(pl.col("time_us", "weight", "exposed", "compute_ratio").cast(float))
    time, weight, exposed, ratio = (column.to_numpy() for column in floats)
    out, hidden = exposed * time, (1.0 - exposed) * time
    # (K, B) of each kind in each block.
    shape = job.kinds.height, blocks.shape[1]
    all_us, out_us, hidden_us = (
        np.bincount(kind * shape[1] + block, weight * us, shape[0] * shape[1]).reshape(shape)
        for us in (time, out, hidden)
    )
    step_us = np.zeros(shape[1]) if job.step_us is None else job.step_us
    whole_us = np.array([all_us.sum(axis=0), step_us, step_us])
    # (G, K) which kinds are of one process group, in which calls follow one another.
    group = job.kinds.select(pl.struct("group", "num_ranks").rank("dense")).to_series().to_numpy()
    of_group = np.equal.outer(np.unique(group), group)
    # How much longer a call may be before compute waits for it; not known: none at least.
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
        if later.any():
            late = -later[kind] * hidden - (least_room if is_least else room)
            kept -= np.maximum(late, 0.0)
        step = np.bincount(block, weight * kept, shape[1]) + later @ out_us
        # What compute takes or gets where that is not known, and what it surely gets.
        bound = np.where(np.isnan(back), share, 0.0) @ hidden_us
        got = np.nan_to_num(back) @ hidden_us
        if is_most:
            # Each group's savings in a step, up to its exposed time.
            able_us = of_group @ (out_us * ~np.isnan(shares[draw])[:, None])
            top = np.minimum(of_group @ (sooner[:, None] * all_us), able_us).sum(axis=0)
            step = np.maximum(step, top) + _TAKEN * np.maximum(bound, 0.0)
        elif is_least:
            step += _TAKEN * np.minimum(bound, 0.0)
        parts = np.array([saved @ all_us, step + got, got]) @ blocks[draw]
        wholes = whole_us @ blocks[draw]
        found[:, draw] = np.divide(parts, wholes, out=np.zeros(3), where=wholes > 0.0)
    return found


def _judge(job: Job, name: str, arm: Arm, source: Source) -> tuple[Verdict, str]:
    """The verdict about an arm, and a sentence for it."""
    if not job.kinds.filter(ASKS).height:
        return "nothing", "Nothing to gain: no call of this job asks a tuner."
    # The step decides where it is known, else communication.
    found, back = arm.step or arm.communication, arm.given_back
    known = "the model" if source.is_modelled else "the measurements"
    who = "the policy" if name == POLICY else f"the best table of {known}"
    has_steps = arm.step is not None
    what = "step time" if has_steps else "communication time"
    part = "of the step is exposed communication" if has_steps else "of communication time is"
    reach, dark = job.share_of(ASKS), job.share_of(list(arm.unknown))
    if has_steps and reach < LEAST and (back is None or back.high < LEAST):
        return "nothing", (
            f"Nothing to gain: {reach:.1%} {part} that asks a tuner, and no more can be saved."
        )
    if found.low > 0.0 and found.high >= LEAST:
        more = f"; nothing is known of {dark:.0%}" if dark >= LEAST else ""
        return "gain", f"{_saves(job, arm, found, who)}{more}."
    if dark >= max(LEAST, _DARK * reach):
        unknown = job.kinds[list(arm.unknown)].with_columns(why=pl.Series(arm.unknown.values()))
        times = unknown.group_by("why", maintain_order=True).agg(pl.col("time_us").sum())
        return "cannot-tell", (
            f"Cannot tell: {dark:.0%} {part} in calls of which nothing is known "
            f"({times.sort('time_us', descending=True)['why'][0]})."
        )
    if found.high > _WIDE * LEAST:
        return "cannot-tell", (
            f"Cannot tell: between {found.low:+.1%} and {found.high:+.1%} of {what} would be "
            "saved; measure more runs."
        )
    hides = ""
    if has_steps and arm.communication.low > LEAST:
        hides = f", since compute hides most of the {arm.communication.mean:.0%} of communication"
    return "nothing", f"Nothing to gain: {who} would save {found.text} of {what}{hides}."


def _saves(job: Job, arm: Arm, found: Estimate, who: str) -> str:
    """What is saved, of the step in ms where there is one, and what of it by giving back."""
    back = arm.given_back
    if job.step_us is None:
        return f"{who[0].upper()}{who[1:]} would save {found.text} of communication time"
    step_ms = float(job.step_us.mean()) / 1000.0
    exposed_ms = job.share_of(pl.lit(value=True)) * step_ms
    by = ""
    if back is not None and abs(back.mean) >= _TOLD:
        by = f", {back.mean * step_ms:.3g} of them by what compute gets back"
    return (
        f"Of the step's {step_ms:.3g} ms {exposed_ms:.3g} are exposed communication; {who} would "
        f"save {found.low * step_ms:.3g} to {found.high * step_ms:.3g} ms ({found.mean:.1%}){by}"
    )


def _notes(job: Job, name: str, arm: Arm, source: Source, *, seen: bool) -> list[str]:
    """Caveats for the reader."""
    versions = {job.nccl_version, source.nccl_version}
    has_steps = job.step_us is not None
    notes = {
        f"the model is of NCCL {source.nccl_version}; the job ran {job.nccl_version}": (
            source.is_modelled and None not in versions and len(versions) == 2
        ),
        "the trace has no steps: how much of its communication compute hides is not known, so this "
        "is about communication time only": not has_steps,
        "fewer than three steps: how steps differ is not in the intervals": (
            job.step_us is not None and len(job.step_us) < _LEAST_BLOCKS
        ),
        "what compute gets back from its calls is not known, only bounded: rows beside matrix "
        'products would tell it ([[interference]] kind = "matmul")': (
            has_steps and arm.given_back is None
        ),
        "the policy was trained on these runs: fresh runs as --data say better what it gains": seen,
        "the policy leaves the choice of all these calls to NCCL": (
            name == POLICY and not any(arm.configs.values())
        ),
    }
    return [*(note for note, is_so in notes.items() if is_so), *_max_ctas(job, arm)]


def _max_ctas(job: Job, arm: Arm) -> list[str]:
    """What lowers an AllGather's channels where no table does, for groups that compute hides."""
    if job.step_us is None or arm.given_back is None:
        return []
    notes = []
    keys = [arm.configs.get(k, "") for k in range(job.kinds.height)]
    kinds = job.kinds.with_columns(channels=pl.Series(keys).str.extract(r"(\d+)ch").cast(pl.Int64))
    for part in kinds.partition_by("group", maintain_order=True):
        hidden = float(part["exposed_us"].sum()) <= _HIDDEN * float(part["time_us"].sum())
        group, most = part["group"][0], part["channels"].sort().to_list()[-1]
        if hidden and most and Collective.AllGather.wire in part["collective"]:
            notes.append(
                f"compute hides all calls of process group '{group}', and from NCCL 2.29 on no "
                f"table lowers an AllGather's channels: max_ctas = {most} in its options does, of "
                "its other calls, p2p and NVLS, too; sweep again with it"
            )
    return notes
