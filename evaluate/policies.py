"""What is compared: one protocol, the learned policy, and the strong simple baselines.

Everything chooses among the actions that were measured for a task, on the same cold information:
workload and system. The baselines see the training bins' measured times, as the policy did.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.episodes import with_noise
from dynamiccl.datasets.features import cold_observations
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.train.policy import TorchPolicy

Actions = npt.NDArray[np.int64]

#: What makes tasks of different sizes one family: a table of configs is kept for each.
FAMILY: Final = (
    "system",
    "nccl_version",
    "num_nodes",
    "ranks_per_node",
    "collective",
    "datatype",
    "launch_profile",
    "in_place",
)


class Policy(Protocol):
    """Chooses an action (index into the data set's catalogue) for every task of a grid."""

    name: str

    def choose(self, grid: TaskGrid) -> Actions:
        """(T,) one measured action a task."""


class NcclDefault:
    """Leaves every choice to NCCL."""

    name = "nccl-default"

    def choose(self, grid: TaskGrid) -> Actions:
        """Abstain everywhere."""
        return np.full(grid.tasks.height, ABSTAIN_ACTION, dtype=np.int64)


class BestFixed:
    """The one config of each family that was best over its training sizes.

    Best = least mean log time over NCCL's default; a config counts as the default where it was not
    measured, and the default itself is a candidate.
    """

    name = "best-fixed"

    def __init__(self, training: TaskGrid) -> None:
        """Pick each family's config from its training tasks."""
        self._best: dict[tuple[object, ...], int] = {}
        log_ratio = np.log(training.times_us / training.default_us[:, None])
        log_ratio = np.where(np.isnan(log_ratio), 0.0, log_ratio)
        for key, rows in _families(training.tasks).items():
            self._best[key] = int(np.argmin(log_ratio[rows].mean(axis=0)))

    def choose(self, grid: TaskGrid) -> Actions:
        """The family's config where it was measured, else NCCL's default."""
        chosen = NcclDefault().choose(grid)
        for key, rows in _families(grid.tasks).items():
            action = self._best.get(key, ABSTAIN_ACTION)
            chosen[rows] = np.where(grid.mask[rows, action], action, ABSTAIN_ACTION)
        return chosen


class NearestSize:
    """The best config of the nearest training size of the same family (by ratio of sizes)."""

    name = "nearest-size"

    def __init__(self, training: TaskGrid) -> None:
        """Keep the training tasks as the table."""
        self._times_us = training.times_us
        self._log_size = np.log2(training.tasks["size_bytes"].to_numpy())
        self._families = _families(training.tasks)

    def choose(self, grid: TaskGrid) -> Actions:
        """The best config there, among those measured here; NCCL's default for a new family."""
        chosen = NcclDefault().choose(grid)
        log_size = np.log2(grid.tasks["size_bytes"].to_numpy())
        for key, rows in _families(grid.tasks).items():
            known = self._families.get(key)
            if known is None:
                continue
            for row in rows:
                nearest = known[int(np.argmin(np.abs(self._log_size[known] - log_size[row])))]
                times = np.where(grid.mask[row], self._times_us[nearest], np.nan)
                if not np.isnan(times).all():
                    chosen[row] = int(np.nanargmin(times))
        return chosen


class LearnedPolicy:
    """A trained policy, asked with cold observations; its catalogue is mapped onto the data's."""

    def __init__(self, policy: TorchPolicy, catalogue: Catalogue, name: str) -> None:
        """Wrap a loaded policy for a data set with `catalogue`."""
        self.name = name
        self._policy = policy
        held = set(catalogue.configs)
        own = policy.manifest.actions().configs
        self._to_data = np.array(
            [catalogue.index(config) if config in held else -1 for config in own], dtype=np.int64
        )

    def choose(self, grid: TaskGrid) -> Actions:
        """Ask the TorchScript policy."""
        manifest = self._policy.manifest
        tasks = with_noise(grid.tasks, manifest.noise_table())
        observations = cold_observations(tasks, manifest.launch_profiles)
        mask = grid.mask[:, self._to_data] & (self._to_data >= 0)
        return self._to_data[self._policy.act(observations, mask)]


def make_policies(
    training: TaskGrid, catalogue: Catalogue, learned: Sequence[tuple[str, TorchPolicy]]
) -> list[Policy]:
    """The learned policies, then the baselines."""
    return [
        *(LearnedPolicy(policy, catalogue, name) for name, policy in learned),
        NcclDefault(),
        BestFixed(training),
        NearestSize(training),
    ]


def _families(tasks: pl.DataFrame) -> dict[tuple[object, ...], npt.NDArray[np.int64]]:
    grouped = tasks.select(FAMILY).with_row_index("row").group_by(FAMILY, maintain_order=True)
    return {key: part["row"].to_numpy().astype(np.int64) for key, part in grouped}
