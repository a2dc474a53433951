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

C calls of K kinds in B blocks, A configs, D draws, the first half of them of the least.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.objective import EARLY
from dynamiccl.datasets.questions import cold_questions, decide, table_supports
from dynamiccl.drawn_worlds import Floats
from dynamiccl.errors import UnknownName
from dynamiccl.evaluate.job.calls import Job, Kind
from dynamiccl.evaluate.job.gains import DRAWS, Gains, Source
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
#: Of what compute was measured to lose, the least and the most that the job's does (chosen:
#: objective.py has the least, too).
_OTHER_COMPUTE: Final = (0.7, 1.3)
#: Blocks of a trace from which on they say how it varies.
_LEAST_BLOCKS: Final = 3
#: Saved times of calls that are held at once.
_AT_ONCE: Final = 4_000_000
#: (1 + D,) which draws are of the least, and of the most, that is saved; the first is the middle.
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


class Conclusion(StrEnum):
    """The answer: gain, nothing or cannot-tell."""

    GAIN = "gain"
    NOTHING = "nothing"
    CANNOT_TELL = "cannot-tell"


@dataclass(frozen=True, slots=True)
class Estimate:
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

    name: str
    #: By kind: the config's key, "" for NCCL's own; what its calls save of their time.
    configs: dict[int, str]
    calls: dict[int, Estimate]
    #: Kind -> why nothing is known of it.
    unknown: dict[int, str]
    communication: Estimate
    #: None: the trace has no steps.
    step: Estimate | None
    #: Of the step, what compute gets back; None: not known of any call, or no steps.
    given_back: Estimate | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What is in it for a job."""

    verdict: Conclusion
    #: The verdict as a sentence.
    sentence: str
    job: Job
    #: The arms by name: that which the verdict is about, the policy or the table, is the first.
    arms: dict[str, Arm]
    source: Source
    least: float
    notes: list[str]

    @property
    def deciding(self) -> Arm:
        """The arm that the verdict is about."""
        return next(iter(self.arms.values()))

    @property
    def uncovered(self) -> list[int]:
        """Kinds of calls with unknown gains, largest first."""
        return sorted(self.deciding.unknown, key=lambda kind: -self.job.kind_us[kind])


#: The action of a kind, or why it is not known.
Choose = Callable[[Kind, Gains], int | str]


def answer(
    job: Job,
    source: Source,
    *,
    groups: Sequence[tuple[int, int]] = (),
    policy: Choose | None = None,
    seen: bool = False,
    least: float = LEAST,
) -> Answer:
    """What a job saves under the gains of `source`.

    `groups` are (nodes, ranks a node) of process groups where the trace does not say; `policy`
    chooses, beside the table, and `seen` says that it was trained on the runs that the gains are
    of; `least` is the least share saved that counts as a gain.
    """
    job = job.placed(groups, source.shapes)
    asking = [k for k, kind in enumerate(job.kinds) if kind.asks]
    told = dict(zip(asking, source.gains([job.kinds[k] for k in asking]), strict=True))
    default_us = np.full(len(job.kinds), np.nan)
    for k, each in told.items():
        if isinstance(each, Gains):
            default_us[k] = each.default_us
    sums = _Sums(job.timed(default_us), default_us)
    choices: dict[str, Choose] = {} if policy is None else {POLICY: policy}
    choices[TABLE] = lambda _, gains: gains.best
    arms = {name: _arm(name, sums, told, choose) for name, choose in choices.items()}
    arm = next(iter(arms.values()))
    verdict, sentence = judge(sums.job, arm, least, source)
    notes = [*sums.job.notes, *_notes(sums.job, arm, source, seen=seen)]
    return Answer(verdict, sentence, sums.job, arms, source, least, notes)


def policy_choice(policy: "TorchPolicy", system: str) -> Choose:
    """A function: what a policy's table has for a kind of calls on a system."""
    manifest = policy.manifest
    supports, configs = table_supports(manifest), manifest.actions().configs

    def choose(kind: Kind, gains: Gains) -> int | str:
        shape = kind.num_nodes, kind.num_ranks
        same = [s for s in supports if (s.num_nodes, s.num_ranks) == shape]
        fitting = [s for s in same if s.system == system] or same
        if not fitting:
            # The plugin has no table there, and leaves the choice to NCCL.
            return ABSTAIN_ACTION
        if len(fitting) > 1:
            names = [s.system for s in fitting]
            raise UnknownName("system", system, names, where="the policy; name one with --system")
        support, collective = fitting[0], Collective.parse(kind.collective)
        asked = cold_questions(manifest, support, [collective], [kind.bin])
        observations = Observations.cold(asked.context)
        wanted = configs[int(decide(policy, observations, asked.mask, asked.rule)[0])]
        action = gains.configs.index(wanted) if wanted in gains.configs else None
        if action is None or np.isnan(gains.draws[0, action]):
            return f"the policy wants {wanted.key}, which was not measured near this size"
        return action

    return choose


