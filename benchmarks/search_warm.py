"""The warm start: a model of how long configs take, learned on other systems only.

Boosted trees (scikit-learn) predict log(time / NCCL's own choice) of a config from what the task
is, what the machine is and the config's knobs. It is regression, not reinforcement learning: a
policy of dynamiccl-train predicts the same quantity (train/heads.py) and goes through the same
`Prior`.

How wrong it is on a system that it has not seen is measured on systems that were left out of the
training in turn; where only one is left, on its group shapes instead, which flatters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from search_world import Task

from dynamiccl.serve.search.prior import Prior
from dynamiccl.serve.search.space import Choice

#: Configs of a task that are learned from; more of the fast ones, since these are searched for.
SAMPLE: Final = 96
_LEAST_SIGMA: Final = 0.02
#: A knob that is left to NCCL: below every value.
_AUTO: Final = -1.0


@dataclass(frozen=True)
class WarmStart:
    """A learned prediction, and how wrong it is elsewhere."""

    model: Any
    level_sigma: float
    shared_sigma: float
    own_sigma: float

    def prior(self, task: Task) -> Prior:
        """What it predicts of a task."""
        ratios = self.model.predict(_encode(task, range(len(task.times_us))))
        return Prior(ratios, self.level_sigma, self.shared_sigma, self.own_sigma)


def learn(tasks: Sequence[Task], seed: int = 0) -> WarmStart:
    """Fit on tasks of some systems, with errors measured on each that was left out."""
    names = {task.system for task in tasks}
    by_shape = len(names) == 1
    parts = sorted({_part(task, by_shape=by_shape) for task in tasks})
    errors: list[list[npt.NDArray[np.float64]]] = []
    for part in parts:
        held = [task for task in tasks if _part(task, by_shape=by_shape) == part]
        rest = [task for task in tasks if _part(task, by_shape=by_shape) != part]
        model = _fit(rest, seed)
        errors += [_errors(model, task) for task in held]
    means = [np.array([each.mean() for each in of_task]) for of_task in errors]
    sigmas = (
        _spread([each.mean() for each in means]),
        _spread(np.concatenate([each - each.mean() for each in means])),
        _spread(np.concatenate([each - each.mean() for of_task in errors for each in of_task])),
    )
    return WarmStart(_fit(tasks, seed), *sigmas)


def _spread(errors: npt.ArrayLike) -> float:
    return max(float(np.sqrt(np.mean(np.square(errors)))), _LEAST_SIGMA)


def _part(task: Task, *, by_shape: bool) -> str:
    return f"{task.call.group}" if by_shape else task.system


def _errors(model: Any, task: Task) -> list[npt.NDArray[np.float64]]:
    """By subspace, of the configs that could be worth a probe: those near the fastest."""
    found = task.log_ratio - model.predict(_encode(task, range(len(task.times_us))))
    kept = []
    for actions in task.space.subspaces:
        near = [a for a in actions if task.log_ratio[a] < task.log_ratio.min() + np.log(2.0)]
        if near:
            kept.append(found[near])
    return kept


def _fit(tasks: Sequence[Task], seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    random = np.random.default_rng(seed)
    rows, targets = [], []
    for task in tasks:
        forced = np.setdiff1d(np.array(task.space.actions), [task.space.default])
        weight = np.exp(-2.0 * (task.log_ratio[forced] - task.log_ratio.min()))
        count = min(SAMPLE, len(forced))
        picked = random.choice(forced, count, replace=False, p=weight / weight.sum())
        rows.append(_encode(task, picked.tolist()))
        targets.append(task.log_ratio[picked])
    model = HistGradientBoostingRegressor(
        learning_rate=0.08, max_leaf_nodes=31, max_iter=300, min_samples_leaf=10, random_state=0
    )
    return model.fit(np.vstack(rows), np.clip(np.concatenate(targets), -2.0, 2.0))


def _encode(task: Task, actions: Sequence[int]) -> npt.NDArray[np.float64]:
    facts = np.array(list(task.facts.values()))
    ran = task.space.default_runs
    assert ran is not None
    default = _knobs(ran)
    knobs = np.array([_knobs(task.space.choices[action]) for action in actions])
    per_channel = facts[list(task.facts).index("log2_size_per_rank")] - knobs[:, [2]]
    same = np.repeat(default[None, :], len(knobs), axis=0)
    return np.hstack(
        [np.repeat(facts[None, :], len(knobs), axis=0), knobs, per_channel, same, knobs - same]
    )


def _knobs(choice: Choice) -> npt.NDArray[np.float64]:
    config = choice.config

    def log2(value: int | None) -> float:
        return _AUTO if not value else float(np.log2(value))

    return np.array(
        [
            _AUTO if config.algorithm is None else float(config.algorithm),
            _AUTO if config.protocol is None else float(config.protocol),
            log2(config.num_channels),
            log2(config.chunk_bytes),
            log2(choice.num_threads),
            _AUTO if choice.transport is None else float(choice.transport == "SHM"),
        ]
    )
