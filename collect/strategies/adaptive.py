"""The adaptive strategy: measures where it is uncertain which config is best.

Round 0 looks everywhere: a task's slots are spread over its (algorithm, protocol) subspaces in
turn, so that neighbouring sizes see different ones and each subspace is seen every few octaves.
From round 1 on, a surrogate of all that was measured (belief.py) says what the decision of each
task may cost; tasks whose decision is sure drop out, the others get slots.

Each slot of a task is an independent draw with replacement from

    q(config) = (1 - epsilon) policy(config) + epsilon / number of configs

and q of the drawn config is recorded as its probability. The policy of round 0 is uniform over the
configs of the slot's subspace; later it is a share for the leading config and, for the rest, each
config's share in the expected regret (`Belief.shares`). Configs that failed, or whose whole
subspace did, are in neither part. NCCL's default is measured twice in each round of a task and is
not drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.strategies.belief import Belief, by_setting, current_beliefs
from dynamiccl.collect.strategies.samples import Floats
from dynamiccl.collect.strategies.strategy import (
    Outcome,
    TaskTrials,
    group_by_task,
    infeasible_picks,
    seed_of,
    subspace,
)
from dynamiccl.collect.sweep import StrategySettings

#: Each subspace is seen once in so many octaves of round 0.
_FIRST_OCTAVES: Final = 1.5
#: Slots of a live task in each later round: one for so many configs, and not more than so many
#: (many small steps learn more than few large ones; each costs a pair of the default, though).
_CONFIGS_A_SLOT: Final = 10
_MOST_SLOTS: Final = 3
#: Share of the policy that repeats the leading config.
_LEADER_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Plan:
    """The slots that one task gets in a round."""

    task: TaskTrials
    #: What its slots are drawn from.
    trials: tuple[Trial, ...]
    #: The distribution of each slot over `trials`, shape (slots, k).
    slots: Floats
    #: What an undecided task may cost, as a share of the time: a short budget goes there first.
    doubt: float

    def cost(self) -> int:
        """Number of measurements, the default's included."""
        return len(self.slots) + len(self.task.default_pair())


