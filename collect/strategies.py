"""Strategies: which trials a round measures, as pure functions of what the rounds before brought.

exhaustive   the whole grid in each cycle
random       a fresh uniform share of every task's configs in each cycle
adaptive     where it is in doubt which config is best

All measure NCCL's default twice in each round of a task. Adaptive looks everywhere in round 0: the
slots of a task are spread over its (algorithm, protocol) subspaces in turn, so that neighbouring
sizes see different ones. Later `beliefs` says what the decision of each task may cost; tasks whose
decision is sure drop out. Each slot is an independent draw with replacement from

    q(config) = (1 - epsilon) policy(config) + epsilon / number of configs

and q of the drawn config is recorded as its probability.

A belief is a Gaussian process over the log times of a subspace (Rasmussen & Williams 2006, below
R&W), in numpy: each cell has a noise of its own, slow outliers lose their weight, and a login node
needs no further package. Statistics are medians: single calls are slow by a multiple now and then.
"""

import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.datasets.cells import is_unwell
from dynamiccl.datasets.schema import Status
from dynamiccl.nccl import ABSTAIN

Floats = npt.NDArray[np.float64]
Picks = tuple[Trial, ...]
#: (round, log time_us) of a trial, sorted.
Times = Sequence[tuple[int, float]]
#: Standard deviation of normal noise = this times the median of its absolute values.
MAD_TO_SIGMA: Final = 1.4826
#: Variance of the median of n normal values = this / n times theirs (n large).
_MEDIAN_VARIANCE: Final = math.pi / 2
#: Each subspace is seen once in so many octaves of round 0.
_FIRST_OCTAVES: Final = 1.5
#: Share of the policy that repeats the leading config.
_LEADER_SHARE: Final = 0.1
#: Joint draws from the posterior of a task.
_DRAWS: Final = 400
#: All of one round may be slow, and of some sizes only: what one says of the default is no proof.
_LEAST_ROUNDS: Final = 2
#: The leader is the luckiest of many configs, and it is looked at after each round: a single look
#: gets this share of the error that is allowed in all.
_ERROR_SHARE: Final = 0.25
#: So many failures, and no success, rule an (algorithm, protocol) out on this machine.
_FAILURES: Final = 3
#: Rounds of fewer tasks have no drift: their median is no protection against a slow call.
_LEAST_TASKS: Final = 4
#: Drift counts as far as its variance exceeds so many times what noise alone would make of it.
_DRIFT_OVER_NOISE: Final = 2.0
#: Values that each figure of the kernel may take.
_KERNELS: Final = {
    "curve": (0.1, 0.2, 0.4, 0.8),
    "knobs": (0.02, 0.06, 0.15, 0.3, 0.6),
    "size_octaves": (1.0, 2.0, 4.0, 8.0),
    "knob_octaves": (0.7, 1.5, 3.0, 6.0),
    "own": (0.002, 0.01, 0.03, 0.1),
}
#: A time slower than its neighbours say by more than so many standard deviations gets the variance
#: that makes it so many. A fast one is believed: nothing makes a call faster than the machine is.
_DOUBTED_SIGMAS: Final = 2.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy is told of a trial that was picked and ran."""

    trial_key: str
    round: int
    #: None where there is no usable time.
    time_us: float | None
    ok: bool
    #: It is not there to be measured, which is no failure.
    infeasible: bool = False

    @property
    def failed(self) -> bool:
        """Whether it hung, crashed, or computed wrong values."""
        return not self.ok and not self.infeasible


def outcome_of(trial_key: str, number: int, rows: Sequence[Mapping[str, Any]]) -> Outcome:
    """Read the outcome of a trial in round `number` from its rows, of which there is at least one.

    The time is that of the out-of-place half, and none where GPUs were throttled or had memory
    errors; wrong values in any half are a failure.
    """
    statuses = {row.get("status", Status.OK.value) for row in rows}
    ok = statuses == {Status.OK.value}
    first = next((row for row in rows if not row.get("in_place")), rows[0])
    time_us = first.get("time_us") if ok and not is_unwell(first) else None
    return Outcome(trial_key, number, time_us, ok, statuses == {Status.INFEASIBLE.value})


class Strategy(Protocol):
    """Picks trials, round by round."""

    def next_picks(self, number: int, history: Sequence[Outcome]) -> Picks | None:
        """The picks of round `number`, or None when the strategy is done.

        Depends on the outcomes of the rounds before, whatever their order, and on nothing else: an
        interrupted sweep continues exactly.
        """

    def expected_picks(self) -> int:
        """Number of picks in all rounds, or an upper bound."""


def make_strategy(file: SweepFile, trials: Sequence[Trial]) -> Strategy:
    """The strategy named in a sweep file, whose name and seed seed it."""
    return (Adaptive if file.strategy.kind == "adaptive" else Cycles)(file, trials)


@dataclass(frozen=True, slots=True)
class TaskTrials:
    """The trials that compete for one (setting, size)."""

    setting: Setting
    size_bytes: int
    #: NCCL's default; None where the sweep has none that can run.
    default: Trial | None
    #: Feasible forced configs, in declaration order.
    candidates: tuple[Trial, ...]

    @property
    def key(self) -> str:
        """A stable, readable name."""
        return f"{self.setting.key}:{self.size_bytes}"

    def default_pair(self) -> tuple[Trial, ...]:
        """The default twice (an A/A pair), from which the noise is estimated."""
        return () if self.default is None else (self.default, replace(self.default, repeat=1))


#: The tasks of each setting.
Tasks = Mapping[Setting, Sequence[TaskTrials]]


def tasks_of(trials: Sequence[Trial]) -> Tasks:
    """The tasks of a sweep in declaration order; those without a feasible trial are left out."""
    feasible: dict[tuple[Setting, int], list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.infeasible is None:
            feasible[trial.task].append(trial)
    tasks: dict[Setting, list[TaskTrials]] = defaultdict(list)
    for (setting, size_bytes), found in feasible.items():
        default = next((trial for trial in found if trial.config == ABSTAIN), None)
        forced = tuple(trial for trial in found if trial.config != ABSTAIN)
        tasks[setting].append(TaskTrials(setting, size_bytes, default, forced))
    return tasks


def seed_of(*words: str | int) -> int:
    """A 64-bit seed, hashed from the words, the same on every machine."""
    digest = hashlib.sha256("|".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


class Cycles:
    """Exhaustive and random: the grid, or a share of each task's configs, in each cycle.

    A share is drawn without replacement. The probability of its picks is that of any one draw
    taking it, 1 / number of configs, as it is of a slot's config in an adaptive sweep.
    """

    def __init__(self, file: SweepFile, trials: Sequence[Trial]) -> None:
        self._cycles, self._seed = file.cycles, (file.name, file.strategy.seed)
        self._share = file.strategy.share if file.strategy.kind == "random" else None
        # Picked once, so that they become rows with a reason.
        self._infeasible = [trial for trial in trials if trial.infeasible is not None]
        self._tasks = [task for each in tasks_of(trials).values() for task in each]

    def next_picks(self, number: int, history: Sequence[Outcome]) -> Picks | None:  # noqa: ARG002
        """This cycle's picks in its own order; None after the last cycle."""
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
            drawn = tuple(replace(trial, probability=1 / len(drawn)) for trial in some)
        return (*task.default_pair(), *drawn)


