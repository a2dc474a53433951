"""The policy interface of reports; learned policies, as a command names them, and the scale's ends.

Everything chooses among the actions that were measured for a task, on the same cold information:
workload and system; but for the oracle, which looks at the answers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.datasets.features import cold_observations
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.questions import ChannelRule, decide, read_back_channels
from dynamiccl.datasets.steps import with_noise
from dynamiccl.nccl import Collective
from dynamiccl.train import tracking
from dynamiccl.train.policy import TorchPolicy

#: What a support and a task have in common.
_PLACE: Final = ("system", "num_nodes", "ranks_per_node", "launch_profile", "nccl_version")
Actions = npt.NDArray[np.int64]


class Policy(Protocol):
    """Chooses an action (index into the data set's catalogue) for every task of a grid."""

    name: str

    def choose(self, grid: TaskGrid) -> Actions:
        """(T,) one measured action a task."""


def probes_of(policy: Policy, grid: TaskGrid) -> Actions:
    """(T,) probes used for each task in the last `choose`; 0 for most policies."""
    tried = getattr(policy, "probes", None)
    return np.zeros(grid.tasks.height, dtype=np.int64) if tried is None else tried


class NcclDefault:
    """NCCL's own choice."""

    name = "nccl-default"

    def choose(self, grid: TaskGrid) -> Actions:
        """ABSTAIN for every task."""
        return np.full(grid.tasks.height, ABSTAIN_ACTION, dtype=np.int64)


class Random:
    """A uniform choice among the measured configs of each task, NCCL's default included."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        """`seed`: equal seeds give equal choices on the same grid."""
        self._seed = seed

    def choose(self, grid: TaskGrid) -> Actions:
        """A random measured action for each task."""
        drawn = np.random.default_rng(self._seed).random(grid.times_us.shape)
        chosen: Actions = np.where(grid.mask, drawn, -1.0).argmax(axis=1).astype(np.int64)
        return chosen


class Oracle:
    """The best measured config: regret 0."""

    name = "oracle"

    def choose(self, grid: TaskGrid) -> Actions:
        """The fastest measured action of each task."""
        best: Actions = np.nanargmin(grid.times_us, axis=1).astype(np.int64)
        return best


class LearnedPolicy:
    """A trained policy on cold observations; its catalogue is mapped onto the data's.

    A gated policy chooses only what passed, as its tables do.
    """

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
        """The TorchScript policy's actions."""
        return self.choose_among(grid.tasks, grid.mask)

    def choose_among(self, tasks: pl.DataFrame, mask: npt.NDArray[np.bool_]) -> Actions:
        """(T,) actions for tasks, among those of the data's that `mask` (T, A) allows."""
        manifest = self._policy.manifest
        tasks = with_noise(tasks, manifest.noise_table())
        observations = cold_observations(tasks, manifest.launch_profiles, manifest.cost_table())
        gate, rule = let_through(manifest, tasks)
        mask = mask[:, self._to_data] & (self._to_data >= 0) & gate
        return self._to_data[decide(self._policy, observations, mask, rule)]


def let_through(
    manifest: Manifest, tasks: pl.DataFrame
) -> tuple[npt.NDArray[np.bool_], ChannelRule]:
    """(T, A) actions that a policy's gate allows on each task, all without a gate; and its rule."""
    supports = {tuple(getattr(s, name) for name in _PLACE): s for s in manifest.supports}
    mask = np.ones((tasks.height, len(manifest.catalogue)), dtype=np.bool_)
    mask[:, ABSTAIN_ACTION + 1 :] = all(s.gated is None for s in manifest.supports)
    channels, places, noise = np.full(mask.shape, np.nan), [], list[float | None]()
    asked = tasks.select(*_PLACE, "collective", "bin").iter_rows()
    for row, (*place, collective, size_bin) in enumerate(asked):
        places.append((collective, place[1], place[1] * place[2], size_bin))
        support = supports.get(tuple(place))
        noise.append(None if support is None else support.noise_bands.get(collective))
        if support is None:
            continue
        for action, bins in (support.gated or {}).get(collective, {}).items():
            mask[row, int(action)] = size_bin in bins
        if manifest.slack is not None:
            wire = Collective.parse(collective)
            channels[row] = read_back_channels(manifest, support, wire, [size_bin])[0]
    return mask, ChannelRule.of(manifest, places, channels, noise)


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy's name in a report, its folder, and the run that it is of where that is known."""

    name: str
    folder: Path
    run_id: str | None


def named_policies(given: Sequence[str], tracking_uri: str) -> list[NamedPolicy]:
    """Resolve `[NAME=]RUN_OR_ARTIFACT`; the name is that of the run, or of the recipe, by default.

    Names that occur twice get a number. Raises as `policy_directory` and `Manifest.read`.
    """
    found = [_resolve(text, tracking_uri) for text in given]
    counts = Counter(each.name for each in found)
    seen: Counter[str] = Counter()
    for index, each in enumerate(found):
        if counts[each.name] > 1:
            seen[each.name] += 1
            found[index] = replace(each, name=f"{each.name}-{seen[each.name]}")
    return found


def _resolve(text: str, tracking_uri: str) -> NamedPolicy:
    name, equals, named = text.partition("=")
    if not equals or Path(text).exists():
        name, named = "", text
    folder = tracking.policy_directory(named, tracking_uri)
    run_id = tracking.find_run(named, tracking_uri)
    if not name and run_id is not None:
        name = tracking.reopen_run(tracking_uri, run_id).tag("mlflow.runName")
    return NamedPolicy(name or Manifest.read(folder).recipe, folder, run_id)
