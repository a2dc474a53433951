"""The posterior over the times of a task's configs, and the decision that follows from it.

A *decision* is what a table would say now: the fastest config that was measured, if it beats NCCL's
default with the wanted confidence, else ABSTAIN. Its *doubt* is how much faster the truly best one
may be, over joint draws from the posterior.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.strategies.kernel import points
from dynamiccl.collect.strategies.samples import (
    Floats,
    Samples,
    condense,
    failed_trials,
    times_by_trial,
)
from dynamiccl.collect.strategies.strategy import (
    Outcome,
    Subspace,
    TaskTrials,
    seed_of,
    subspace,
)
from dynamiccl.collect.strategies.surrogate import Observed, Surface, choose_kernel, fit

#: Joint draws from the posterior of a task.
_DRAWS: Final = 400
#: All of one round may be slow, and of some sizes only: what one says of the default is no proof.
_LEAST_ROUNDS: Final = 2
#: The leader is the luckiest of many configs, and it is looked at after each round: a single look
#: gets this share of the error that is allowed in all.
_ERROR_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Belief:
    """A posterior over the log times of one task, and the decision that follows from it."""

    task: TaskTrials
    #: Candidates of which no attempt failed.
    trials: tuple[Trial, ...]
    #: Of each: believed log time_us and its standard deviation, and its own median, NaN without
    #: a time; shape (k,).
    mean: Floats
    sigma: Floats
    observed: Floats
    #: Log time of the default and its standard deviation; NaN where it has no time or failed.
    default_mean: float
    default_sigma: float
    #: Rounds that measured the default.
    default_rounds: int
    #: Joint draws of all trials (draws, k) and of the default (draws,).
    draws: Floats
    default_draws: Floats

    def leader(self) -> int | None:
        """Index of the measured trial with the smallest posterior mean, or None."""
        return self._fastest(np.isfinite(self.observed))

    def decision(self, confidence: float) -> int | None:
        """Index of the trial to take; None = ABSTAIN, which stands where nothing is sure.

        What the surrogate says is not enough: the trial's own times must beat the default too.
        """
        leader = self._fastest(self.observed < self.default_mean)
        if leader is None or self.default_rounds < _LEAST_ROUNDS:
            return None
        gain = self.default_mean - float(self.mean[leader])
        spread = math.hypot(self.default_sigma, float(self.sigma[leader]))
        error = 0.5 * math.erfc(gain / (spread * math.sqrt(2.0)))
        sure = error <= (1.0 - confidence) * _ERROR_SHARE
        return leader if gain > 0 and sure else None

    def _fastest(self, among: npt.NDArray[np.bool_]) -> int | None:
        return min(np.flatnonzero(among).tolist(), key=lambda i: float(self.mean[i]), default=None)

    def regret_draws(self, confidence: float) -> Floats:
        """(draws,) log time of the decision over that of the best, default included."""
        index = self.decision(confidence)
        taken = self.default_draws if index is None else self.draws[:, index]
        best = np.minimum(self.draws.min(axis=1), self.default_draws)
        result: Floats = taken - best
        return result

    def shares(self, confidence: float) -> Floats:
        """(k,) share of the expected regret that is due to each trial being the best."""
        regret = self.regret_draws(confidence)
        best = self.draws.argmin(axis=1)
        beaten = self.draws.min(axis=1) >= self.default_draws
        weights = np.where(beaten, 0.0, regret)
        return np.bincount(best, weights, minlength=len(self.trials)) / len(regret)

    @property
    def is_contested(self) -> bool:
        """Whether there is a choice: a default with a time, and a config beside it."""
        return bool(self.trials) and not math.isnan(self.default_mean)


def current_beliefs(
    tasks: Sequence[TaskTrials], history: Sequence[Outcome], *, seed: int
) -> Iterator[Belief]:
    """The posterior of every task, setting by setting."""
    times, failed = times_by_trial(history), failed_trials(history)
    for setting, members in by_setting(tasks).items():
        samples = condense(members, times, failed)
        yield from beliefs_of_setting(members, samples, seed=seed_of(seed, setting.key))


def by_setting(tasks: Sequence[TaskTrials]) -> Mapping[Setting, list[TaskTrials]]:
    """The tasks of each setting, in declaration order."""
    found: dict[Setting, list[TaskTrials]] = {}
    for task in tasks:
        found.setdefault(task.setting, []).append(task)
    return found


def beliefs_of_setting(
    tasks: Sequence[TaskTrials], samples: Samples, *, seed: int
) -> tuple[Belief, ...]:
    """The posterior of each of a setting's tasks; `seed` seeds the draws."""
    surfaces = _surfaces(tasks, samples)
    return tuple(_belief(task, samples, surfaces, seed) for task in tasks)


def _surfaces(tasks: Sequence[TaskTrials], samples: Samples) -> Mapping[Subspace, Surface]:
    grouped: dict[Subspace, list[Trial]] = {}
    for task in tasks:
        for trial in task.candidates:
            found = grouped.setdefault(subspace(trial), [])
            if trial.key in samples.cells:
                found.append(trial)
    observed = {key: _observed(trials, samples) for key, trials in grouped.items()}
    kernel = choose_kernel(tuple(observed.values()))
    return {key: fit(kernel, seen) for key, seen in observed.items()}


def _observed(trials: Sequence[Trial], samples: Samples) -> Observed:
    cells = [samples.cells[trial.key] for trial in trials]
    return Observed(
        points(trials),
        np.array([cell.log_us for cell in cells]),
        np.array([cell.variance for cell in cells]),
        np.array([float(cell.repeats) for cell in cells]),
    )


def _belief(
    task: TaskTrials, samples: Samples, surfaces: Mapping[Subspace, Surface], seed: int
) -> Belief:
    trials = tuple(trial for trial in task.candidates if trial.key not in samples.failed)
    generator = np.random.default_rng(seed_of(seed, task.key))
    mean, sigma = np.zeros(len(trials)), np.zeros(len(trials))
    draws = np.zeros((_DRAWS, len(trials)))
    for key in dict.fromkeys(map(subspace, trials)):
        index = [i for i, trial in enumerate(trials) if subspace(trial) == key]
        places = points([trials[i] for i in index])
        mean[index], covariance = surfaces[key].predict(places)
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        sigma[index] = np.sqrt(np.maximum(np.diag(covariance), 0.0))
        draws[:, index] = mean[index] + generator.normal(size=(_DRAWS, len(index))) @ root.T
    name = task.default.key if task.default else ""
    default = None if name in samples.failed else samples.cells.get(name)
    default_mean = default.log_us if default else math.nan
    default_sigma = math.sqrt(default.variance) if default else math.nan
    default_rounds = samples.rounds[name] if default else 0
    return Belief(
        task,
        trials,
        mean,
        sigma,
        np.array([c.log_us if (c := samples.cells.get(t.key)) else math.nan for t in trials]),
        default_mean,
        default_sigma,
        default_rounds,
        draws,
        default_mean + default_sigma * generator.normal(size=_DRAWS),
    )
