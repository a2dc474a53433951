"""Strategies: which trials a round measures, as pure functions of what the rounds before brought.

exhaustive   the whole grid in each cycle
random       a fresh uniform share of every task's configs in each cycle
adaptive     what the belief (`dynamiccl/belief.py`) finds most worth a measurement, by the costs,
             too, that NCCL logged in the first round

All measure NCCL's default in each round of a task, adaptive once and the others twice. Adaptive's
round is SLOTS slots of each setting that is in doubt: the task and config that are worth most for
what they take, as if those before had brought what is expected. Of a slot's task it draws, with
replacement,

    q(config) = (1 - epsilon) [it is the one that is worth most] + epsilon / number of configs
"""

import hashlib
import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import polars as pl

from dynamiccl.belief import Belief, Bools, doubted, prior_of
from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.schedule import grouped
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.datasets.cells import is_unwell
from dynamiccl.datasets.costs import COST_KEY, COST_TYPES, NUM_CELLS, log_costs, read_costs
from dynamiccl.datasets.schema import Status
from dynamiccl.datasets.store import part_paths
from dynamiccl.drawn_worlds import Floats, Grid
from dynamiccl.errors import DataError
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.repeats import MEDIAN_VARIANCE, NOISE, cells_of

Picks = tuple[Trial, ...]
_log = logging.getLogger(__name__)
_Kind = TypeVar("_Kind", bound=Hashable)
#: Of a setting in a round of adaptive: fewer learn more, but each round is a process at least.
SLOTS: Final = 6
_DRAWS: Final = 400
#: So many failures without a success rule a config out, or its algorithm and protocol.
_RULED_OUT: Final = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy is told of a trial that ran."""

    trial_key: str
    round: int
    #: None where there is no usable time.
    time_us: float | None
    ok: bool
    #: Not there to be measured, which is no failure.
    infeasible: bool = False

    @property
    def failed(self) -> bool:
        """Whether it hung, crashed, or computed wrong values."""
        return not self.ok and not self.infeasible


def outcome_of(trial_key: str, number: int, rows: Sequence[Mapping[str, Any]]) -> Outcome:
    """The outcome, of at least one row: out-of-place time, or none where GPUs were not well."""
    statuses = {row.get("status", Status.OK.value) for row in rows}
    ok = statuses == {Status.OK.value}
    first = next((row for row in rows if not row.get("in_place")), rows[0])
    time_us = first.get("time_us") if ok and not is_unwell(first) else None
    return Outcome(trial_key, number, time_us, ok, statuses == {Status.INFEASIBLE.value})


@dataclass(frozen=True, slots=True)
class TaskTrials:
    """The trials that compete for one (setting, size)."""

    setting: Setting
    size_bytes: int
    default: Trial | None
    candidates: tuple[Trial, ...]

    @property
    def key(self) -> str:
        """A stable name."""
        return f"{self.setting.key}:{self.size_bytes}"

    def default_pair(self) -> tuple[Trial, ...]:
        """The default twice, from which the noise is estimated."""
        return () if self.default is None else (self.default, replace(self.default, repeat=1))


Tasks = Mapping[Setting, Sequence[TaskTrials]]
#: (S, 21) ln us that NCCL's own model gives its cells at sizes of a setting; NaN where not known.
Costs = Callable[[Setting, Sequence[int]], Floats]


def tasks_of(trials: Sequence[Trial]) -> Tasks:
    """Tasks by setting, in declaration order; without a feasible trial there is none."""
    feasible = grouped((one for one in trials if one.infeasible is None), lambda one: one.task)
    tasks: dict[Setting, list[TaskTrials]] = defaultdict(list)
    for (setting, size_bytes), found in sorted(feasible.items(), key=lambda one: one[0][1]):
        default = next((trial for trial in found if trial.config == ABSTAIN), None)
        forced = tuple(trial for trial in found if trial.config != ABSTAIN)
        tasks[setting].append(TaskTrials(setting, size_bytes, default, forced))
    return tasks


def seed_of(*words: str | int) -> int:
    """A 64-bit seed, the same on every machine."""
    digest = hashlib.sha256("|".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


class Cycles:
    """The grid, or a share of each task's configs, in each cycle."""

    def __init__(self, file: SweepFile, trials: Sequence[Trial]) -> None:
        self._cycles, self._seed = file.cycles, (file.name, file.strategy.seed)
        self._share = file.strategy.share if file.strategy.kind == "random" else None
        self._repeats = range(file.strategy.repeats)
        # Once, so that they become rows with a reason.
        self._infeasible = [trial for trial in trials if trial.infeasible is not None]
        self._tasks = [task for each in tasks_of(trials).values() for task in each]

    def next_picks(self, number: int, history: Sequence[Outcome]) -> Picks | None:  # noqa: ARG002
        """This cycle's picks; None after the last."""
        if number >= self._cycles:
            return None
        picks = [pick for task in self._tasks for pick in self._picks(task, number)]
        random.Random(seed_of(*self._seed, number)).shuffle(picks)
        return (*(() if number else self._infeasible), *picks)

    def expected_picks(self) -> int:
        """The exact number."""
        in_cycle = sum(len(self._picks(task, 0)) for task in self._tasks)
        return len(self._infeasible) + self._cycles * in_cycle

    def _picks(self, task: TaskTrials, number: int) -> Picks:
        drawn = task.candidates
        if self._share is not None and drawn:
            generator = random.Random(seed_of(*self._seed, number, task.key))
            some = generator.sample(drawn, math.ceil(self._share * len(drawn) - 1e-9))
            # Drawn without replacement; the probability is that of any one draw.
            drawn = tuple(replace(trial, probability=1 / len(drawn)) for trial in some)
        again = (replace(trial, repeat=repeat) for trial in drawn for repeat in self._repeats)
        return (*task.default_pair(), *again)


