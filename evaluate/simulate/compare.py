"""Compares policies by total true communication time, with intervals over seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

import numpy as np

from dynamiccl.evaluate.simulate.lineup import NCCL, ORACLE, ORACLES, SIMPLE, Contender, Setting
from dynamiccl.evaluate.simulate.rollout import Timeline, Totals, roll_out
from dynamiccl.train.study import student_interval

#: Share of calls slower than NCCL's own choice above which verdicts mention it.
_WORTH_SAYING: Final = 0.05
#: A gain of the oracle that would be something; below it there is nothing to gain.
_WORTH_GAINING: Final = 0.03


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

    def text(self, spec: str = ".2%") -> str:
        """The estimate as text."""
        if self.low is None or self.high is None:
            return f"{self.mean:{spec}}"
        return f"{self.mean:{spec}} ({self.low:{spec}} to {self.high:{spec}})"

    def percent_text(self) -> str:
        """A fraction in per cent with its sign, for a narrow table."""
        scaled = [None if v is None else 100 * v for v in (self.mean, self.low, self.high)]
        return Estimate(scaled[0] or 0.0, scaled[1], scaled[2]).text("+.1f")


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one policy: shares are fractions, times true and with config changes."""

    name: str
    #: Total time of one job's calls.
    seconds: Estimate
    #: Time / NCCL's own choice - 1; below 0 is faster.
    over_default: Estimate
    #: The same for whole jobs, compute included.
    job_over_default: Estimate
    #: Time / fastest config of each call - 1, where changes cost nothing. The oracle's own row is
    #: above 0: it pays for its changes.
    regret: Estimate
    changes_per_1000_calls: float
    share_slower_than_default: float
    alarms_per_1e5_calls: float
    #: Total time of each seed, s; rows are compared seed by seed.
    seed_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `dynamiccl-evaluate simulate`."""

    system: str
    workload: str
    scenario: str
    calls: int
    jobs: int
    seeds: int
    rows: list[Row]
    verdicts: list[str]
    #: The first job of the first seed, by row.
    timelines: Mapping[str, Timeline] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Everything but the timelines."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        del plain["timelines"]
        return plain | {"rows": [asdict(row) for row in self.rows]}


@dataclass(frozen=True, slots=True)
class Played:
    """Results of rows for each seed, and the first seed's timeline."""

    totals: dict[str, list[Totals]]
    timelines: dict[str, Timeline]

    def add(self, other: "Played") -> None:
        """Add results of the same rows with other seeds."""
        for name, totals in other.totals.items():
            self.totals.setdefault(name, []).extend(totals)
            self.timelines.setdefault(name, other.timelines[name])


def play(
    setting: Setting,
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    progress: Callable[[int], None] | None = None,
) -> Played:
    """Simulate every contender with every seed; `progress` is called with numbers of calls."""
    played = Played({}, {})
    for contender in contenders:
        for seed in seeds:
            env, player = contender.prepare(setting, seed)
            total, timeline = roll_out(env, player, seed=seed, progress=progress)
            played.add(Played({contender.name: [total]}, {contender.name: timeline}))
    return played


def conclude(setting: Setting, played: Played) -> Comparison:
    """Metrics and verdicts.

    Raises KeyError unless one of the rows is NCCL's own choice.
    """
    default = played.totals[NCCL]
    rows = [make_row(name, totals, default) for name, totals in played.totals.items()]
    return Comparison(
        system=setting.system.name,
        workload=setting.workload.name,
        scenario=setting.scenario.meaning,
        calls=setting.calls,
        jobs=setting.jobs,
        seeds=len(default),
        rows=rows,
        verdicts=verdicts(rows),
        timelines=played.timelines,
    )


def make_row(name: str, totals: Sequence[Totals], default: Sequence[Totals]) -> Row:
    """The metrics of a contender; `default` are the totals of NCCL's choice, by seed."""
    calls = sum(each.calls * len(each.total_us) for each in totals)

    def share(what: Callable[[Totals], float]) -> float:
        return sum(what(each) for each in totals) / calls

    spent = tuple(float(each.total_us.mean()) / 1e6 for each in totals)

    def over(time_of: Callable[[Totals], Any]) -> Estimate:
        pairs = zip(totals, default, strict=True)
        return Estimate.of([time_of(a).sum() / time_of(b).sum() - 1 for a, b in pairs])

    return Row(
        name=name,
        seconds=Estimate.of(spent, least=0.0),
        over_default=over(lambda t: t.total_us),
        job_over_default=over(lambda t: t.job_us),
        regret=Estimate.of([t.total_us.sum() / t.oracle_us.sum() - 1 for t in totals], 0.0),
        changes_per_1000_calls=1e3 * share(lambda t: t.changes.sum()),
        share_slower_than_default=share(lambda t: t.slower.sum()),
        alarms_per_1e5_calls=1e5 * share(lambda t: t.alarms.sum()),
        seed_seconds=spent,
    )