class _Slots(NamedTuple):
    """The slots that one task gets in an adaptive round, each with its odds over k trials."""

    task: TaskTrials
    trials: Sequence[Trial]
    #: Shape (slots, k).
    odds: Floats
    #: What an undecided task may cost, as a share of the time: a short budget goes there first.
    doubt: float

    def cost(self) -> int:
        """Number of measurements, the default's included."""
        return len(self.odds) + len(self.task.default_pair())


class Adaptive:
    """Measures uncertain tasks until all are certain, or rounds or budget are spent."""

    def __init__(self, file: SweepFile, trials: Sequence[Trial]) -> None:
        self._settings, self._seed = file.strategy, (file.name, file.strategy.seed)
        self._budget = file.budget.max_measurements or math.inf
        self._infeasible = [trial for trial in trials if trial.infeasible is not None]
        self._tasks = tasks_of(trials)

    def next_picks(self, number: int, history: Sequence[Outcome]) -> Picks | None:
        """This round's draws; None when all tasks are certain, or rounds or budget are spent."""
        if number >= self._settings.max_rounds:
            return None
        before = [outcome for outcome in history if outcome.round < number]
        slots = list(self._later(number, before) if number else self._first())
        # What is not run costs nothing.
        left = self._budget - sum(not outcome.infeasible for outcome in before)
        taken = set()
        for index in sorted(range(len(slots)), key=lambda i: (-slots[i].doubt, i)):
            left -= slots[index].cost()
            if left < 0:
                break
            taken.add(index)
        picks = [p for i, each in enumerate(slots) if i in taken for p in self._draw(each, number)]
        return (*(() if number else self._infeasible), *picks) or None

    def expected_picks(self) -> int:
        """An upper bound over all rounds; most sweeps end much earlier."""
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
        """A policy with uniform exploration mixed in."""
        epsilon = self._settings.epsilon
        mixed = (1.0 - epsilon) * policy + epsilon / max(policy.shape[-1], 1)
        result: Floats = mixed / mixed.sum(axis=-1, keepdims=True)
        return result

    def _first(self) -> Iterator[_Slots]:
        for members in self._tasks.values():
            for task, policy in zip(members, first_policies(members), strict=True):
                # Nothing is known yet: a budget too short for all takes some of all sizes.
                doubt = seed_of(self._seed[0], task.key) / 2**64
                yield _Slots(task, task.candidates, self._explored(policy), doubt)

    def _later(self, number: int, before: Sequence[Outcome]) -> Iterator[_Slots]:
        confidence, tolerance = self._settings.confidence, self._settings.tolerance
        slots = {setting: later_slots(members) for setting, members in self._tasks.items()}
        failed = {outcome.trial_key for outcome in before if not outcome.ok}
        for belief in beliefs(self._tasks, before, seed=seed_of(*self._seed, number)):
            task, doubt = belief.task, math.inf
            if not belief.trials or task.default is None or task.default.key in failed:
                continue
            if belief.is_contested:
                regret = belief.regret_draws(confidence)
                doubt = float(regret.mean())
                if doubt < tolerance or float(np.mean(regret <= tolerance)) >= confidence:
                    continue
            odds = np.tile(self._explored(belief.policy(confidence)), (slots[task.setting], 1))
            yield _Slots(task, belief.trials, odds, doubt)


