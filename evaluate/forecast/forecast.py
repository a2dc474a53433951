"""The forecast of a job's gain: calls, gain of each kind of call, verdict.

trace -> Job -> kinds of calls ─┬─> gains of each kind (a sweep, or a simulated system)
                                └─> picks: policy, table, best ─> estimates ─> verdict
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from dynamiccl.collect.traces import read_traces
from dynamiccl.datasets.cells import run_names
from dynamiccl.datasets.store import part_paths, read
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.evaluate.forecast.gains import Gains, Measured, Modelled, Source
from dynamiccl.evaluate.forecast.job import Job, job_of, with_nodes
from dynamiccl.evaluate.forecast.picks import Choose, Pick, best, policy_choice, table
from dynamiccl.evaluate.forecast.saving import LEAST_BLOCKS, Estimate, Weighed, estimate, weigh
from dynamiccl.nccl import ABSTAIN, Config
from dynamiccl.simulator.systems import find_system

#: A saving below this share is nothing that is worth a change.
LEAST: Final = 0.005
#: An interval that reaches so many times further says nothing, if it includes 0.
_WIDE: Final = 10.0
#: Of what asks a tuner, the share of which nothing may be known where the answer is "nothing".
_DARK: Final = 0.1
POLICY: Final = "policy"
TABLE: Final = "table"
BEST: Final = "best"
#: Under which names the rows of traces stand; nothing is kept of them.
_NAME: Final = "trace"


class Conclusion(StrEnum):
    """The answer: gain, nothing or cannot-tell."""

    GAIN = "gain"
    NOTHING = "nothing"
    CANNOT_TELL = "cannot-tell"


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to choose configs, and the share of time that it saves."""

    name: str
    picks: list[Pick | None]
    #: Kind -> why nothing is known of it.
    unknown: dict[int, str]
    communication: Estimate
    #: None: the trace has no steps.
    step: Estimate | None

    @property
    def decisive(self) -> Estimate:
        """The share saved of the step if known, else of communication."""
        return self.communication if self.step is None else self.step


@dataclass(frozen=True, slots=True)
class Forecast:
    """All results."""

    verdict: Conclusion
    #: The verdict as a sentence.
    sentence: str
    weighed: Weighed
    #: The arms by name: the policy where one was given, the table, the best.
    arms: dict[str, Arm]
    #: What the gains are from: a system's name, and whether a model of it says them.
    system: str
    modelled: bool
    nccl_version: str | None
    least: float
    notes: list[str]

    @property
    def deciding(self) -> Arm:
        """The arm that the verdict is about."""
        return self.arms.get(POLICY, self.arms[TABLE])

    @property
    def uncovered(self) -> dict[int, str]:
        """Kinds of calls with unknown gains, with the reason; largest first."""
        time = self.weighed.kind_us
        return dict(sorted(self.deciding.unknown.items(), key=lambda item: -time[item[0]]))

    @property
    def is_timed(self) -> bool:
        """Whether the trace has times; else calls are weighted by benchmark times."""
        return self.weighed.job.has_times


def forecast(  # noqa: PLR0913 - all that it depends on
    job: Job,
    source: Source,
    *,
    groups: Sequence[tuple[int, int]] = (),
    policy: Choose | None = None,
    seen: bool = False,
    least: float = LEAST,
    modelled: bool = False,
) -> Forecast:
    """Forecast what a job gains under the gains of `source`.

    Args:
        job: from its trace.
        source: gains of kinds of calls.
        groups: (nodes, ranks a node) of process groups where the trace does not say.
        policy: what chooses, beside the table.
        seen: the policy was trained on the runs that the gains are of.
        least: the least share saved that counts as a gain.
        modelled: the gains are a model's.
    """
    kinds = with_nodes(job, groups, source.shapes)
    known = {k: source.gains(kind) for k, kind in enumerate(kinds) if kind.asks}
    gains = {k: each for k, each in known.items() if isinstance(each, Gains)}
    lacking = {k: each for k, each in known.items() if isinstance(each, str)}
    default = np.full(len(kinds), np.nan)
    for k, each in gains.items():
        default[k] = each.default_us
    weighed = weigh(job, kinds, default)
    arms = {TABLE: _arm(TABLE, weighed, gains, lacking, table)}
    arms[BEST] = _not_below(_arm(BEST, weighed, gains, lacking, best), arms[TABLE])
    notes = [*_notes(weighed, known, seen=seen), *_other_version(job, source, modelled=modelled)]
    if policy is not None:
        arm = _arm(POLICY, weighed, gains, lacking, policy)
        arms = {POLICY: _humble(arm, arms) if seen else arm, **arms}
        if all(pick is None or pick.config == ABSTAIN for pick in arm.picks):
            notes.append("the policy leaves the choice of all these calls to NCCL")
    verdict, sentence = judge(weighed, arms.get(POLICY, arms[TABLE]), least, modelled=modelled)
    return Forecast(
        verdict, sentence, weighed, arms, source.system, modelled, source.nccl_version, least,
        notes,
    )  # fmt: skip