class _Sums:
    """Draws of what a job is like beside a benchmark, and sums of what its calls save."""

    def __init__(self, job: Job, default_us: Floats) -> None:
        self.job = job
        random = np.random.default_rng(1)
        #: (D,) how far the job is from the benchmark.
        self.apart = random.standard_normal(DRAWS)
        #: (1 + D, B) weights of the blocks.
        self.blocks = np.ones((1 + DRAWS, job.num_blocks))
        if job.num_blocks >= _LEAST_BLOCKS:
            drawn = random.dirichlet(np.ones(job.num_blocks), DRAWS)
            self.blocks[1:] = drawn * job.num_blocks
        mean_us = job.kind_us / np.maximum(job.of_kind(pl.lit(1.0)), 1e-12)
        ratio = np.where(mean_us > 0.0, default_us / mean_us, np.nan)
        #: (K,) ln of the job's time over the benchmark's, and the share of it that is the latter's.
        self.off = np.nan_to_num(np.minimum(np.abs(np.log(ratio)), _MOST_APART))
        self.surely = np.nan_to_num(np.minimum(1.0, ratio), nan=1.0)
        groups = [f"{kind.group}|{kind.num_ranks}" for kind in job.kinds]
        self.group = np.unique(groups, return_inverse=True)[1]

    def shares(self, kind: int, gains: Floats) -> Floats:
        """(1 + D,) shares of a call's time that are saved, their mean the first.

        `gains` (D,) are those in the benchmark; what is NCCL's own choice gains 0 in the job, too.
        """
        in_job = gains + _APART * self.off[kind] * self.apart * (gains != 0.0)
        return np.concatenate([[-np.expm1(-gains).mean()], -np.expm1(-in_job)])

    @staticmethod
    def given(share: Floats, lost: Floats | None, action: int) -> Floats | None:
        """(1 + D,) of each us of a hidden call, what compute gets back; None: not known.

        `share` (1 + D,) of the call's time is saved, `lost` (E, A) is that of its gains.
        """
        if lost is None or np.isnan(lost[:, action]).any():
            return None
        each = lost[:, :1] - (1.0 - share) * lost[:, [action]]
        # The least: of NCCL's own less than measured, and of the other all; the most: more of both.
        least = each - (1.0 - _OTHER_COMPUTE[0]) * lost[:, :1]
        most = np.maximum(_OTHER_COMPUTE[1] * each, each)
        found = np.where(_LOW, least.min(axis=0), most.max(axis=0))
        found[0] = each[:, 0].mean()
        return np.asarray(found)

    def estimates(
        self, shares: dict[int, Floats], given: dict[int, Floats]
    ) -> tuple[Estimate, Estimate | None, Estimate | None]:
        """What is saved of communication, of the step, and what of that compute gets back.

        `shares` (1 + D,), the first their mean, and what is `given` back are by kind.
        """
        job = self.job
        # All time saved; of exposed time the middle; what may shift to or from compute.
        all_us, step_us, back_us, given_us = np.zeros((4, 1 + DRAWS, job.num_blocks))
        group_us = np.zeros((int(self.group.max(initial=0)) + 1, 1 + DRAWS, job.num_blocks))
        able_us = np.zeros((len(group_us), job.num_blocks))
        for kind, share in shares.items():
            calls = job.calls.filter(kind=kind).sort("block", maintain_order=True)
            block, starts = np.unique(calls["block"], return_index=True)
            time, weight = calls["time_us"].to_numpy(), calls["weight"].to_numpy()
            out = calls["exposed"].to_numpy() * time
            # The least is of the benchmark's time alone.
            held = np.where(_LOW & (share > 0.0), self.surely[kind], 1.0)
            whole_us = (share * held)[:, None] * np.add.reduceat(time * weight, starts)
            bare_us = np.add.reduceat(out * weight, starts)
            hidden_us = np.add.reduceat((time - out) * weight, starts)
            longer = np.maximum(-share, 0.0)
            # How much longer a call may be before compute waits for it; not known: none at least.
            ratio = calls["compute_ratio"].to_numpy().astype(np.float64)
            room = np.nan_to_num(np.maximum(ratio - 1.0, 0.0) * time, nan=np.inf)
            least_room = np.nan_to_num(np.maximum(EARLY * ratio - 1.0, 0.0) * time)
            all_us[:, block] += whole_us
            group_us[self.group[kind]][:, block] += np.maximum(whole_us, 0.0)
            able_us[self.group[kind], block] += bare_us
            if kind in given:
                given_us[:, block] += given[kind][:, None] * hidden_us
            else:
                back_us[:, block] += share[:, None] * hidden_us
            for rows in np.array_split(np.arange(1 + DRAWS), 1 + len(time) * DRAWS // _AT_ONCE):
                saved = np.maximum(share * held, 0.0)[rows, None] * time
                least = np.maximum(saved - (time - out), 0.0)
                kept = np.where(_LOW[rows, None], least, np.minimum(saved, out))
                late = longer[rows, None] * (time - out)
                late -= np.where(_LOW[rows, None], least_room, room)
                kept -= np.maximum(late, 0.0)
                step_us[np.ix_(rows, block)] += np.add.reduceat(kept * weight, starts, axis=1)
            step_us[:, block] += np.minimum(share, 0.0)[:, None] * bare_us
        us = job.calls["time_us"] * job.calls["weight"]
        blocks_us = np.bincount(job.calls["block"], us, minlength=job.num_blocks)
        communication = self._estimate(all_us, blocks_us.astype(np.float64))
        if job.step_us is None:
            return communication, None, None
        # Each group's savings in a step, up to its exposed time; and what compute takes or gets.
        top_us = np.minimum(group_us, able_us[:, None]).sum(axis=0)
        step_us = np.where(_HIGH[:, None], np.maximum(step_us, top_us), step_us)
        step_us += _TAKEN * np.where(_HIGH[:, None], np.maximum(back_us, 0.0), 0.0)
        step_us += _TAKEN * np.where(_LOW[:, None], np.minimum(back_us, 0.0), 0.0)
        step = self._estimate(step_us + given_us, job.step_us)
        return communication, step, self._estimate(given_us, job.step_us) if given else None

    def _estimate(self, saved_us: Floats, whole_us: Floats) -> Estimate:
        """Of (1 + D, B) saved of (B,)."""
        saved = (saved_us * self.blocks).sum(axis=1)
        whole = (whole_us * self.blocks).sum(axis=1)
        shares = np.divide(saved, whole, out=np.zeros(len(saved)), where=whole > 0.0)
        return Estimate.of(float(shares[0]), shares[_LOW], shares[_HIGH])


def _arm(name: str, sums: _Sums, told: dict[int, Gains | str], choose: Choose) -> Arm:
    """`told` has the gains of each kind that asks a tuner, or why they are not known."""
    shares, given = dict[int, Floats](), dict[int, Floats]()
    configs, unknown = dict[int, str](), dict[int, str]()
    for kind, gains in told.items():
        action = gains if isinstance(gains, str) else choose(sums.job.kinds[kind], gains)
        if isinstance(gains, str) or isinstance(action, str):
            unknown[kind] = str(action)
            continue
        shares[kind] = sums.shares(kind, gains.draws[:, action])
        back = sums.given(shares[kind], gains.lost, action)
        given |= {} if back is None else {kind: back}
        configs[kind] = "" if action == ABSTAIN_ACTION else gains.configs[action].key
    calls = {k: Estimate.of(float(share[0]), share[1:], share[1:]) for k, share in shares.items()}
    return Arm(name, configs, calls, unknown, *sums.estimates(shares, given))


def judge(job: Job, arm: Arm, least: float, source: Source) -> tuple[Conclusion, str]:
    """The verdict about an arm, and a sentence for it."""
    asking = [k for k, kind in enumerate(job.kinds) if kind.asks]
    if not asking:
        return Conclusion.NOTHING, "Nothing to gain: no call of this job asks a tuner."
    # The step decides where it is known, else communication.
    found, back = arm.step or arm.communication, arm.given_back
    known = "the model" if source.is_modelled else "the measurements"
    who = "the policy" if arm.name == POLICY else f"the best table of {known}"
    has_steps = arm.step is not None
    what = "step time" if has_steps else "communication time"
    part = "of the step is exposed communication" if has_steps else "of communication time is"
    reach, dark = job.share_of(asking), job.share_of(list(arm.unknown))
    if has_steps and reach < least and (back is None or back.high < least):
        return Conclusion.NOTHING, (
            f"Nothing to gain: {reach:.1%} {part} that asks a tuner, and no more can be saved."
        )
    if found.low > 0.0 and found.high >= least:
        more = f"; nothing is known of {dark:.0%}" if dark >= least else ""
        return Conclusion.GAIN, f"{_saves(job, arm, found, who)}{more}."
    if dark >= max(least, _DARK * reach):
        times: dict[str, float] = {}
        for k, reason in arm.unknown.items():
            times[reason] = times.get(reason, 0.0) + float(job.kind_us[k])
        return Conclusion.CANNOT_TELL, (
            f"Cannot tell: {dark:.0%} {part} in calls of which nothing is known "
            f"({max(times, key=lambda reason: times[reason])})."
        )
    if found.high > _WIDE * least:
        return Conclusion.CANNOT_TELL, (
            f"Cannot tell: between {found.low:+.1%} and {found.high:+.1%} of {what} would be "
            "saved; measure more runs."
        )
    hides = ""
    if arm.step is not None and arm.communication.low > least:
        hides = f", since compute hides most of the {arm.communication.mean:.0%} of communication"
    return Conclusion.NOTHING, f"Nothing to gain: {who} would save {found.text} of {what}{hides}."


def _saves(job: Job, arm: Arm, found: Estimate, who: str) -> str:
    """What is saved, of the step in ms where there is one, and what of it by giving back."""
    back = arm.given_back
    if job.step_us is None:
        return f"{who[0].upper()}{who[1:]} would save {found.text} of communication time"
    step_ms = float(job.step_us.mean()) / 1000.0
    exposed_ms = job.share_of(range(len(job.kinds))) * step_ms
    by = ""
    if back is not None and abs(back.mean) >= _TOLD:
        by = f", {back.mean * step_ms:.3g} of them by what compute gets back"
    return (
        f"Of the step's {step_ms:.3g} ms {exposed_ms:.3g} are exposed communication; {who} would "
        f"save {found.low * step_ms:.3g} to {found.high * step_ms:.3g} ms ({found.mean:.1%}){by}"
    )


def _notes(job: Job, arm: Arm, source: Source, *, seen: bool) -> list[str]:
    """Caveats for the reader."""
    versions = {job.nccl_version, source.nccl_version}
    is_other = source.is_modelled and None not in versions and len(versions) == 2
    has_steps = job.step_us is not None
    leaves = arm.name == POLICY and not any(arm.configs.values())
    notes = {
        f"the model is of NCCL {source.nccl_version}; the job ran {job.nccl_version}": is_other,
        "the trace has no steps: how much of its communication compute hides is not known, so this "
        "is about communication time only": not has_steps,
        "fewer than three steps: how steps differ is not in the intervals": (
            job.num_blocks < _LEAST_BLOCKS
        ),
        "what compute gets back from its calls is not known, only bounded: rows beside matrix "
        'products would tell it ([[interference]] kind = "matmul")': (
            has_steps and arm.given_back is None
        ),
        "the policy was trained on these runs: fresh runs as --data say better what it gains": seen,
        "the policy leaves the choice of all these calls to NCCL": leaves,
    }
    return [*(note for note, is_so in notes.items() if is_so), *_max_ctas(job, arm)]


def _max_ctas(job: Job, arm: Arm) -> list[str]:
    """What lowers an AllGather's channels where no table does, for groups that compute hides."""
    groups = dict[str, list[int]]()
    for number, kind in enumerate(job.kinds):
        groups.setdefault(kind.group, []).append(number)
    notes = []
    for group, kinds in groups.items():
        gathers = {job.kinds[k].collective for k in kinds} >= {Collective.AllGather.wire}
        keys = [arm.configs.get(k, "") for k in kinds]
        asked = [int(found[1]) for key in keys if (found := re.search(r"(\d+)ch", key))]
        hidden = job.kind_exposed_us[kinds].sum() <= _HIDDEN * job.kind_us[kinds].sum()
        if arm.given_back is not None and job.step_us is not None and gathers and hidden and asked:
            notes.append(
                f"compute hides all calls of process group '{group}', and from NCCL 2.29 on no "
                f"table lowers an AllGather's channels: max_ctas = {max(asked)} in its options "
                "does, of its other calls, p2p and NVLS, too; sweep again with it"
            )
    return notes
