"""What a sweep would start, what it leaves out and why, and about how long it takes. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from dynamiccl.collect.benchmark.command import small_bytes
from dynamiccl.collect.benchmark.grid import Grid, deal
from dynamiccl.collect.benchmark.layout import lay_out
from dynamiccl.collect.runner import Launch, LaunchMode, Round
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep.load import Sweep
from dynamiccl.collect.sweep.settings import SweepFile

#: Guesses for the time of a plan, before anything is measured: NCCL starts in seconds on 8 GPUs and
#: in about a minute on 512; a call has a latency and the bandwidth of a middling network.
_START_S: Final = 4.0
_START_S_PER_RANK: Final = 0.11
_LATENCY_US: Final = 50.0
_BYTES_PER_US: Final = 10_000.0
#: Out-of-place and in-place.
_HALVES: Final = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep would do."""

    sweep: str
    system: str
    strategy: str
    trials: int
    feasible: int
    #: Trials left out, by reason.
    infeasible: dict[str, int]
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
    hours: float

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)


def make_plan(sweep: Sweep) -> Plan:
    """Plan a sweep as if the plugin could play schedules and each round were like the first."""
    file = sweep.file
    strategy = make_strategy(file, sweep.trials)
    picks = tuple(
        pick for pick in strategy.next_picks(0, ()) or () if pick.trial.infeasible is None
    )
    first = Round(0, picks)
    reasons = Counter(t.infeasible for t in sweep.trials if t.infeasible is not None)
    rounds = file.strategy.max_rounds if file.strategy.kind == "adaptive" else file.cycles
    plays = file.runner.mode != "processes"
    launches = _launches(first, file, plays=plays)
    single = _launches(first, file, plays=False)
    total, total_single = _over(launches, rounds), _over(single, rounds)
    seconds = sum(
        _seconds(part, file) * (1 if part.launch.mode is LaunchMode.READ_BACK else rounds)
        for part in launches
    )
    return Plan(
        sweep=file.name,
        system=file.system,
        strategy=file.strategy.kind,
        trials=len(sweep.trials),
        feasible=len(sweep.trials) - reasons.total(),
        infeasible={str(reason): count for reason, count in sorted(reasons.items())},
        rounds=rounds,
        # A strategy picks what cannot run once, so that it becomes a row.
        measurements=max(0, strategy.expected_picks() - reasons.total()),
        launches=total,
        launches_timed=rounds * _count(launches, LaunchMode.SWEEP, LaunchMode.FORCED),
        launches_reference=rounds * _count(launches, LaunchMode.REFERENCE),
        launches_read_back=_count(launches, LaunchMode.READ_BACK),
        launches_one_per_config=total_single,
        launches_saved_ratio=round(total_single / total, 2) if total else 1.0,
        hours=round(seconds / 3600, 2),
    )


def plan_lines(plan: Plan) -> list[str]:
    """A plan in a few lines for people."""
    rounds = "at most " if plan.strategy == "adaptive" else ""
    return [
        f"sweep {plan.sweep} on {plan.system}: {plan.feasible} feasible trials of {plan.trials}, "
        f"{plan.strategy}, {rounds}{plan.rounds} rounds, about {plan.measurements} measurements",
        f"{plan.launches} processes: {plan.launches_timed} timed, {plan.launches_reference} for "
        f"NCCL's untouched default, {plan.launches_read_back} to read back what runs; one process "
        f"for each config would be {plan.launches_one_per_config} "
        f"({plan.launches_saved_ratio:g} times as many)",
        f"about {plan.hours:g} hours (a guess: {_START_S:g} s and {_START_S_PER_RANK:g} s a rank "
        f"for each start, {_LATENCY_US:g} us and {_BYTES_PER_US / 1000:g} GB/s for each call)",
    ]


@dataclass(frozen=True, slots=True)
class _Process:
    """One process, and what it walks."""

    launch: Launch
    grid: Grid


def _launches(first: Round, file: SweepFile, *, plays: bool) -> tuple[_Process, ...]:
    read_back = file.runner.read_back
    laid_out = lay_out(
        first,
        plays_schedules=plays,
        must_read_back=lambda _: read_back,
        small_bytes=small_bytes(file),
    )
    return tuple(process for launch in laid_out for process in _processes(launch, file))


def _processes(launch: Launch, file: SweepFile) -> Iterator[_Process]:
    """A launch, and then those of what its blocks could not hold."""
    while launch.picks:
        grid = deal(launch, max_blocks=file.runner.max_blocks)
        yield _Process(launch, grid)
        launch = replace(launch, picks=grid.left_over)


def _over(launches: tuple[_Process, ...], rounds: int) -> int:
    """Launches of all rounds: what runs is read back once."""
    once = _count(launches, LaunchMode.READ_BACK)
    return once + (len(launches) - once) * rounds


def _count(launches: tuple[_Process, ...], *modes: LaunchMode) -> int:
    return sum(part.launch.mode in modes for part in launches)


def _seconds(part: _Process, file: SweepFile) -> float:
    start_s = _START_S + _START_S_PER_RANK * part.launch.setting.num_ranks
    calls = 1 if part.launch.mode is LaunchMode.READ_BACK else file.iterations + 2
    cycle_us = sum(_LATENCY_US + size / _BYTES_PER_US for size in part.grid.benchmark_bytes)
    return start_s + cycle_us * len(part.grid.cycles) * _HALVES * calls / 1e6