def _arm(
    name: str, weighed: Weighed, gains: dict[int, Gains], lacking: dict[int, str], choose: Choose
) -> Arm:
    picks: list[Pick | None] = [None] * len(weighed.kinds)
    unknown = dict(lacking)
    for k, each in gains.items():
        found = choose(weighed.kinds[k], each)
        if isinstance(found, Pick):
            picks[k] = found
        else:
            unknown[k] = found
    has_steps = weighed.job.step_us is not None
    return Arm(
        name, picks, unknown,
        estimate(weighed, picks, "communication"),
        estimate(weighed, picks, "step") if has_steps else None,
    )  # fmt: skip


def _not_below(arm: Arm, least: Arm) -> Arm:
    """The best config's arm, with a lower bound at least the table's."""

    def ends(one: Estimate, other: Estimate) -> Estimate:
        return Estimate(one.mean, min(other.low, one.mean), one.high)

    step = None if arm.step is None or least.step is None else ends(arm.step, least.step)
    return replace(arm, communication=ends(arm.communication, least.communication), step=step)


def _humble(arm: Arm, others: dict[str, Arm]) -> Arm:
    """A policy's arm, reduced by selection bias when it was trained on these runs."""

    def lower(one: Estimate, table: Estimate, best: Estimate) -> Estimate:
        luck = max(0.0, best.mean - table.mean)
        return Estimate(one.mean, one.low - luck, one.high)

    table, best = others[TABLE], others[BEST]
    step = (
        lower(arm.step, table.step, best.step)
        if arm.step is not None and table.step is not None and best.step is not None
        else None
    )
    communication = lower(arm.communication, table.communication, best.communication)
    return replace(arm, communication=communication, step=step)


def share_of(weighed: Weighed, kinds: Iterable[int]) -> float:
    """Exposed share of the step of `kinds`; without steps, share of communication time."""
    rows = list(kinds)
    if weighed.job.step_us is not None:
        return float(weighed.kind_exposed_us[rows].sum() / weighed.job.step_us.sum())
    whole = weighed.communication_us
    return float(weighed.kind_us[rows].sum() / whole) if whole > 0.0 else 0.0


def judge(
    weighed: Weighed, arm: Arm, least: float, *, modelled: bool = False
) -> tuple[Conclusion, str]:
    """The verdict about an arm, and a sentence for it."""
    has_steps = weighed.job.step_us is not None
    what = "step time" if has_steps else "communication time"
    part = "of the step is exposed communication" if has_steps else "of communication time is"
    asking = [k for k, kind in enumerate(weighed.kinds) if kind.asks]
    found = arm.decisive
    known = "the model" if modelled else "the measurements"
    who = "The policy" if arm.name == POLICY else f"The best table of {known}"
    reach, dark = share_of(weighed, asking), share_of(weighed, arm.unknown)
    if not asking:
        return Conclusion.NOTHING, "Nothing to gain: no call of this job asks a tuner."
    if has_steps and reach < least:
        return Conclusion.NOTHING, (
            f"Nothing to gain: {reach:.1%} {part} that asks a tuner, and no more can be saved."
        )
    if found.low > 0.0 and found.high >= least:
        more = f"; nothing is known of {dark:.0%}" if dark >= least else ""
        return Conclusion.GAIN, f"{who} would save {found.text} of {what}{more}."
    if dark >= max(least, _DARK * reach):
        return Conclusion.CANNOT_TELL, (
            f"Cannot tell: {dark:.0%} {part} in calls of which nothing is known "
            f"({_main_reason(weighed, arm)})."
        )
    if found.high > _WIDE * least:
        return Conclusion.CANNOT_TELL, (
            f"Cannot tell: between {found.low:+.1%} and {found.high:+.1%} of {what} would be "
            "saved; measure more runs."
        )
    hides = ""
    if arm.step is not None and arm.communication.low > least:
        hides = f", since compute hides most of the {arm.communication.mean:.0%} of communication"
    return Conclusion.NOTHING, (
        f"Nothing to gain: {who[0].lower()}{who[1:]} would save {found.text} of {what}{hides}."
    )


def _other_version(job: Job, source: Source, *, modelled: bool) -> list[str]:
    """That a model is of another release; a sweep of another one covers nothing anyway."""
    if not modelled or None in {job.nccl_version, source.nccl_version}:
        return []
    if job.nccl_version == source.nccl_version:
        return []
    return [f"the model is of NCCL {source.nccl_version}; the job ran {job.nccl_version}"]


def _main_reason(weighed: Weighed, arm: Arm) -> str:
    """The reason for the largest uncovered part."""
    times: dict[str, float] = {}
    for k, reason in arm.unknown.items():
        times[reason] = times.get(reason, 0.0) + float(weighed.kind_us[k])
    return max(times, key=lambda reason: times[reason])


