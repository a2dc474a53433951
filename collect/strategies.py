"""Strategies: which trials a round measures, as pure functions of what the rounds before brought.

exhaustive   the whole grid in each cycle
random       a fresh uniform share of every task's configs in each cycle
adaptive     where it is in doubt which config is best

All measure NCCL's default twice in each round of a task. Adaptive spreads the slots of round 0 over
(algorithm, protocol) subspaces, so that neighbouring sizes see different ones; then the belief
(`dynamiccl/belief.py`) says what each decision may cost. A slot is a draw with replacement, of

    q(config) = (1 - epsilon) policy(config) + epsilon / number of configs
"""

import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np

from dynamiccl.belief import Belief, Bools, doubted, prior_of
from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.schedule import grouped
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.datasets.cells import is_unwell
from dynamiccl.datasets.schema import Status
from dynamiccl.drawn_worlds import Floats, Grid, Ints
from dynamiccl.nccl import ABSTAIN
from dynamiccl.repeats import cells_of

Picks = tuple[Trial, ...]
#: Octaves of round 0 in which each subspace is seen once.
_FIRST_OCTAVES: Final = 1.5
_DRAWS: Final = 400
#: A policy's share for the config believed fastest.
_OF_LEADER: Final = 0.1
#: So many failures without a success rule a subspace out.
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


class _Slots(NamedTuple):
    task: TaskTrials
    trials: Sequence[Trial]
    #: Shape (slots, k).
    odds: Floats
    #: What an undecided task may cost, a share of the time: where a short budget goes first.
    doubt: float

    def cost(self) -> int:
        return len(self.odds) + len(self.task.default_pair())


class Adaptive:
    """Measures uncertain tasks until rounds or budget are spent."""

    def __init__(self, file: SweepFile, trials: Sequence[Trial]) -> None:
        self._settings, self._seed = file.strategy, (file.name, file.strategy.seed)
        self._budget = file.budget.max_measurements or math.inf
        self._infeasible = [trial for trial in trials if trial.infeasible is not None]
        self._tasks = tasks_of(trials)

    def next_picks(self, number: int, history: Sequence[Outcome]) -> Picks | None:
        """This round's draws; None when all is certain, or spent."""
        if number >= self._settings.max_rounds:
            return None
        before = [outcome for outcome in history if outcome.round < number]
        slots = list(self._later(number, before) if number else self._first())
        left = self._budget - sum(not outcome.infeasible for outcome in before)
        order = sorted(range(len(slots)), key=lambda index: -slots[index].doubt)
        costs = accumulate(slots[index].cost() for index in order)
        taken = {index for index, cost in zip(order, costs, strict=True) if cost <= left}
        picks = [p for i, each in enumerate(slots) if i in taken for p in self._draw(each, number)]
        return (*(() if number else self._infeasible), *picks) or None

    def expected_picks(self) -> int:
        """An upper bound; most sweeps end much earlier."""
        total = sum(slots.cost() for slots in self._first())
        for members in self._tasks.values():
            live = [task for task in members if task.candidates]
            in_round = sum(len(task.default_pair()) + later_slots(members) for task in live)
            total += in_round * (self._settings.max_rounds - 1)
        return len(self._infeasible) + int(min(total, self._budget))

    def _draw(self, slots: _Slots, number: int) -> Iterator[Trial]:
        generator = np.random.default_rng(seed_of(*self._seed, number, slots.task.key))
        yield from slots.task.default_pair()
        repeats = Counter[int]()
        for odds in slots.odds:
            index = int(generator.choice(len(slots.trials), p=odds))
            trial, probability = slots.trials[index], float(odds[index])
            yield replace(trial, repeat=repeats[index], probability=probability)
            repeats[index] += 1

    def _explored(self, policy: Floats) -> Floats:
        epsilon = self._settings.epsilon
        mixed = (1.0 - epsilon) * policy + epsilon / max(policy.shape[-1], 1)
        result: Floats = mixed / mixed.sum(axis=-1, keepdims=True)
        return result

    def _first(self) -> Iterator[_Slots]:
        for members in self._tasks.values():
            for task, policy in zip(members, first_policies(members), strict=True):
                # A budget too short for all takes some of all sizes.
                doubt = seed_of(self._seed[0], task.key) / 2**64
                yield _Slots(task, task.candidates, self._explored(policy), doubt)

    def _later(self, number: int, before: Sequence[Outcome]) -> Iterator[_Slots]:
        confidence, tolerance = self._settings.confidence, self._settings.tolerance
        for setting, members in self._tasks.items():
            slots, found = later_slots(members), believe(members, before)
            seed = seed_of(*self._seed, number, setting.key)
            lost = found.lost(np.random.default_rng(seed))
            regret = lost.max(axis=2)
            is_sure = (regret <= tolerance).mean(axis=0) >= confidence
            is_sure |= regret.mean(axis=0) < tolerance
            for size in np.flatnonzero(~is_sure).tolist():
                actions = np.flatnonzero(found.allowed[size])[1:].tolist()
                trials = [found.trials[size, action] for action in actions]
                policy = found.policy(size, lost[:, size])[actions]
                odds = np.tile(self._explored(policy), (slots, 1))
                yield _Slots(members[size], trials, odds, float(regret[:, size].mean()))


