"""What a search starts from: the artifact's table and configs, and helpers to read windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.history import Call
from dynamiccl.datasets.manifest import Support
from dynamiccl.datasets.questions import allowed, table_supports
from dynamiccl.nccl import ABSTAIN, Collective, Config
from dynamiccl.serve.artifact import Artifact, pick_table
from dynamiccl.serve.brain_history import BrainConfig, KeyCalls
from dynamiccl.serve.table import DecisionTable

#: Timed calls with one config before it is judged.
MIN_CALLS: Final = 3


@dataclass(frozen=True, slots=True)
class SearchContext:
    """Table and configs from which a communicator's search starts."""

    table: DecisionTable
    support: Support
    #: [collective][bin][action] whether it may be played.
    mask: npt.NDArray[np.bool_]

    def holds(self, task: KeyCalls) -> bool:
        """Whether the table has the task's size bin."""
        return 0 <= task.bin - self.table.first_bin < self.table.num_bins

    def with_configs(
        self, chosen: dict[tuple[Collective, int], Config], *, elsewhere: bool = True
    ) -> DecisionTable:
        """The table with the configs `chosen`, by (collective, size bin).

        All other entries are the artifact's with `elsewhere`, else ABSTAIN.
        """
        start = self.table
        rows: list[list[Config | None]] = [
            [start.at(c, start.first_bin + i) if elsewhere else None for i in range(start.num_bins)]
            for c in TUNED
        ]
        for (collective, index), config in chosen.items():
            rows[collective][index - start.first_bin] = config
        return DecisionTable.from_configs(
            rows,
            num_nodes=start.num_nodes,
            num_ranks=start.num_ranks,
            first_bin=start.first_bin,
        )


def open_search_context(artifact: Artifact, config: BrainConfig) -> SearchContext:
    """The context of a communicator. Raises UnknownName for a shape not in the artifact."""
    info = pick_table(artifact, config.num_nodes, config.num_ranks, config.system)
    table = DecisionTable.read(artifact.directory / info.path)
    manifest = artifact.manifest
    support = table_supports(manifest)[artifact.tables.index(info)]
    bins = range(table.first_bin, table.first_bin + table.num_bins)
    mask = np.stack([allowed(manifest, support, c, bins) for c in TUNED])
    return SearchContext(table, support, mask)


def in_force(table: DecisionTable | None, task: KeyCalls) -> Config:
    """The config that the plugin requests for a task now."""
    found = table.at(task.collective, task.bin) if table else None
    return found or ABSTAIN


def latest_config(calls: Sequence[Call]) -> list[Call]:
    """The calls since the latest change of config, oldest first."""
    last = calls[-1] if calls else None
    same = takewhile(lambda call: last is not None and _used(call) == _used(last), reversed(calls))
    return list(same)[::-1]


def may_have_run(config: Config, call: Call) -> bool:
    """Whether `call` can have run under `config`; channels are ignored: they are a maximum."""
    return config.algorithm in {None, call.algorithm} and config.protocol in {None, call.protocol}


def _used(call: Call) -> tuple[object, ...]:
    return call.algorithm, call.protocol, call.num_channels


def num_new_calls(seen: tuple[Call, ...], calls: tuple[Call, ...]) -> int:
    """Number of calls at the end of a window that were not in the previous window."""
    for kept in range(min(len(seen), len(calls)), 0, -1):
        if seen[-kept:] == calls[:kept]:
            return len(calls) - kept
    return len(calls)