def _notes(weighed: Weighed, known: dict[int, Gains | str], *, seen: bool) -> list[str]:
    """Caveats for the reader."""
    job = weighed.job
    notes = list(job.notes)
    if job.step_us is None:
        notes.append(
            "the trace has no steps: how much of its communication compute hides is not known, so "
            "this is about communication time only"
        )
    if not job.has_times:
        notes.append(
            "the trace has no times: its calls are weighed by what they take in the benchmark, and "
            "by their bytes where that is not known"
        )
    elif not np.isfinite(job.time_us).all():
        missing = int((~np.isfinite(job.time_us)).sum())
        notes.append(f"{missing} calls have no time; they are taken for the mean of their kind")
    bound = float(job.of_kind(np.where(job.is_bound, job.time_us, 0.0)).sum())
    if bound > 0.0:
        notes.append(
            f"{bound / weighed.communication_us:.0%} of communication time is of a few ranks "
            "alone and may hold waiting for the others; intervals begin at the benchmark's time"
        )
    if job.num_blocks < LEAST_BLOCKS:
        notes.append("fewer than three steps: how steps differ is not in the intervals")
    guessed = [
        k for k, kind in enumerate(job.kinds) if kind.num_nodes is None and k in known
        and isinstance(known[k], Gains)
    ]  # fmt: skip
    if guessed:
        shapes = sorted(
            {f"{weighed.kinds[k].num_ranks} on {weighed.kinds[k].num_nodes}" for k in guessed}
        )
        notes.append(
            f"ranks and nodes, which the trace does not say, are taken to be {', '.join(shapes)} "
            "as measured or named"
        )
    if seen:
        notes.append(
            "the policy was trained on these runs, so its interval begins lower by what luck in "
            "choosing may have added; fresh runs as --data would say it better"
        )
    return notes


@dataclass(frozen=True, slots=True)
class ForecastInputs:
    """The inputs of a forecast."""

    #: A data directory with a sweep; None: the simulated system `system`.
    data: Path | None
    #: Which system of `data`, where it has several.
    system: str | None
    policy: str | None
    tracking_uri: str
    #: (nodes, ranks a node) of process groups, and GPUs of a node, where the trace does not say.
    groups: Sequence[tuple[int, int]]
    ranks_per_node: int | None
    least: float


def look_ahead(traces: Sequence[Path], asked: ForecastInputs) -> Forecast:
    """Read the inputs, and forecast. Raises what the readers raise."""
    frame = None if asked.data is None else read(asked.data)
    simulated = find_system(asked.system or "") if frame is None else None
    job = _read_job(traces, asked.ranks_per_node)
    loaded, configs, runs = None, tuple[Config, ...](), set[str]()
    if asked.policy is not None:
        from dynamiccl.train.policy import TorchPolicy
        from dynamiccl.train.tracking import policy_directory

        loaded = TorchPolicy.load(policy_directory(asked.policy, asked.tracking_uri))
        configs, runs = loaded.manifest.actions().configs, set(loaded.manifest.runs)
    source: Source
    if simulated is not None:
        source = Modelled(simulated, configs)
    elif frame is not None:
        source = Measured(frame, asked.system, job.nccl_version)
    choose: Choose | None = None if loaded is None else policy_choice(loaded, source.system)
    return forecast(
        job,
        source,
        groups=asked.groups,
        policy=choose,
        seen=frame is not None and bool(runs & set(run_names(frame))),
        least=asked.least,
        modelled=frame is None,
    )


def _read_job(paths: Sequence[Path], ranks_per_node: int | None) -> Job:
    """The job of which the traces are.

    A directory with a `calls` table is read as such; all else by its content, as
    `dynamiccl-collect import` does. Raises MissingPath, UserError, NotEnoughData, and what the
    readers raise.
    """
    tables: dict[str, list[pl.DataFrame]] = {"calls": [], "steps": []}
    files = []
    notes: list[str] = []
    for path in paths:
        if not path.exists():
            raise MissingPath("trace", path, "name a trace, or a directory of them or of data")
        if path.is_dir() and part_paths(path, "calls"):
            tables["calls"].append(read(path, "calls"))
            if part_paths(path, "steps"):
                tables["steps"].append(read(path, "steps"))
        elif path.is_dir() and any(path.glob("**/*.dcc")):
            raise UserError(
                f"{path} holds what the plugin wrote; read it in first: dynamiccl-collect import "
                f"{path} --out DATA --system NAME, and give DATA"
            )
        else:
            files.append(path)
    if files:
        traces = read_traces(files, system=_NAME, sweep=_NAME)
        if traces.errors and not traces.calls.num_rows and not traces.steps.num_rows:
            raise traces.errors[0]
        tables["calls"].append(pl.DataFrame(traces.calls))
        tables["steps"].append(pl.DataFrame(traces.steps))
        notes += [f"not read: {error}" for error in traces.errors]
    steps = pl.concat(tables["steps"]) if tables["steps"] else None
    job = job_of(pl.concat(tables["calls"]), steps, ranks_per_node)
    job.notes.extend(notes)
    return job