def over_best(rows: Sequence[Row]) -> tuple[str, dict[str, Estimate]]:
    """The fastest row that does not know the network state, and the others' excess time.

    Fractions, compared seed by seed; the next best first. Raises ValueError without any row.
    """
    best, *rest = sorted(
        (row for row in rows if row.name not in ORACLES), key=lambda row: row.seconds.mean
    )
    return best.name, {
        row.name: Estimate.of(
            [a / b - 1 for a, b in zip(row.seed_seconds, best.seed_seconds, strict=True)]
        )
        for row in rest
    }


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Plain sentences: first who gains how much over NCCL, then the best, ties and losses."""
    others = [row for row in rows if row.name not in {*ORACLES, NCCL}]
    ours = [row for row in others if row.name not in SIMPLE]
    lines = _first_lines(rows, ours or others)
    best, more = over_best(rows)
    if best != NCCL and best not in {row.name for row in ours}:
        found = next(row for row in rows if row.name == best)
        lines.append(f"{best} spends least time: {_against_nccl(found)}.")
    ties = [
        name
        for name, ratio in more.items()
        if ratio.low is not None and ratio.low <= 0.0 and name != NCCL
    ]
    if ties and best != NCCL:
        lines.append(f"Cannot be told from {best}: {', '.join(ties)}.")
    for row in others:
        share = row.share_slower_than_default
        if _sign(row) > 0 and row not in ours:
            lines.append(f"{row.name} {_against_nccl(row)}.")
        if share > _WORTH_SAYING:
            lines.append(f"{row.name} is slower than NCCL's own choice in {share:.0%} of calls.")
    return lines


def _first_lines(rows: Sequence[Row], shown: Sequence[Row]) -> list[str]:
    """A sentence a policy, or of the best row without one; or that nothing can be gained."""
    by_name = {row.name: row for row in rows}
    rivals = [row for row in rows if row.name not in {*ORACLES, NCCL}]
    if not any(_sign(row) < 0 for row in rivals):
        lead = _no_gain(by_name.get(ORACLE))
        told = [f"{row.name} {_against_nccl(row)}." for row in shown if row.name not in SIMPLE]
        return [lead, *told]
    if all(row.name in SIMPLE for row in shown):
        shown = [min(shown, key=lambda row: row.over_default.mean)]
    return [f"{row.name} {_against_nccl(row)}." for row in shown]


def _no_gain(oracle: Row | None) -> str:
    """What to say where nobody is faster than NCCL's own choice."""
    if oracle is None:
        return "No row is faster than NCCL's own choice here."
    known = f"the oracle, which knows the network's state, {_against_nccl(oracle)}"
    if _sign(oracle) < 0:
        return f"No row is faster than NCCL's own choice here, though {known}."
    over = oracle.over_default
    if (over.mean if over.low is None else over.low) < -_WORTH_GAINING:
        return f"No gain over NCCL's own choice is shown: {known}; more --seeds narrow this."
    return f"There is nothing to gain over NCCL's own choice here: {known}."


def _sign(row: Row) -> int:
    """-1: faster than NCCL's own choice, 1: slower, 0: cannot be told. Of one seed: as it came."""
    over = row.over_default
    low, high = (over.mean, over.mean) if over.low is None else (over.low, over.high or 0.0)
    return -1 if high < 0.0 else 1 if low > 0.0 else 0


def _against_nccl(row: Row) -> str:
    """How much communication time a row takes less or more than NCCL's own choice."""
    over = row.over_default
    sign = _sign(row)
    if sign == 0:
        interval = "" if over.low is None else f" ({over.low:+.1%} to {over.high:+.1%})"
        return f"cannot be told from NCCL's own choice{interval}"
    ends = [end for end in (over.low, over.high) if end is not None]
    low, high = (f"{abs(end):.1%}" for end in sorted(ends, key=abs)) if ends else ("", "")
    interval = f" (95 % interval {low} to {high})" if ends else " (one seed, no interval)"
    word = "less" if sign < 0 else "MORE"
    return f"takes {abs(over.mean):.1%} {word} communication time than NCCL's own choice{interval}"