def first_policies(tasks: Sequence[TaskTrials]) -> list[Floats]:
    """Round 0 of one setting: for each task (slots, k), each slot uniform over a subspace."""
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
    """Slots of each uncertain task of one setting in rounds after the first.

    One for ten configs: many small steps learn more than few large ones, but each costs a pair of
    the default.
    """
    most = max(len(task.candidates) for task in tasks)
    return min(max(math.ceil(most / 10), 1), 3)


def _subspace(trial: Trial) -> tuple[object, object]:
    return trial.config.algorithm, trial.config.protocol


class Cell(NamedTuple):
    """One trial's log times: their median, its variance from noise alone, and how many."""

    log_us: float
    variance: float
    repeats: int
    #: In so many rounds, which are its independent repeats.
    rounds: int


_NO_CELL: Final = Cell(math.nan, math.nan, 0, 0)


@dataclass(frozen=True, slots=True)
class Belief:
    """The posterior over the log times of one task, and the decision that follows from it.

    The decision is what a table would say now: the fastest config that was measured, if it beats
    NCCL's default with the wanted confidence, else ABSTAIN.
    """

    task: TaskTrials
    #: The k candidates of which no attempt failed.
    trials: Sequence[Trial]
    #: Log time_us and its standard deviation (k,), and joint draws, of which the last is the
    #: default's (draws, k + 1).
    mean: Floats
    sigma: Floats
    draws: Floats
    #: Own median of each, NaN without a time (k,).
    observed: Floats
    #: NaN without a time, or where it failed.
    default: Cell

    @property
    def is_contested(self) -> bool:
        """Whether there is a choice: a default with a time, and a config beside it."""
        return bool(self.trials) and not math.isnan(self.default.log_us)

    def leader(self) -> int | None:
        """Index of the measured trial with the smallest posterior mean, or None."""
        return self._fastest(np.isfinite(self.observed))

    def decision(self, confidence: float) -> int | None:
        """Index of the trial to take; None = ABSTAIN, which stands where nothing is sure.

        What neighbours say is not enough: the trial's own times must beat the default too.
        """
        leader = self._fastest(self.observed < self.default.log_us)
        if leader is None or self.default.rounds < _LEAST_ROUNDS:
            return None
        gain = self.default.log_us - float(self.mean[leader])
        spread = math.hypot(math.sqrt(self.default.variance), float(self.sigma[leader]))
        error = 0.5 * math.erfc(gain / (spread * math.sqrt(2.0)))
        sure = error <= (1.0 - confidence) * _ERROR_SHARE
        return leader if gain > 0 and sure else None

    def _fastest(self, among: npt.NDArray[np.bool_]) -> int | None:
        return min(np.flatnonzero(among).tolist(), key=lambda i: float(self.mean[i]), default=None)

    def regret_draws(self, confidence: float) -> Floats:
        """(draws,) log time of the decision over that of the best, default included."""
        index = self.decision(confidence)
        result: Floats = self.draws[:, -1 if index is None else index] - self.draws.min(axis=1)
        return result

    def policy(self, confidence: float) -> Floats:
        """(k,) probabilities: a share for the leader, the rest by the regret that each causes."""
        count, leader = len(self.trials), self.leader()
        if leader is None or not self.is_contested:
            return np.full(count, 1.0 / count)
        best, regret = self.draws.argmin(axis=1), self.regret_draws(confidence)
        shares = np.bincount(best, regret, minlength=count + 1)[:count] / len(regret)
        chosen = np.zeros(count)
        chosen[leader] = 1.0
        if shares.sum() <= 0:
            return chosen
        result: Floats = _LEADER_SHARE * chosen + (1.0 - _LEADER_SHARE) * shares / shares.sum()
        return result