class _Slot(NamedTuple):
    task: TaskTrials
    trials: Sequence[Trial]
    #: (k,) of the trials.
    odds: Floats
    #: Ln of time that a measurement saves, over the setting's sizes: first what a short budget has.
    worth: float


class Adaptive:
    """Measures what is worth most until all is certain, or rounds or budget are spent."""

    def __init__(
        self, file: SweepFile, trials: Sequence[Trial], costs: Costs | None = None
    ) -> None:
        self._costs = costs
        self._settings, self._seed = file.strategy, (file.name, file.strategy.seed)
        self._budget = file.budget.max_measurements or math.inf
        self._infeasible = [trial for trial in trials if trial.infeasible is not None]
        self._tasks = tasks_of(trials)
        tasks = [task for members in self._tasks.values() for task in members]
        #: NCCL's default where there is nothing to compare with.
        self._alone = [p for task in tasks if not task.candidates for p in task.default_pair()]

    def next_picks(self, number: int, history: Sequence[Outcome]) -> Picks | None:
        """This round's draws; None when all is certain, or spent."""
        if number >= self._settings.max_rounds:
            return None
        before = [outcome for outcome in history if outcome.round < number]
        left = self._budget - sum(not outcome.infeasible for outcome in before)
        taken: dict[str, list[_Slot]] = {}
        for slot in sorted(self._slots(number, before), key=lambda slot: -slot.worth):
            cost = 1 if slot.task.key in taken else 2
            if cost <= left:
                taken.setdefault(slot.task.key, []).append(slot)
                left -= cost
        picks = [pick for slots in taken.values() for pick in self._draw(slots, number)]
        if number:
            return tuple(picks) or None
        alone = self._alone[: int(min(left, len(self._alone)))]
        return (*self._infeasible, *picks, *alone) or None

    def expected_picks(self) -> int:
        """An upper bound, but for what fills the gaps of a process's sizes."""
        live = sum(any(task.candidates for task in members) for members in self._tasks.values())
        total = len(self._alone) + live * self._settings.max_rounds * SLOTS * 2
        return len(self._infeasible) + int(min(total, self._budget))

    def _draw(self, slots: Sequence[_Slot], number: int) -> Iterator[Trial]:
        """The picks of a task."""
        generator = np.random.default_rng(seed_of(*self._seed, number, slots[0].task.key))
        yield from slots[0].task.default_pair()[:1]
        repeats = Counter[int]()
        for slot in slots:
            index = int(generator.choice(len(slot.trials), p=slot.odds))
            trial, probability = slot.trials[index], float(slot.odds[index])
            yield replace(trial, repeat=repeats[index], probability=probability)
            repeats[index] += 1

    def _slots(self, number: int, before: Sequence[Outcome]) -> Iterator[_Slot]:
        epsilon = self._settings.epsilon
        for setting, members in self._tasks.items():
            # NCCL logs its costs in the first round.
            found = believe(members, before, self._costs if number else None)
            random = np.random.default_rng(seed_of(*self._seed, number, setting.key))
            if self._is_sure(found, random):
                continue
            least = math.inf
            for place, worth in found.belief.most_worth(SLOTS, found.noise, random):
                # A slot counts on those before it.
                least = min(least, worth)
                size, best = divmod(place, found.allowed.shape[1])
                actions = np.flatnonzero(found.allowed[size])[1:]
                odds = (1.0 - epsilon) * (actions == best) + epsilon / len(actions)
                trials = [found.trials[size, action] for action in actions.tolist()]
                yield _Slot(members[size], trials, odds / odds.sum(), least)

    def _is_sure(self, found: "Believed", random: np.random.Generator) -> bool:
        confidence, tolerance = self._settings.confidence, self._settings.tolerance
        regret = found.regret(random)
        is_sure = (regret <= tolerance).mean(axis=0) >= confidence
        return bool((is_sure | (regret.mean(axis=0) < tolerance)).all())


