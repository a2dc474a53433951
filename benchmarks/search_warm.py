"""What a policy of the same system knows before a search: a model of a noisy sweep of its tasks.

Boosted trees (scikit-learn) predict log(time / NCCL's own choice) of a config from what the task
is and the config's knobs. It is regression, not reinforcement learning: a policy of dynamiccl-train
predicts the same quantity (train/heads.py) and goes through the same `Prior`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from search_episode import noise
from search_world import Task

from dynamiccl.serve.search.autoccl import Choice, SearchSpace
from dynamiccl.serve.search.policy_search import Prior

#: Noise of the sweep, robust sigma of log time.
SWEEP_SIGMA: Final = 0.02
#: Configs of a task that are learned from; more of the fast ones, since these are searched for.
SAMPLE: Final = 96
#: A knob that is left to NCCL: below every value.
_AUTO: Final = -1.0


class _Setting(NamedTuple):
    rate: float
    leaves: int
    trees: int
    least: int
    #: How much more often fast configs are learned from: by exp(-preference x log time).
    preference: float


#: From much detail to little.
SETTINGS: Final = (
    _Setting(0.08, 31, 300, 10, 2.0),
    _Setting(0.05, 8, 200, 40, 0.5),
    _Setting(0.05, 4, 200, 40, 2.0),
    _Setting(0.05, 4, 200, 40, 0.5),
)


def informed(tasks: Sequence[Task], seed: int = 0) -> dict[str, tuple[SearchSpace, Prior]]:
    """For each task of a system, by its name: a space that begins at the choice, and the prior."""
    random = np.random.default_rng(seed)
    swept = [
        replace(task, times_us=task.times_us * noise(SWEEP_SIGMA, len(task.times_us), random))
        for task in tasks
    ]
    model, found = _Ensemble(swept, seed), {}
    for task in tasks:
        said, space = model.predict(task), task.space
        begin = space.choices[min(space.actions, key=said.__getitem__)]
        begun = SearchSpace(
            space.choices, space.actions, default_runs=space.default_runs, begin=begin
        )
        found[task.name] = begun, Prior.of_policy(begun, task.call.size_bytes, said)
    return found


class _Ensemble:
    """The mean of models with several settings: with so few systems none can be selected."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._models = [_fit(tasks, setting, seed) for setting in SETTINGS]

    def predict(self, task: Task) -> npt.NDArray[np.float64]:
        """(A,) log(time / NCCL's own choice)."""
        encoded = _encode(task, range(len(task.times_us)))
        found = np.mean([model.predict(encoded) for model in self._models], axis=0)
        found[task.space.default] = 0.0
        return found  # type: ignore[no-any-return]


def _fit(tasks: Sequence[Task], setting: _Setting, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    random = np.random.default_rng(seed)
    rows, targets, weights = [], [], []
    counts = Counter(task.system for task in tasks)
    for task in tasks:
        forced = np.setdiff1d(np.array(task.space.actions), [task.space.default])
        weight = np.exp(-setting.preference * (task.log_ratio[forced] - task.log_ratio.min()))
        count = min(SAMPLE, len(forced))
        picked = random.choice(forced, count, replace=False, p=weight / weight.sum())
        rows.append(_encode(task, picked.tolist()))
        targets.append(task.log_ratio[picked])
        weights.append(np.full(count, 1.0 / (count * counts[task.system])))
    model = HistGradientBoostingRegressor(
        learning_rate=setting.rate,
        max_leaf_nodes=setting.leaves,
        max_iter=setting.trees,
        min_samples_leaf=setting.least,
        random_state=0,
    )
    # Systems weigh alike, and tasks within them, however many there are.
    weight = np.concatenate(weights)
    return model.fit(
        np.vstack(rows),
        np.clip(np.concatenate(targets), -2.0, 2.0),
        sample_weight=weight / weight.mean(),
    )


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
