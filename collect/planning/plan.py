"""The plan of a sweep: processes, what is left out and why, and hours (pure)."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

from dynamiccl.collect.planning.processes import Cost, Planner, Process
from dynamiccl.collect.planning.times import CallTimes
from dynamiccl.collect.runner import LaunchMode
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.strategies.strategy import Strategy
from dynamiccl.collect.sweep.load import Sweep

#: Lines of the table of what dominates.
_LINES: Final = 5
ADAPTIVE: Final = "adaptive"
_REST: Final = "everything else"


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the hours."""

    what: str
    share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a sweep."""

    sweep: str
    system: str
    strategy: str
    trials: int
    feasible: int
    #: Trials left out, by reason.
    infeasible: dict[str, int]
    #: Trials that can run and are not measured, by reason; by the model where it is about NCCL.
    needless: dict[str, int]
    #: Rounds of an exhaustive or random sweep; the most that an adaptive one may take.
    rounds: int
    #: Measurements in all rounds, NCCL's default included; for adaptive a guess from above.
    measurements: int
    #: Processes that are started: timed ones, those of the reference default, read-backs.
    launches: int
    launches_timed: int
    launches_reference: int
    launches_read_back: int
    #: What one process for each config would start, its own read-backs included.
    launches_one_per_config: int
    launches_saved_ratio: float
    #: Inside processes; of an adaptive sweep the most, which few need.
    hours: float
    #: The same times the ranks of each process.
    gpu_hours: float
    #: What the time goes to, largest first: `what` and its `share` of the hours.
    dominates: tuple[Share, ...]
    #: The simulated system whose times were taken.
    model: str
    #: Rules that stood in where it has no time.
    rules: tuple[str, ...]
    #: The sweep file's own limit, of which the hours above know nothing.
    max_hours: float | None

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)


def make_plan(sweep: Sweep) -> Plan:
    """Plan a sweep as if the plugin could play schedules and each round were like the first."""
    times = CallTimes(sweep.file.simulator.system)
    first = _FirstRound(sweep, times)
    file, processes = sweep.file, first.processes
    reasons = Counter(t.infeasible for t in sweep.trials if t.infeasible is not None)
    is_adaptive = file.strategy.kind == ADAPTIVE
    single = first.planner.processes(first.picks, must_read_back=lambda _: True, plays=False)
    total, total_single = _over(processes, first.rounds), _over(single, first.rounds)
    cost = first.cost()
    if is_adaptive and first.picks:
        # Later rounds are smaller than the first.
        shares = first.strategy.expected_picks() / (first.rounds * len(first.picks))
        cost = cost.times(min(shares, 1.0))
    return Plan(
        sweep=file.name,
        system=file.system,
        strategy=file.strategy.kind,
        trials=len(sweep.trials),
        feasible=len(sweep.trials) - reasons.total(),
        infeasible={str(reason): count for reason, count in sorted(reasons.items())},
        needless=first.planner.needless(sweep.trials),
        rounds=first.rounds,
        # A strategy picks what cannot run once, so that it becomes a row.
        measurements=max(0, first.strategy.expected_picks() - reasons.total())
        if is_adaptive
        else first.rounds * first.needed,
        launches=total,
        launches_timed=first.rounds * _count(processes, LaunchMode.SWEEP, LaunchMode.FORCED),
        launches_reference=first.rounds * _count(processes, LaunchMode.REFERENCE),
        launches_read_back=_count(processes, LaunchMode.READ_BACK),
        launches_one_per_config=total_single,
        launches_saved_ratio=round(total_single / total, 2) if total else 1.0,
        hours=_hours(cost.total_s),
        gpu_hours=_hours(cost.gpu_seconds),
        dominates=_dominating(cost),
        model=times.system.name,
        rules=tuple(times.notes),
        max_hours=file.budget.max_hours,
    )


class _FirstRound:
    """The first round of a sweep, which stands for all rounds."""

    def __init__(self, sweep: Sweep, times: CallTimes) -> None:
        file = sweep.file
        self.planner = Planner(sweep, times)
        self.strategy: Strategy = make_strategy(file, sweep.trials)
        picks = self.strategy.next_picks(0, ()) or ()
        self.picks = tuple(trial for trial in picks if trial.infeasible is None)
        is_adaptive = file.strategy.kind == ADAPTIVE
        self.rounds = file.strategy.max_rounds if is_adaptive else file.cycles
        self.processes = self.planner.processes(self.picks, must_read_back=lambda _: True)
        self.needed = sum(self.planner.reason_to_skip(trial) is None for trial in self.picks)

    def cost(self) -> Cost:
        """Cost of all rounds; the read-back pass counts once."""
        once = [p for p in self.processes if p.launch.mode is LaunchMode.READ_BACK]
        again = [p for p in self.processes if p.launch.mode is not LaunchMode.READ_BACK]
        return self.planner.cost(once) + self.planner.cost(again).times(self.rounds)


def _dominating(cost: Cost) -> tuple[Share, ...]:
    total_s = cost.total_s
    shares = [Share(what, round(s / total_s, 4)) for what, s in cost.seconds.items() if s > 0]
    shares.sort(key=lambda share: (-share.share, share.what))
    rest = round(sum(share.share for share in shares[_LINES:]), 4)
    return (*shares[:_LINES], *([Share(_REST, rest)] if rest else []))


def _hours(seconds: float) -> float:
    """Hours, to three digits."""
    return float(f"{seconds / 3600:.3g}")


def _over(processes: tuple[Process, ...], rounds: int) -> int:
    """Number of processes in all rounds; the read-back pass counts once."""
    once = _count(processes, LaunchMode.READ_BACK)
    return once + (len(processes) - once) * rounds


def _count(processes: tuple[Process, ...], *modes: LaunchMode) -> int:
    return sum(process.launch.mode in modes for process in processes)