#: Pure functions of the outcomes of earlier rounds, in any order, and of `costs`.
Strategy = Cycles | Adaptive


def make_strategy(file: SweepFile, trials: Sequence[Trial], costs: Costs | None = None) -> Strategy:
    """The file's strategy, seeded by its name and seed; adaptive asks for NCCL's costs."""
    if file.strategy.kind == "adaptive":
        return Adaptive(file, trials, costs)
    return Cycles(file, trials)


def logged_costs(file: SweepFile, out: Path) -> Costs:
    """NCCL's costs as this data set has them by then; none, and a warning, where one is damaged."""

    @lru_cache(maxsize=1)
    def read(_: tuple[Path, ...]) -> pl.DataFrame:
        try:
            return read_costs(out)
        except DataError as error:  # a sweep goes on without them
            _log.warning("adaptive goes on without NCCL's costs: %s", error)
            return pl.DataFrame(schema=COST_TYPES)

    def found(setting: Setting, sizes_bytes: Sequence[int]) -> Floats:
        costs = read(tuple(part_paths(out, "costs"))).filter(
            system=file.system,
            num_nodes=setting.num_nodes,
            ranks_per_node=setting.ranks_per_node,
            launch_profile=setting.profile.name,
            collective=setting.collective.wire,
        )
        key = costs.select(COST_KEY).unique()
        if key.height != 1:  # none, or of several versions of NCCL
            return np.full((len(sizes_bytes), NUM_CELLS), np.nan)
        sizes = pl.DataFrame({"size_bytes": sizes_bytes})
        return log_costs(key.join(sizes, how="cross"), costs)

    return found


def _subspace(config: Config) -> tuple[Algorithm | None, Protocol | None]:
    return config.algorithm, config.protocol


def _ruled_out(failures: Counter[_Kind], worked: Set[_Kind]) -> set[_Kind]:
    return {kind for kind, count in failures.items() if count >= _RULED_OUT} - worked