def beliefs(tasks: Tasks, history: Sequence[Outcome], *, seed: int) -> Iterator[Belief]:
    """The belief about every task after a history, setting by setting; `seed` is of the draws."""
    times: dict[str, list[tuple[int, float]]] = {}
    for outcome in history:
        time_us = outcome.time_us
        if outcome.ok and time_us is not None and math.isfinite(time_us) and time_us > 0:
            times.setdefault(outcome.trial_key, []).append((outcome.round, math.log(time_us)))
    times = {key: sorted(values) for key, values in times.items()}
    failed = {outcome.trial_key for outcome in history if not outcome.ok}
    for setting, members in tasks.items():
        cells = cells_of(members, times)
        grouped: dict[object, list[Trial]] = defaultdict(list)
        for trial in (trial for task in members for trial in task.candidates):
            grouped[_subspace(trial)].append(trial)
        lost = set(failed)
        for keys in ({trial.key for trial in trials} for trials in grouped.values()):
            if len(failed & keys) >= _FAILURES and not keys & times.keys():
                lost |= keys
        seen = {kind: places_of(trials, cells) for kind, trials in grouped.items()}
        kernel = choose_kernel(list(seen.values()))
        surfaces = {kind: Surface(kernel, rows) for kind, rows in seen.items()}
        for task in members:
            generator = np.random.default_rng(seed_of(seed_of(seed, setting.key), task.key))
            yield _belief(task, lost, cells, surfaces, generator)


