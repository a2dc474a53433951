"""Compares policies by total true communication time, with intervals over seeds."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from dynamiccl.evaluate.simulate.lineup import NCCL, ORACLES, Contender, Setting
from dynamiccl.evaluate.simulate.rollout import Timeline, Totals, roll_out
from dynamiccl.train.study import student_interval

#: Share of calls slower than NCCL's own choice above which verdicts mention it.
_WORTH_SAYING: Final = 0.05


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its 95 % interval; None of a single seed."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Mean and Student's interval."""
        return cls(float(np.mean(values)), *student_interval(values))

    def text(self, spec: str = ".2%") -> str:
        """The estimate as text."""
        if self.low is None or self.high is None:
            return f"{self.mean:{spec}}"
        return f"{self.mean:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


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
    #: Time / oracle - 1.
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

    def write(self, path: Path) -> None:
        """Write the JSON."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


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
        seconds=Estimate.of(spent),
        over_default=over(lambda t: t.total_us),
        job_over_default=over(lambda t: t.job_us),
        regret=Estimate.of([t.total_us.sum() / t.oracle_us.sum() - 1 for t in totals]),
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
    """Sentences: which row is fastest but the oracle, and which lose to NCCL."""
    others = [row for row in rows if row.name not in ORACLES]
    if not others:
        return []
    best, more = over_best(rows)
    lines = [f"{best} spends least time of all that do not know the state"]
    for place, (name, ratio) in enumerate(more.items()):
        if ratio.low is not None and ratio.low <= 0.0:
            lines.append(f"{name} cannot be told from {best}: {ratio.text()} more time")
        elif place == 0:
            lines.append(f"{name} comes next: {ratio.text()} more time")
    for row in others:
        over = row.over_default
        if row.name != NCCL and over.low is not None and over.low > 0.0:
            lines.append(f"{row.name} is slower than NCCL's own choice: {over.text()}")
        if row.share_slower_than_default > _WORTH_SAYING:
            share = f"{row.share_slower_than_default:.0%}"
            lines.append(f"{row.name} is slower than NCCL's own choice in {share} of calls")
    return lines
