"""A search that needs no network and no training: epsilon-greedy over measured configs.

For each task key it tries, now and then, another of the configs that the artifact's data measured
near that size, and goes back to the one that took least. It is an example of driving a real job by
a search in Python, not advice: what it tries can be many times slower than NCCL's own choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.history import Call
from dynamiccl.datasets.questions import allowed, table_supports
from dynamiccl.nccl import ABSTAIN, Collective, Config
from dynamiccl.serve.artifact import Artifact, pick_table
from dynamiccl.serve.brain.history import BrainConfig, History, Task
from dynamiccl.serve.table import DecisionTable

#: Share of the decisions about a task key that try something at random.
EPSILON: Final = 0.1
#: Timed calls with one config before it is judged.
MIN_CALLS: Final = 3


@dataclass(slots=True)
class _Arms:
    """One task key: the action that is played, and what each took when it was."""

    playing: int
    #: Action -> median time per byte of its latest calls.
    times: dict[int, float] = field(default_factory=dict)
    #: The window that was last learned from.
    seen: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class _Ground:
    """What a communicator's search begins from."""

    table: DecisionTable
    #: [collective][bin][action] whether it may be played.
    mask: npt.NDArray[np.bool_]


class EpsilonGreedy:
    """One communicator's search. It begins with the artifact's own table."""

    def __init__(self, artifact: Artifact, seed: int) -> None:
        """Take configs and their bins from `artifact`; equal seeds and histories decide alike."""
        self._artifact = artifact
        self._random = np.random.default_rng(seed)
        self._configs = artifact.manifest.actions().configs
        self._actions = {config: action for action, config in enumerate(self._configs)}
        self._arms: dict[tuple[Collective, int], _Arms] = {}
        self._ground: _Ground | None = None

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The artifact's table with the arm to play for each task key that has a history.

        Raises UnknownName for a communicator shape that the artifact does not have.
        """
        if self._ground is None:
            self._ground = _open_ground(self._artifact, config)
        start = self._ground.table
        for task in history.tasks:
            if 0 <= task.bin - start.first_bin < start.num_bins:
                self._learn(task, self._ground, _in_force(history.table, task))
        rows: list[list[Config | None]] = [
            [start.at(c, start.first_bin + i) for i in range(start.num_bins)] for c in TUNED
        ]
        for (collective, index), arms in self._arms.items():
            rows[collective][index - start.first_bin] = self._configs[arms.playing]
        table = DecisionTable.from_configs(
            rows,
            num_nodes=start.num_nodes,
            num_ranks=start.num_ranks,
            first_bin=start.first_bin,
        )
        return None if table == history.table else table

    def _learn(self, task: Task, ground: _Ground, in_force: Config) -> None:
        key = (task.collective, task.bin)
        if key not in self._arms:
            self._arms[key] = _Arms(self._actions[_in_force(ground.table, task)])
        arms = self._arms[key]
        calls = _latest_config(task.calls)
        played = self._configs[arms.playing]
        if (
            task.calls == arms.seen
            or len(calls) < MIN_CALLS
            or in_force != played
            or not _may_be(played, calls[-1])
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


def _open_ground(artifact: Artifact, config: BrainConfig) -> _Ground:
    info = pick_table(artifact, config.num_nodes, config.num_ranks, config.system)
    table = DecisionTable.read(artifact.directory / info.path)
    manifest = artifact.manifest
    support = table_supports(manifest)[artifact.tables.index(info)]
    bins = range(table.first_bin, table.first_bin + table.num_bins)
    return _Ground(table, np.stack([allowed(manifest, support, c, bins) for c in TUNED]))


def _in_force(table: DecisionTable | None, task: Task) -> Config:
    found = table.at(task.collective, task.bin) if table else None
    return found or ABSTAIN


def _latest_config(calls: Sequence[Call]) -> list[Call]:
    """The calls at the end that used what the last one used: those since the latest switch."""
    last = calls[-1] if calls else None
    same = takewhile(lambda call: last is not None and _used(call) == _used(last), reversed(calls))
    return list(same)[::-1]


def _used(call: Call) -> tuple[object, ...]:
    return call.algorithm, call.protocol, call.num_channels


def _may_be(config: Config, call: Call) -> bool:
    """Whether `call` can have run under `config`; channels are a maximum, so they say nothing."""
    return config.algorithm in {None, call.algorithm} and config.protocol in {None, call.protocol}