def _belief(
    task: TaskTrials,
    lost: Set[str],
    cells: Mapping[str, Cell],
    surfaces: Mapping[object, "Surface"],
    generator: np.random.Generator,
) -> Belief:
    trials = [trial for trial in task.candidates if trial.key not in lost]
    mean, sigma = np.zeros(len(trials)), np.zeros(len(trials))
    draws = np.zeros((_DRAWS, len(trials) + 1))
    for kind in dict.fromkeys(map(_subspace, trials)):
        index = [i for i, trial in enumerate(trials) if _subspace(trial) == kind]
        mean[index], covariance = surfaces[kind].predict(places_of([trials[i] for i in index]))
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        sigma[index] = np.sqrt(np.maximum(np.diag(covariance), 0.0))
        draws[:, index] = mean[index] + generator.normal(size=(_DRAWS, len(index))) @ root.T
    key = task.default.key if task.default else ""
    default = _NO_CELL if key in lost else cells.get(key, _NO_CELL)
    draws[:, -1] = default.log_us + math.sqrt(default.variance) * generator.normal(size=_DRAWS)
    observed = np.array([cells.get(trial.key, _NO_CELL).log_us for trial in trials])
    return Belief(task, trials, mean, sigma, draws, observed, default)


# --- What was measured: log times without the drift of their rounds, and their noise ---


def cells_of(tasks: Sequence[TaskTrials], times: Mapping[str, Times]) -> dict[str, Cell]:
    """The cells of one setting by trial key; only trials with a time."""
    drift = round_drift([times.get(t.default.key, ()) for t in tasks if t.default is not None])
    level: dict[str, tuple[float, list[float]]] = {}
    differences: list[tuple[float, float]] = []
    for task in tasks:
        log2_size = math.log2(task.size_bytes)
        for trial in (*task.candidates, *task.default_pair()[:1]):
            values = [value - drift.get(n, 0.0) for n, value in times.get(trial.key, ())]
            if values:
                level[trial.key] = log2_size, values
                differences += [(log2_size, b - a) for a, b in pairwise(values)]
    sigma = {size: noise_sigma(differences, size) for size, _ in level.values()}
    rounds = {key: len({number for number, _ in times[key]}) for key in level}
    return {k: cell_of(values, sigma[size], rounds[k]) for k, (size, values) in level.items()}


def cell_of(log_us: Sequence[float], sigma: float, rounds: int) -> Cell:
    """The median of a trial's log times and its variance, given the noise of a single one.

    Two further apart than four standard deviations of a difference are no pair: the faster one
    counts alone, since single calls are slow now and then and none is fast by chance. Three or more
    that scatter twice as far as the noise, as on a machine with two states, have their own scatter.
    """
    count, middle = len(log_us), float(np.median(log_us))
    if count == 2 and abs(log_us[0] - log_us[1]) > 4.0 * math.sqrt(2) * sigma:
        return Cell(min(log_us), sigma**2, 1, rounds)
    if count <= 2:  # their median is their mean
        return Cell(middle, sigma**2 / count, count, rounds)
    own = MAD_TO_SIGMA * float(np.median(np.abs(np.array(log_us) - middle)))
    wide = own if own > 2.0 * sigma else sigma
    return Cell(middle, _MEDIAN_VARIANCE * wide**2 / count, count, rounds)


def noise_sigma(differences: Sequence[tuple[float, float]], log2_size: float) -> float:
    """Robust standard deviation of one log time at a size.

    `differences` are (log2 size, difference of two log times of one trial); those within 1.5
    octaves count alone, if there are twelve.
    """
    near = [d for size, d in differences if abs(size - log2_size) <= 1.5]
    taken = near if len(near) >= 12 else [d for _, d in differences]
    if not taken:
        return 0.03
    return max(MAD_TO_SIGMA * float(np.median(np.abs(taken))) / math.sqrt(2), 0.001)