class Adaptive:
    """Measures uncertain tasks until all are certain, or rounds or budget are spent."""

    def __init__(
        self,
        name: str,
        trials: Sequence[Trial],
        settings: StrategySettings,
        *,
        max_measurements: int | None = None,
    ) -> None:
        """Draws are seeded by the sweep's name, seed, round and task."""
        self._name = name
        self._settings = settings
        self._budget = math.inf if max_measurements is None else max_measurements
        self._infeasible = infeasible_picks(trials)
        self._tasks = group_by_task(trials)

    def next_picks(self, number: int, history: Sequence[Outcome]) -> tuple[Trial, ...] | None:
        """This round's draws; None when all tasks are certain, or rounds or budget are spent."""
        if number >= self._settings.max_rounds:
            return None
        before = [outcome for outcome in history if outcome.round < number]
        plans = self._first_plans() if number == 0 else self._later_plans(number, before)
        first = self._infeasible if number == 0 else ()
        # What is not run costs nothing.
        left = self._budget - sum(not outcome.infeasible for outcome in before)
        picks = [p for plan in _affordable(plans, left) for p in self._draw(plan, number)]
        return (*first, *picks) if first or picks else None

    def expected_picks(self) -> int:
        """An upper bound over all rounds; most sweeps end much earlier."""
        first = sum(plan.cost() for plan in self._first_plans())
        later = sum(
            len(task.default_pair()) + later_slots(members)
            for members in by_setting(self._tasks).values()
            for task in members
            if task.candidates
        )
        total = first + later * (self._settings.max_rounds - 1)
        return len(self._infeasible) + int(min(total, self._budget))

    def _draw(self, plan: _Plan, number: int) -> tuple[Trial, ...]:
        seed = seed_of(self._name, self._settings.seed, number, plan.task.key)
        generator = np.random.default_rng(seed)
        picks = list(plan.task.default_pair())
        repeats: dict[int, int] = {}
        for slot in plan.slots:
            index = int(generator.choice(len(plan.trials), p=slot))
            trial, repeat = plan.trials[index], repeats.get(index, 0)
            picks.append(replace(trial, repeat=repeat, probability=float(slot[index])))
            repeats[index] = repeats.get(index, 0) + 1
        return tuple(picks)

    def _mixed(self, policy: Floats) -> Floats:
        epsilon = self._settings.epsilon
        mixed = (1.0 - epsilon) * policy + epsilon / max(policy.shape[-1], 1)
        result: Floats = mixed / mixed.sum(axis=-1, keepdims=True)
        return result

    def _first_plans(self) -> tuple[_Plan, ...]:
        return tuple(
            # Nothing is known yet: a budget that is too short for all takes some of all sizes.
            _Plan(task, task.candidates, self._mixed(policy), seed_of(self._name, task.key) / 2**64)
            for members in by_setting(self._tasks).values()
            for task, policy in zip(members, first_policies(members), strict=True)
        )

    def _later_plans(self, number: int, before: Sequence[Outcome]) -> tuple[_Plan, ...]:
        seed = seed_of(self._name, self._settings.seed, number)
        beliefs = current_beliefs(self._tasks, before, seed=seed)
        failed = {outcome.trial_key for outcome in before if not outcome.ok}
        slots = {s: later_slots(members) for s, members in by_setting(self._tasks).items()}
        return tuple(
            _Plan(
                belief.task,
                belief.trials,
                np.tile(
                    self._mixed(policy(belief, self._settings.confidence)),
                    (slots[belief.task.setting], 1),
                ),
                doubt(belief, self._settings.confidence),
            )
            for belief in beliefs
            if self._is_live(belief, failed)
        )

    def _is_live(self, belief: Belief, failed: set[str]) -> bool:
        default = belief.task.default
        if not belief.trials or default is None or default.key in failed:
            return False
        return not belief.is_contested or not self._is_sure(belief)

    def _is_sure(self, belief: Belief) -> bool:
        regret = belief.regret_draws(self._settings.confidence)
        within = float(np.mean(regret <= self._settings.tolerance))
        return within >= self._settings.confidence or regret.mean() < self._settings.tolerance


def first_policies(tasks: Sequence[TaskTrials]) -> list[Floats]:
    """Round 0 of one setting: for each task (slots, k) probabilities of its configs."""
    kinds = [[subspace(trial) for trial in task.candidates] for task in tasks]
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
    """Slots of each uncertain task of one setting in rounds after the first."""
    most = max(len(task.candidates) for task in tasks)
    return min(max(math.ceil(most / _CONFIGS_A_SLOT), 1), _MOST_SLOTS)


def policy(belief: Belief, confidence: float) -> Floats:
    """(k,) probabilities of a slot's configs, before exploration is mixed in."""
    count = len(belief.trials)
    leader = belief.leader()
    if leader is None or not belief.is_contested:
        return np.full(count, 1.0 / count)
    shares = belief.shares(confidence)
    chosen = np.zeros(count)
    chosen[leader] = 1.0
    if shares.sum() <= 0:
        return chosen
    result: Floats = _LEADER_SHARE * chosen + (1.0 - _LEADER_SHARE) * shares / shares.sum()
    return result


def doubt(belief: Belief, confidence: float) -> float:
    """Expected regret of the current decision, in log time; infinite without any measurement."""
    return float(belief.regret_draws(confidence).mean()) if belief.is_contested else math.inf


def _affordable(plans: Sequence[_Plan], left: float) -> list[_Plan]:
    """The plans that the budget pays for, most uncertain first; returned in original order."""
    order = sorted(range(len(plans)), key=lambda i: (-plans[i].doubt, i))
    taken = []
    for index in order:
        left -= plans[index].cost()
        if left < 0:
            break
        taken.append(index)
    return [plans[index] for index in sorted(taken)]
