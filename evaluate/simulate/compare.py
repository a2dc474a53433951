"""Whole simulated jobs: everybody plays, true communication times are compared, and a page of it.

Interference does not depend on actions (dynamiccl/simulator/world.py), so players with one seed
meet the same congestion at the same calls. Intervals are over seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.errors import UserError
from dynamiccl.evaluate.figures import draw_courses
from dynamiccl.evaluate.page import render, saved_text, write_page
from dynamiccl.evaluate.simulate.players import (
    DELAYED,
    NCCL,
    ORACLE,
    SEARCH,
    Contender,
    Player,
    Setting,
    policy_contenders,
    simple_contenders,
)
from dynamiccl.simulator.record_jobs import check_workload
from dynamiccl.train.commands.options import open_bar
from dynamiccl.train.environment import JobCalls, delay_calls
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.study import student_interval

Float64Array = npt.NDArray[np.float64]
#: A call counts as slower than NCCL's choice in the same state beyond this factor.
SLOWER: Final = 0.01
#: A gain of the oracle that would be something; below it there is nothing to gain.
_WORTH_GAINING: Final = 0.03


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a player's N jobs, each (N,)."""

    #: True time of all calls, changes included.
    total_us: Float64Array
    #: Time of the jobs, compute included.
    job_us: Float64Array
    #: The best config of each call, changes left out.
    oracle_us: Float64Array
    changes: npt.NDArray[np.int64]
    #: Calls that took over 1 % more than NCCL's choice would have.
    slower: npt.NDArray[np.int64]
    #: Calls at which an alarm began.
    alarms: npt.NDArray[np.int64]
    #: The first job, call by call: the action and whether it `changed`, `measured_us` beside
    #: `default_us`, the Trigger's `level`, whether an `alarm` began (never without a Trigger), and
    #: the worst slowdown of a link or the host. None: not kept.
    course: pl.DataFrame | None