class Believed(NamedTuple):
    """What is believed of S tasks and A configs, NCCL's default the first."""

    belief: Belief
    #: By (task, config).
    trials: Mapping[tuple[int, int], Trial]
    #: (S, A) may be chosen; nothing where the default failed.
    allowed: Bools
    #: Variance of a single log time.
    noise: float

    def regret(self, random: np.random.Generator) -> Floats:
        """(draws, S) log time of what a table would take now over the best."""
        gains = np.where(self.allowed, self.belief.draws(_DRAWS, random), 0.0)
        decided = self.belief.decide()[None, :, None]
        own = np.take_along_axis(gains, decided, axis=2)[..., 0]
        return np.asarray(gains.max(axis=2) - own)


def believe(
    tasks: Sequence[TaskTrials], history: Sequence[Outcome], costs: Costs | None = None
) -> Believed:
    """The belief about a setting, by NCCL's costs where they are known."""
    configs = (ABSTAIN, *dict.fromkeys(t.config for task in tasks for t in task.candidates))
    number = {config: action for action, config in enumerate(configs)}
    trials = {
        (size, number[trial.config]): trial
        for size, task in enumerate(tasks)
        for trial in (task.default, *task.candidates)
        if trial is not None
    }
    times: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for outcome in sorted(history, key=lambda one: (one.round, one.time_us or 0.0)):
        time_us = outcome.time_us
        if outcome.ok and time_us is not None and math.isfinite(time_us) and time_us > 0:
            times[outcome.trial_key].append((outcome.round, math.log(time_us)))
    sizes_bytes = [task.setting.benchmark_bytes(task.size_bytes) for task in tasks]
    log2_sizes = tuple(math.log2(max(size_bytes, 1)) for size_bytes in sizes_bytes)
    defaults = ["" if task.default is None else task.default.key for task in tasks]
    of_size: dict[Hashable, float] = {t.key: log2_sizes[size] for (size, _), t in trials.items()}
    cells = cells_of(times, of_size, defaults)
    seen = {place: cells[trial.key] for place, trial in trials.items() if trial.key in cells}
    places = np.array([size * len(configs) + action for size, action in seen], dtype=np.int64)
    log_us, variance, repeats = np.array([*seen.values()]).reshape(-1, 3).T
    grid = Grid(log2_sizes, configs)
    if costs is not None:
        grid = grid.with_costs(costs(tasks[0].setting, sizes_bytes))
    prior = prior_of(grid)
    doubtful = doubted(prior, places, log_us, variance, repeats)
    failed = {outcome.trial_key for outcome in history if not outcome.ok}
    failures = Counter(trial.config for trial in trials.values() if trial.key in failed)
    worked = {trial.config for trial in trials.values() if trial.key in cells}
    out = _ruled_out(failures, worked)
    # Of an algorithm and protocol so many configs must fail: it may be that many channels do.
    of_both = _ruled_out(Counter(map(_subspace, failures)), set(map(_subspace, worked)))
    allowed = np.zeros((len(tasks), len(configs)), dtype=np.bool_)
    for place, trial in trials.items():
        is_out = trial.config in out or _subspace(trial.config) in of_both
        allowed[place] = not is_out and trial.key not in failed
    allowed &= allowed[:, :1]
    bad = {outcome.trial_key for outcome in history if outcome.failed}
    first = {number[t.config]: size for (size, _), t in reversed(trials.items()) if t.key in bad}
    for action, size in first.items():
        allowed[size:, action] &= action == 0
    belief = Belief(prior, places, log_us, doubtful, allowed=allowed)
    # A median of three or more is not as sure as their mean (`repeats.cell_of`).
    single = variance * repeats / np.where(repeats > 2, MEDIAN_VARIANCE, 1.0)
    noise = float(np.median(single)) if len(places) else NOISE**2
    return Believed(belief, trials, allowed, noise)