#: Pure functions of the outcomes of earlier rounds, in any order.
Strategy = Cycles | Adaptive


def make_strategy(file: SweepFile, trials: Sequence[Trial]) -> Strategy:
    """The file's strategy, seeded by its name and seed."""
    return (Adaptive if file.strategy.kind == "adaptive" else Cycles)(file, trials)


def first_policies(tasks: Sequence[TaskTrials]) -> list[Floats]:
    """Round 0 of a setting: for each task (slots, k), each slot uniform over a subspace."""
    kinds = [[_subspace(trial) for trial in task.candidates] for task in tasks]
    most = max(len(set(kind)) for kind in kinds)
    log2_sizes = [math.log2(task.size_bytes) for task in tasks]
    step = (max(log2_sizes) - min(log2_sizes)) / max(len(tasks) - 1, 1) or _FIRST_OCTAVES
    slots = max(math.ceil(most * min(step / _FIRST_OCTAVES, 1.0)), math.ceil(most / len(tasks)))
    policies = []
    for number, kind in enumerate(kinds):
        names = list(dict.fromkeys(kind))
        rows = np.zeros((slots if names else 0, len(kind)))
        for slot, row in enumerate(rows):
            name = names[(number * slots + slot) % len(names)]
            row[:] = [float(one == name) / kind.count(name) for one in kind]
        policies.append(rows)
    return policies


def later_slots(tasks: Sequence[TaskTrials]) -> int:
    """Slots of an uncertain task after round 0: small steps learn more, but each costs a pair."""
    most = max(len(task.candidates) for task in tasks)
    return min(max(math.ceil(most / 10), 1), 3)


def _subspace(trial: Trial) -> tuple[object, object]:
    return trial.config.algorithm, trial.config.protocol


class Believed(NamedTuple):
    """What is believed of S tasks and A configs, NCCL's default the first."""

    belief: Belief
    #: By (task, config).
    trials: Mapping[tuple[int, int], Trial]
    #: (S, A) may be chosen; nothing where the default failed.
    allowed: Bools
    #: (S,) the config that a table would have now.
    decided: Ints

    def lost(self, random: np.random.Generator) -> Floats:
        """(draws, S, A) log time of the decision over each config's; 0 if no slower."""
        gains = self.belief.draws(_DRAWS, random)
        own = np.take_along_axis(gains, self.decided[None, :, None], axis=2)
        found: Floats = np.where(self.allowed, np.maximum(gains - own, 0.0), 0.0)
        return found

    def policy(self, size: int, lost: Floats) -> Floats:
        """(A,) of a task: a tenth for the leader, the rest by what is lost (draws, A)."""
        others = self.allowed[size].copy()
        others[0] = False
        leader = np.where(others, self.belief.gain[size], -np.inf).argmax()
        by_config = np.bincount(lost.argmax(axis=1), lost.max(axis=1), len(others))
        chosen: Floats = (1.0 - _OF_LEADER) * by_config / by_config.sum()
        chosen[leader] += _OF_LEADER
        return chosen


def believe(tasks: Sequence[TaskTrials], history: Sequence[Outcome]) -> Believed:
    """The belief about a setting; one round of a default is no proof: all of it may be slow."""
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
    prior = prior_of(Grid(log2_sizes, configs))
    variance = doubted(prior, places, log_us, variance, repeats)
    failed = {outcome.trial_key for outcome in history if not outcome.ok}
    failures = Counter(_subspace(trial) for trial in trials.values() if trial.key in failed)
    worked = {_subspace(trial) for trial in trials.values() if trial.key in cells}
    allowed = np.zeros((len(tasks), len(configs)), dtype=np.bool_)
    for place, trial in trials.items():
        subspace = _subspace(trial)
        is_possible = subspace in worked or failures[subspace] < _RULED_OUT
        allowed[place] = is_possible and trial.key not in failed
    allowed &= allowed[:, :1]
    belief = Belief(prior, places, log_us, variance, allowed=allowed)
    rounds = [len({each for each, _ in times.get(default, ())}) for default in defaults]
    return Believed(belief, trials, allowed, np.where(np.array(rounds) > 1, belief.decide(), 0))