def roll_out(
    env: JobCalls,
    player: Player,
    *,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Totals:
    """Run one episode of the environment; `progress` is called with numbers of calls."""
    observation = env.reset(seed)
    calls, jobs = env.course.episode_calls, env.num_envs
    total, job, oracle = np.zeros((3, jobs))
    changes, slower, alarms = np.zeros((3, jobs), dtype=np.int64)
    course = []
    for call in range(calls):
        times = env.jobs.oracle_us()
        worst = max(env.jobs.intra[0], env.jobs.inter[0], env.jobs.host[0])
        usual = times[:, ABSTAIN_ACTION]
        observation, ran = env.step(player.act(observation, env))
        player.learn(ran, env)
        total += ran.true_us
        job += ran.lasted_us
        oracle += np.nanmin(times, axis=1)
        changes += ran.changed
        slower += ran.true_us > (1.0 + SLOWER) * usual
        alarms += env.alarm_began
        seen = (ran.action, ran.changed, ran.measured_us, usual, env.level, env.alarm_began)
        course.append((*(each[0].item() for each in seen), float(worst)))
        if progress is not None and (call + 1) % 1000 == 0:
            progress(1000)
    names = ("action", "changed", "measured_us", "default_us", "level", "alarm", "slowdown")
    first = pl.DataFrame(course, schema=names, orient="row", infer_schema_length=1)
    return Totals(total, job, oracle, changes, slower, alarms, first)


def play(
    setting: Setting,
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    progress: Callable[[int], None] | None = None,
) -> dict[str, list[Totals]]:
    """The totals of every contender with every seed; of the first seed the course, too."""
    played: dict[str, list[Totals]] = {}
    for contender in contenders:
        for seed in seeds:
            env, player = contender.prepare(setting, seed)
            total = roll_out(env, player, seed=seed, progress=progress)
            kept = total if seed == seeds[0] else replace(total, course=None)
            played.setdefault(contender.name, []).append(kept)
    return played


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its 95 % interval; None of a single seed."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float], least: float | None = None) -> Self:
        """Mean and Student's interval, cut off at `least` for what cannot be less."""
        low, high = student_interval(values)
        if low is not None and least is not None:
            low = max(low, least)
        return cls(float(np.mean(values)), low, high)

    @property
    def ends(self) -> tuple[float, float]:
        """The interval; of one seed the mean twice."""
        return (self.mean, self.mean) if self.low is None else (self.low, self.high or 0.0)

    @property
    def sign(self) -> int:
        """-1: below 0, 1: above, 0: cannot be told."""
        low, high = self.ends
        return -1 if high < 0.0 else 1 if low > 0.0 else 0

    @property
    def saved(self) -> str:
        """Time saved, where this is time over another - 1: `page.saved_text`."""
        low, high = self.ends
        return saved_text(-self.mean, None if self.low is None else (-high, -low))


#: What a simulation found, and its rows (`make_row`), as JSON has them but for Estimates.
Comparison = dict[str, Any]
Row = dict[str, Any]


def make_row(name: str, totals: Sequence[Totals], default: Sequence[Totals], calls: int) -> Row:
    """The metrics of a contender; `default` are the totals of NCCL's choice, by seed.

    Shares are fractions, times true and with config changes. `seconds` and `seed_seconds` are those
    of one job's calls; `over_default` is time / NCCL's own - 1, below 0 is faster, and
    `job_over_default` the same of whole jobs, compute included. `regret` is time / fastest config
    of each call - 1, where changes cost nothing: the oracle's own row is above 0, as it pays.
    """
    all_calls = calls * sum(len(each.total_us) for each in totals)

    def share(what: Callable[[Totals], float]) -> float:
        return float(sum(what(each) for each in totals)) / all_calls

    def over(time_of: Callable[[Totals], Any]) -> Estimate:
        pairs = zip(totals, default, strict=True)
        return Estimate.of([time_of(a).sum() / time_of(b).sum() - 1 for a, b in pairs])

    spent = [float(each.total_us.mean()) / 1e6 for each in totals]
    return {
        "name": name,
        "seconds": Estimate.of(spent, least=0.0),
        "over_default": over(lambda t: t.total_us),
        "job_over_default": over(lambda t: t.job_us),
        "regret": Estimate.of([t.total_us.sum() / t.oracle_us.sum() - 1 for t in totals], 0.0),
        "changes_per_1000_calls": 1e3 * share(lambda t: t.changes.sum()),
        "share_slower_than_default": share(lambda t: t.slower.sum()),
        "alarms_per_1e5_calls": 1e5 * share(lambda t: t.alarms.sum()),
        "seed_seconds": spent,
    }


def conclude(
    setting: Setting, played: Mapping[str, Sequence[Totals]], trained: frozenset[str]
) -> Comparison:
    """Metrics and verdicts; `trained` names the rows of policies.

    Raises KeyError unless one of the rows is NCCL's own choice.
    """
    default = played[NCCL]
    rows = [make_row(name, totals, default, setting.calls) for name, totals in played.items()]
    return {
        "system": setting.system.name,
        "workload": setting.workload.name,
        "scenario": setting.scenario.meaning,
        "calls": setting.calls,
        "jobs": setting.jobs,
        "seeds": len(default),
        "rows": rows,
        "verdicts": verdicts(rows, trained),
    }


def to_json(found: Comparison) -> dict[str, Any]:
    """Plain data."""
    rows = [
        {key: asdict(value) if isinstance(value, Estimate) else value for key, value in row.items()}
        for row in found["rows"]
    ]
    return {**found, "rows": rows}


def verdicts(rows: Sequence[Row], trained: frozenset[str]) -> list[str]:
    """Sentences: what each policy gains, of no policy the best row; or that there is no gain."""
    oracle = next((row["over_default"] for row in rows if row["name"] == ORACLE), None)
    rivals = [row for row in rows if row["name"] not in {ORACLE, DELAYED, NCCL}]
    told = [row for row in rivals if row["name"] in trained]
    gained = any(row["over_default"].sign < 0 for row in rivals)
    if gained and not told:
        told = [min(rivals, key=lambda row: row["over_default"].mean)]
    # Seeds differ so much that the oracle could gain something, and more of them would tell.
    is_open = oracle is not None and oracle.ends[0] < -_WORTH_GAINING
    header = {"gained": gained, "told": told, "oracle": oracle, "open": is_open}
    return render("simulate.words", header).splitlines()


def simulate(
    setting: Setting,
    policies: Mapping[str, Path],
    trigger: Path | None,
    seeds: Sequence[int],
    out: Path,
) -> Comparison:
    """Simulate all rows and write the page; `policies` are directories by name.

    Raises UserError for a system that cannot run the workload, and as `TorchPolicy.load`.
    """
    check_workload(setting.system, setting.workload)
    contenders = simple_contenders(setting)
    for name, folder in policies.items():
        policy = TorchPolicy.load(folder)
        if policy.manifest.slack is not None:
            raise UserError(
                f"{name} has {policy.manifest.slack.terms}, which simulated jobs do not keep to: "
                "give the run that it was made from"
            )
        contenders += policy_contenders(setting, name, policy, None)
        if trigger is not None:
            from dynamiccl.train.trigger.detector import Detector

            watch = partial(Detector.load, trigger)
            contenders += policy_contenders(setting, name, policy, watch)
    with open_bar() as progress:
        total = len(contenders) * len(seeds) * setting.calls
        bar = progress.add_task("calls", total=total)
        played = play(setting, contenders, seeds, lambda count: progress.advance(bar, count))
    trained = frozenset(each.name for each in contenders if each.trained)
    found = conclude(setting, played, trained)
    write_simulation(found, played, trained, delay_calls(contenders[0].world), out)
    return found


def write_simulation(
    found: Comparison,
    played: Mapping[str, Sequence[Totals]],
    trained: frozenset[str],
    delay: int,
    out: Path,
) -> Path:
    """Write page, results and the course of a job into `out`; the page's path."""
    first = {name: each[0].course for name, each in played.items()}
    drawn = {*trained, SEARCH, ORACLE}
    svg = draw_courses({n: c for n, c in first.items() if n in drawn and c is not None})
    ends = [end for row in found["rows"] for end in row["over_default"].ends]
    # Less time is drawn to the right.
    reach = min(max(0.02, *map(abs, ends)), 1.0)
    header = {
        **found,
        "trained": trained,
        "delay": delay,
        "course": svg,
        "reach": reach,
        "at": lambda over: 50.0 - 48.0 * min(max(over / reach, -1.0), 1.0),
    }
    path = write_page(out, "simulate", to_json(found), [], header)
    (out / "timeline.svg").write_text(svg, encoding="utf-8")
    return path