def round_drift(default_times: Sequence[Times]) -> dict[int, float]:
    """What each round adds to all log times, from NCCL's default in every round.

    A round is a run of its own, and all of it may be slow. Medians are polished over tasks and
    rounds (Tukey, Exploratory Data Analysis, 1977, chapter 11); what comes out is shrunk by how
    much of it the noise alone would make.
    """
    # Of a pair the faster one: that it is slow by chance takes two slow calls.
    tasks = [dict(reversed(times)) for times in default_times]
    seen_in = Counter(number for task in tasks for number in task)
    rounds = sorted(number for number, count in seen_in.items() if count >= _LEAST_TASKS)
    tasks = [task for task in tasks if any(number in task for number in rounds)]
    if len(rounds) < 2:
        return {}
    rest = table = np.array([[task.get(number, np.nan) for number in rounds] for task in tasks])
    drift = np.zeros(len(rounds))
    for _ in range(4):
        rest = table - drift
        rest = rest - np.nanmedian(rest, axis=1, keepdims=True)
        drift = drift + np.nanmedian(rest, axis=0)
    seen = np.isfinite(rest)
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(rest[seen])))
    # The polish has taken its share of the scatter out of what is left.
    left = (1.0 - 1.0 / len(tasks)) * (1.0 - 1.0 / len(rounds))
    noise = _MEDIAN_VARIANCE * sigma**2 / left / seen.sum(axis=0)
    real = max(float(np.mean(drift**2 - _DRIFT_OVER_NOISE * noise)), 0.0)
    share = real / (real + noise) if real > 0 else np.zeros(len(rounds))
    return dict(zip(rounds, (drift * share).tolist(), strict=True))


# --- A Gaussian process over one (algorithm, protocol) ---
# Rows are cells, shape (n, 6): log2 of size, channels and chunk (NaN = AUTO), log time, variance,
# repeats. A place is the first three.


def places_of(trials: Sequence[Trial], cells: Mapping[str, Cell] | None = None) -> Floats:
    """The places of trials (n, 3); given cells, the rows (n, 6) of those that have one."""
    rows = [
        (t.size_bytes, t.config.num_channels or np.nan, t.config.chunk_bytes or np.nan)
        for t in trials
        if cells is None or t.key in cells
    ]
    places: Floats = np.log2(np.array(rows, dtype=np.float64).reshape(-1, 3))
    if cells is None:
        return places
    seen = [cells[t.key][:3] for t in trials if t.key in cells]
    return np.hstack([places, np.array(seen, dtype=np.float64).reshape(-1, 3)])


@dataclass(frozen=True, slots=True)
class Kernel:
    """The prior covariance of log times of two configs; the amplitudes are standard deviations.

    A subspace has a curve over the size that its configs share, and on it an effect of the knobs
    (channels, chunk size) that changes smoothly with them and with the size, as AutoCCL reports
    (Xu et al., NSDI 2025: near-unimodal in each algorithm, protocol and transport).
    """

    #: Reach over the message size and over a knob, in octaves.
    size_octaves: float = 3.0
    knob_octaves: float = 2.0
    #: How far the size curve leaves its straight line, and how far the knobs move a time.
    curve: float = 0.4
    knobs: float = 0.3
    #: What one cell has of its own, shared with no neighbour.
    own: float = 0.01

    def matrix(self, a: Floats, b: Floats) -> Floats:
        """Covariances, shape (len(a), len(b))."""
        apart = np.subtract.outer(a[:, 0], b[:, 0])
        same, alike = apart == 0, np.ones(apart.shape)
        # Level and slope per octave: of log times of 1 us to 1 s, flat to proportional to the size.
        line = 3.0**2 + 0.5**2 * np.multiply.outer(a[:, 0] - 20.0, b[:, 0] - 20.0)
        size = matern(apart / self.size_octaves)
        for knob in (1, 2):
            # AUTO is NCCL's own number, which is not known: it is like AUTO at other sizes only.
            auto = np.logical_and.outer(np.isnan(a[:, knob]), np.isnan(b[:, knob]))
            apart = np.subtract.outer(a[:, knob], b[:, knob]) / self.knob_octaves
            near = np.where(np.isnan(apart), auto, matern(np.nan_to_num(apart)))
            alike, same = alike * near, same & (auto | (apart == 0))
        result: Floats = line + size * (self.curve**2 + self.knobs**2 * alike) + self.own**2 * same
        return result


