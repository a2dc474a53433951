"""The table that a sweep is for: which config each task takes, from what was measured so far."""

from collections.abc import Iterator, Mapping, Sequence

from dynamiccl.collect.outcomes import Outcome
from dynamiccl.collect.strategies.belief import Belief, beliefs_of_setting
from dynamiccl.collect.strategies.samples import condense, failed_trials, times_by_trial
from dynamiccl.collect.strategies.strategy import TaskTrials, group_by_task, seed_of
from dynamiccl.collect.sweep.trial import Setting, Trial
from dynamiccl.nccl import ABSTAIN, Config


def choose(
    trials: Sequence[Trial], history: Sequence[Outcome], *, confidence: float = 0.9
) -> dict[tuple[Setting, int], Config]:
    """The config to take for each task: a measured one that beats the default, else ABSTAIN.

    Args:
        trials: the grid.
        history: outcomes of any strategy, in any order.
        confidence: how sure it must be that the config is faster than NCCL's own choice.

    Returns:
        Task -> config. ABSTAIN where the default has no time, nothing was measured, or nothing is
        faster beyond the noise. A config of which any attempt failed is never taken.
    """
    table: dict[tuple[Setting, int], Config] = {trial.task: ABSTAIN for trial in trials}
    for belief in current_beliefs(group_by_task(trials), history, seed=0):
        index = belief.decision(confidence)
        if index is not None:
            table[belief.trials[index].task] = belief.trials[index].config
    return table


def current_beliefs(
    tasks: Sequence[TaskTrials], history: Sequence[Outcome], *, seed: int
) -> Iterator[Belief]:
    """What is believed of every task, setting by setting."""
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
