"""A search that needs no network and no training: epsilon-greedy over measured configs.

For each task key it tries, now and then, another of the configs that the artifact's data measured
near that size, and goes back to the one that took least. It is an example of driving a real job by
a search in Python, not advice: what it tries can be many times slower than NCCL's own choice.
"""

from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np

from dynamiccl.datasets.history import Call
from dynamiccl.nccl import Collective, Config
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain.ground import (
    MIN_CALLS,
    Ground,
    in_force,
    latest_config,
    may_be,
    open_ground,
)
from dynamiccl.serve.brain.history import BrainConfig, History, Task
from dynamiccl.serve.table import DecisionTable

#: Share of the decisions about a task key that try something at random.
EPSILON: Final = 0.1


@dataclass(slots=True)
class _Arms:
    """One task key: the action that is played, and what each took when it was."""

    playing: int
    #: Action -> median time per byte of its latest calls.
    times: dict[int, float] = field(default_factory=dict)
    #: The window that was last learned from.
    seen: tuple[Call, ...] = ()


class EpsilonGreedy:
    """One communicator's search. It begins with the artifact's own table."""

    def __init__(self, artifact: Artifact, seed: int) -> None:
        """Take configs and their bins from `artifact`; equal seeds and histories decide alike."""
        self._artifact = artifact
        self._random = np.random.default_rng(seed)
        self._configs = artifact.manifest.actions().configs
        self._actions = {config: action for action, config in enumerate(self._configs)}
        self._arms: dict[tuple[Collective, int], _Arms] = {}
        self._ground: Ground | None = None

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The artifact's table with the arm to play for each task key that has a history.

        Raises UnknownName for a communicator shape that the artifact does not have.
        """
        if self._ground is None:
            self._ground = open_ground(self._artifact, config)
        for task in history.tasks:
            if self._ground.holds(task):
                self._learn(task, self._ground, in_force(history.table, task))
        chosen = {key: self._configs[arms.playing] for key, arms in self._arms.items()}
        table = self._ground.with_configs(chosen)
        return None if table == history.table else table

    def _learn(self, task: Task, ground: Ground, running: Config) -> None:
        key = (task.collective, task.bin)
        if key not in self._arms:
            self._arms[key] = _Arms(self._actions[in_force(ground.table, task)])
        arms = self._arms[key]
        calls = latest_config(task.calls)
        played = self._configs[arms.playing]
        if (
            task.calls == arms.seen
            or len(calls) < MIN_CALLS
            or running != played
            or not may_be(played, calls[-1])
        ):
            return  # nothing new, or not yet about what is being tried
        arms.seen = task.calls
        arms.times[arms.playing] = median(call.time_us / call.size_bytes for call in calls)
        allowed_actions = np.flatnonzero(
            ground.mask[task.collective, task.bin - ground.table.first_bin]
        )
        if self._random.random() < EPSILON:
            arms.playing = int(self._random.choice(allowed_actions))
        else:
            arms.playing = min(arms.times, key=lambda action: arms.times[action])