def matern(distance: Floats) -> Floats:
    """Matern correlation of smoothness 5/2 (R&W, equation 4.17)."""
    d = np.sqrt(5.0) * np.abs(distance)
    result: Floats = (1.0 + d + d**2 / 3.0) * np.exp(-d)
    return result


class Surface:
    """The posterior of one subspace, slow outliers counting less; no rows leave the prior."""

    def __init__(self, kernel: Kernel, rows: Floats) -> None:
        self._kernel, self._rows = kernel, rows
        self._mean = float(np.median(rows[:, 3])) if len(rows) else 0.0
        self._inverse = _inverse(kernel, rows, robust_variance(kernel, rows))
        self._weights = self._inverse @ (rows[:, 3] - self._mean)

    def predict(self, places: Floats) -> tuple[Floats, Floats]:
        """Mean log times (m,) and their covariance (m, m) at `places` (m, 3), without noise."""
        cross = self._kernel.matrix(places, self._rows)
        mean = self._mean + cross @ self._weights
        covariance = self._kernel.matrix(places, places) - cross @ self._inverse @ cross.T
        return mean, (covariance + covariance.T) / 2.0


def robust_variance(kernel: Kernel, rows: Floats) -> Floats:
    """The variances (n,), raised where a cell of one or two repeats is much slower than all others.

    By leave-one-out residuals (R&W, equations 5.10 to 5.12).
    """
    log_us, measured, doubtful = rows[:, 3], rows[:, 4], rows[:, 5] < 3
    variance = measured
    if len(rows) < 3 or not doubtful.any():
        return variance
    for _ in range(3):
        inverse = _inverse(kernel, rows, variance)
        spread = 1.0 / np.diag(inverse)
        residual = (inverse @ (log_us - np.median(log_us))) * spread
        # What it was expected to vary by before it was doubted.
        expected = np.maximum(spread - variance, 0.0) + measured
        wanted = np.maximum(residual / _DOUBTED_SIGMAS, 0.0) ** 2
        excess = np.maximum(wanted - expected, 0.0)
        variance = np.where(doubtful, measured + excess, measured)
    return variance


def _inverse(kernel: Kernel, rows: Floats, variance: Floats) -> Floats:
    inverse = np.linalg.inv(kernel.matrix(rows, rows) + np.diag(variance + 1e-9))
    result: Floats = (inverse + inverse.T) / 2.0
    return result


def choose_kernel(subspaces: Sequence[Floats]) -> Kernel:
    """The kernel of the largest likelihood of at most 120 rows of each, by coordinate search."""
    kernel = Kernel()
    kept = []
    for rows in subspaces:
        some = np.linspace(0, len(rows) - 1, min(len(rows), 120)).astype(np.intp)
        if len(rows) > 1:
            few = rows[np.unique(some)]
            few[:, 4] = robust_variance(kernel, few)
            kept.append(few)
    best = sum(_log_likelihood(kernel, rows) for rows in kept)
    for name, values in (*_KERNELS.items(), *_KERNELS.items()) if kept else ():
        for other in [replace(kernel, **{name: value}) for value in values]:
            found = sum(_log_likelihood(other, rows) for rows in kept)
            if found > best + 1e-9:
                kernel, best = other, found
    return kernel


def _log_likelihood(kernel: Kernel, rows: Floats) -> float:
    """Log marginal likelihood without its constant (R&W, equation 2.30)."""
    factor = np.linalg.cholesky(kernel.matrix(rows, rows) + np.diag(rows[:, 4] + 1e-9))
    half = np.linalg.solve(factor, rows[:, 3] - np.median(rows[:, 3]))
    return float(-0.5 * half @ half - np.log(np.diag(factor)).sum())
