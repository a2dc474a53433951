"""The table that a sweep yields: which config each task takes, from the outcomes so far."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median

import numpy as np

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.outcomes import Outcome
from dynamiccl.collect.strategies.belief import Belief, beliefs_of_setting
from dynamiccl.collect.strategies.samples import Times, condense, failed_trials, times_by_trial
from dynamiccl.collect.strategies.strategy import TaskTrials, group_by_task, seed_of
from dynamiccl.nccl import ABSTAIN, Config


def choose(
    trials: Sequence[Trial],
    history: Sequence[Outcome],
    references: Sequence[Outcome] = (),
    *,
    confidence: float = 0.9,
) -> dict[tuple[Setting, int], Config]:
    """The config to take for each task: a measured one that beats the default, else ABSTAIN.

    The default is the one of the user's untouched environment, as everywhere (datasets/cells.py):
    a config has to beat the default of its own process, which shares its queue pairs, and then the
    untouched one by more than processes differ.

    Args:
        trials: the grid.
        history: outcomes of any strategy, in any order.
        references: outcomes of the untouched default; a task without one is judged by its own.
        confidence: how sure it must be that the config is faster than NCCL's own choice.

    Returns:
        Task -> config. ABSTAIN where the default has no time, nothing was measured, or nothing is
        faster beyond the noise. A config of which any attempt failed is never taken.
    """
    table: dict[tuple[Setting, int], Config] = {trial.task: ABSTAIN for trial in trials}
    measured, untouched = times_by_trial(history), times_by_trial(references)
    band = noise_across_processes(untouched)
    for belief in current_beliefs(group_by_task(trials), history, seed=0):
        index = belief.decision(confidence)
        if index is None:
            continue
        config, default = belief.trials[index], belief.task.default
        known = untouched.get(default.key, ()) if default is not None else ()
        if not known or _median_us(measured[config.key]) * (1 + band) < _median_us(known):
            table[config.task] = config.config
    return table


def noise_across_processes(untouched: Mapping[str, Times]) -> float:
    """90th percentile of the relative difference of the default between processes.

    Each round measures it in a process of its own. Of one round nothing is known: 0.
    """
    spreads = []
    for times in untouched.values():
        rounds: dict[int, list[float]] = {}
        for number, log_us in times:
            rounds.setdefault(number, []).append(log_us)
        spreads += [
            abs(a - b) for a, b in combinations([median(values) for values in rounds.values()], 2)
        ]
    return math.expm1(float(np.quantile(spreads, 0.9))) if spreads else 0.0


def _median_us(times: Times) -> float:
    return math.exp(median(log_us for _, log_us in times))


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
