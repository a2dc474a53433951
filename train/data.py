"""The data of a training run: steps, validation bins, and the base of learned times.

The base is NCCL's predicted cost, or none. For each (system, collective, config) a line in size and
group shape is fitted to ln(time / NCCL's cost) of the training tasks, and one to ln(time), both
less NCCL's own choice; the base is that whose lines are less off on the validation tasks.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from dynamiccl.datasets import steps
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import NOISE_KEY, TaskGrid, rows_left_out, task_grid, tuned, usable
from dynamiccl.datasets.costs import read_costs
from dynamiccl.datasets.features import FEATURES, Observations, cold_observations
from dynamiccl.datasets.splits import Split, SplitBy, Splits, split_by
from dynamiccl.datasets.steps import Steps, TrainingSteps
from dynamiccl.datasets.store import content_hash, part_paths, read, scan
from dynamiccl.drawn_worlds import Floats
from dynamiccl.errors import NotEnoughData
from dynamiccl.train.networks import COST_KNOWN, LOG_COST, ActionFeatures, Network
from dynamiccl.train.policy import PolicyModule, forward
from dynamiccl.train.recipe import Recipe
from dynamiccl.train.trigger import Detector, interference_levels, level_shares_of


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What one run reads from a data directory."""

    frame: pl.DataFrame
    parts: Splits
    catalogue: Catalogue
    profiles: list[str]
    #: NCCL's own cost model, where wanted and known.
    costs: pl.DataFrame | None
    training: TrainingSteps
    sequences: Steps | None
    sequence_counts: dict[str, int] | None
    #: The share of a level that slows each cell; None without costs, Trigger or calls.
    level_shares: pl.DataFrame | None
    validation: TaskGrid
    observations: Observations
    digest: str
    left_out: dict[str, int]

    @property
    def cost_start(self) -> int:
        """The context column where NCCL's costs begin; -1 = none."""
        return -1 if self.costs is None else len(FEATURES) + len(self.profiles)

    def sources(self, recipe: Recipe) -> list[Steps]:
        """Steps to train on: sweeps, and calls if there are any."""
        if self.sequences is None or not recipe.use_calls:
            return [self.training.steps]
        charged = self.sequences.charged(recipe.lambda_switch, recipe.lambda_congestion)
        return [self.training.steps, charged.held(recipe.held_calls)]

    def validation_regret(
        self, members: Iterable[Network], margin: float, *, is_unanimous: bool = True
    ) -> float:
        """Mean regret on validation bins; (system, collective) groups weigh equally."""
        module = PolicyModule(members, margin, 0.0, is_unanimous=is_unanimous).eval()
        actions, _ = forward(module, self.observations, self.validation.mask)
        return self.mean_over_groups(actions)

    def default_regret(self) -> float:
        """The same of NCCL's own choice."""
        return self.mean_over_groups(np.full(self.validation.tasks.height, ABSTAIN_ACTION))

    def mean_over_groups(self, actions: npt.NDArray[np.int64]) -> float:
        """Mean regret on validation bins; groups weigh equally."""
        regret = pl.Series(self.validation.regret(actions))
        regrets = self.validation.tasks.select(NOISE_KEY).with_columns(regret=regret)
        groups = regrets.group_by(NOISE_KEY).agg(pl.col("regret").mean())
        return float(np.mean(groups["regret"].to_numpy()))


def load_data(
    data_dir: Path,
    seed: int,
    trigger: str = "",
    *,
    with_costs: bool = False,
    with_calls: bool = True,
    split: str = SplitBy.SIZE,
) -> TrainingData:
    """Read a data directory; `trigger` is a run directory or file of a Trigger.

    Raises what reading raises, NotEnoughData, and UnknownName for a split.
    """
    levels = None if not trigger else partial(interference_levels, Detector.load(Path(trigger)))
    everything = read(data_dir)
    timed = tuned(usable(everything))
    if split_by(split)[0] == SplitBy.SIZE:
        # Sizes that only the default has would leave a part without a task.
        scored = task_grid(everything, Catalogue.from_frame(timed), [*Split]).tasks
        timed = timed.join(scored, on="size_bytes", how="semi")
    parts = Splits.of(timed, split)
    everything = parts.assign(everything)
    frame = tuned(everything)
    timed = usable(frame)
    catalogue = Catalogue.from_frame(timed)
    profiles = sorted(timed["launch_profile"].unique())
    costs = read_costs(data_dir) if with_costs else None
    costs = None if costs is None or costs.is_empty() else costs
    training = steps.training_steps(everything, catalogue, profiles, costs, seed=seed)
    validation = task_grid(frame, catalogue, [Split.VALIDATION])
    if validation.tasks.is_empty():
        raise NotEnoughData(
            f"no validation task: of {validation.unscored.height} tasks that are held out for it "
            f"(split={parts.by}) none has the default and two forced configs measured; measure "
            "sizes of three octaves at least (a sweep over all powers of two does)"
        )
    asked = steps.with_noise(validation.tasks, training.noise)
    sequences, counts, level_shares = None, None, None
    if part_paths(data_dir, "calls"):
        calls = parts.assign(scan(data_dir, "calls").select(steps.CALLS_USED).collect())
        if with_calls:
            sequences, counts = steps.sequence_steps(
                calls, everything, catalogue, profiles, training.noise, levels, costs
            )
        if with_costs and levels is not None:
            level_shares = level_shares_of(calls, levels)
    return TrainingData(
        frame=frame,
        parts=parts,
        catalogue=catalogue,
        profiles=profiles,
        costs=costs,
        training=training,
        sequences=sequences,
        sequence_counts=counts,
        level_shares=level_shares,
        validation=validation,
        observations=cold_observations(asked, profiles, costs),
        digest=content_hash(data_dir),
        left_out=rows_left_out(everything),
    )


def base_residuals(data: TrainingData) -> tuple[float, float] | None:
    """Validation residuals in ln(time), over cost and without; None without costs or two tasks."""
    grid = task_grid(data.frame, data.catalogue, [Split.TRAIN, Split.VALIDATION])
    tasks = steps.with_noise(grid.tasks, data.training.noise)
    context = cold_observations(tasks, data.profiles, data.costs).context
    features = ActionFeatures(data.catalogue.configs, data.cost_start)
    told = features(torch.from_numpy(context)).numpy().astype(np.float64)
    has_cost, time = told[:, :, COST_KNOWN] > 0.5, np.log(grid.times_us)
    values = np.stack([time - told[:, :, LOG_COST], time], axis=2)
    values -= values[:, :1]
    known = grid.mask & has_cost & has_cost[:, :1]
    places = np.log2(tasks.select("size_bytes", "num_nodes", "ranks_per_node").to_numpy())
    place = np.column_stack([np.ones(len(places)), places])
    group = (tasks["system"] + "/" + tasks["collective"]).to_numpy()
    is_train = (tasks["split"] == Split.TRAIN.value).to_numpy()
    off: list[Floats] = []
    for name, action in itertools.product(np.unique(group), range(1, len(data.catalogue))):
        mine, y = known[:, action] & (group == name), values[:, action]
        seen, new = mine & is_train, mine & ~is_train
        if seen.sum() >= 2 and new.any():
            lines = np.linalg.lstsq(place[seen], y[seen], rcond=None)[0]
            off.append(place[new] @ lines - y[new])
    if not off:
        return None
    over_cost, over_time = np.sqrt(np.mean(np.concatenate(off) ** 2, axis=0)).tolist()
    return over_cost, over_time
