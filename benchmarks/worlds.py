"""Simulated worlds whose true times do not follow NCCL's cost table: draws, and scores of choices.

The systems are those of `judge_worlds`: perturbed parametric ones, and H100 nodes with fields.
NCCL's decisions and costs stay, and equal seeds give equal systems. A draw is three noisy cycles of
a sweep of one to learn from, and the same sweep without noise to judge by, on the test sizes.
Intervals are 95 % bootstraps of draws (clusters), and of tasks within each.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from judge_worlds import Field, perturbed

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.cells import tuned
from dynamiccl.datasets.costs import read_costs
from dynamiccl.datasets.episodes import with_noise
from dynamiccl.datasets.features import cold_observations
from dynamiccl.datasets.scoring import TaskGrid, task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.policies import Actions
from dynamiccl.nccl import Config
from dynamiccl.simulator.h100_system import H100System
from dynamiccl.simulator.parts import Parts
from dynamiccl.simulator.system import UNTOUCHED, Call, Launch
from dynamiccl.train.cautious.fit import Fitted
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.policy import forward

#: Shapes of the H100 nodes; left out by turns.
SHAPES: Final = tuple((nodes, ranks) for nodes in (2, 4, 8, 16, 32) for ranks in (4, 8))
SWEEP: Final = """
name = "{name}"
system = "{system}"
collectives = [{collectives}]
algorithms = [{algorithms}]
groups = [{groups}]
sizes = {{ min = "1K", max = "1G", steps_per_octave = 2 }}
nccl_version = "{version}"
cycles = {cycles}
{channels}
[simulator]
seed = {seed}
{noise}
"""
NO_NOISE: Final = "noise_sigma = 0.0\ntail_probability = 0.0\ndrift_sigma = 0.0"
FIVE: Final = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
#: What counts as slower, and as something to gain.
WORSE: Final = 0.01
#: What `summary` tells, each with `_lo` and `_hi`.
FIGURES: Final = ("mean_regret", "headroom_regret", "share_worse", "gain_kept")


class FieldSystem:
    """H100 nodes with times scaled by a random field; see the module."""

    def __init__(self, seed: int) -> None:
        """The fields are drawn when first used."""
        self._inner = H100System()
        self._seed = seed
        self._fields: dict[tuple[int, ...], Field] = {}

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of the H100 nodes."""
        return getattr(self._inner, name)

    def parts(self, call: Call, config: Config, launch: Launch = UNTOUCHED) -> Parts:
        """The nodes' time in parts, all scaled by the field."""
        found = self._inner.parts(call, config, launch)
        key = (int(call.collective), int(found.algorithm), int(found.protocol))
        if key not in self._fields:
            self._fields[key] = Field((self._seed, *key))
        place = np.log2(
            [call.size_bytes, call.group.num_nodes, call.group.ranks_per_node, found.num_channels]
        )
        factor = math.exp(self._fields[key](place).item())
        return replace(
            found,
            fixed_us=found.fixed_us * factor,
            intra_us=found.intra_us * factor,
            inter_us=found.inter_us * factor,
        )


@dataclass(frozen=True, slots=True)
class World:
    """A kind of world, and what is swept of it."""

    make: Callable[[int], Any]
    shapes: Sequence[tuple[int, int]]
    algorithms: Sequence[str]
    collectives: Sequence[str] = FIVE
    channels: Sequence[int] = ()

    def sweep(self, out: Path, seed: int, name: str, cycles: int, noise: str) -> Path:
        """Write a sweep of one draw; returns its data set."""
        system = self.make(seed)
        groups = [f"{{ num_nodes = {n}, ranks_per_node = {r} }}" for n, r in self.shapes]
        text = SWEEP.format(
            name=name,
            system=system.name,
            collectives=_quoted(self.collectives),
            algorithms=_quoted(self.algorithms),
            groups=", ".join(groups),
            version=system.nccl_version,
            cycles=cycles,
            channels=f"num_channels = {list(self.channels)}" if self.channels else "",
            seed=seed,
            noise=noise,
        )
        return simulate(text, out, system)


WORLDS: Final[Mapping[str, World]] = {
    "h100": World(
        FieldSystem,
        SHAPES,
        ("Ring", "Tree", "NVLSTree"),
        ("AllReduce", "AllGather", "ReduceScatter"),
    ),
    "b300": World(
        partial(perturbed, "b300-nvlink"),
        [(1, 8)],
        ("Ring", "Tree", "NVLS"),
        channels=(4, 8, 16, 24, 32),
    ),
    "gb10": World(
        partial(perturbed, "gb10-roce"), [(4, 1)], ("Ring", "Tree"), channels=(1, 2, 4, 8)
    ),
    "a100": World(
        partial(perturbed, "a100-nvswitch"), [(1, 8)], ("Ring", "Tree"), channels=(2, 4, 8, 16, 24)
    ),
}


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@dataclass(frozen=True, slots=True)
class Draw:
    """One world, its data and the truth on the test sizes."""

    data: TrainingData
    test: TaskGrid
    truth: TaskGrid
    costs: pl.DataFrame

    @classmethod
    def make(cls, kind: str, seed: int, folder: Path) -> "Draw":
        """Run its sweeps, with noise and without."""
        world = WORLDS[kind]
        noisy = world.sweep(folder / "data", seed, "noisy", 3, "")
        exact = world.sweep(folder / "truth", seed, "truth", 1, NO_NOISE)
        data = load_data(noisy, seed, with_costs=True)
        test = task_grid(data.frame, data.catalogue, [Split.TEST])
        truth = task_grid(tuned(read(exact)), data.catalogue, [Split.TEST])
        return cls(data, test, truth, read_costs(noisy))

    def parts(self) -> tuple[TaskGrid, TaskGrid]:
        """Training and validation tasks."""
        frame, catalogue = self.data.frame, self.data.catalogue
        return (
            task_grid(frame, catalogue, [Split.TRAIN]),
            task_grid(frame, catalogue, [Split.VALIDATION]),
        )

    def only(self, is_kept: pl.Expr) -> "Draw":
        """A draw with a subset of the training data."""
        return replace(self, data=replace(self.data, frame=self.data.frame.filter(is_kept)))

    def ask(self, fitted: Fitted, grid: TaskGrid, *, costs: bool, sure: bool) -> Actions:
        """The choices of a cautious policy."""
        policy = fitted.policy
        asked = with_noise(grid.tasks, self.data.training.noise)
        told = cold_observations(asked, self.data.profiles, self.costs if costs else None)
        kept = policy.caution
        if not sure:
            policy.caution = torch.zeros_like(kept)
        chosen = forward(policy, told, grid.mask)[0]
        policy.caution = kept
        return chosen


def judged(
    choices: Mapping[str, Actions], truth: TaskGrid, setting: str, draw: int
) -> list[dict[str, Any]]:
    """One row for each policy and task."""
    best = truth.oracle_us
    rows = []
    for name, actions in choices.items():
        time = truth.chosen_us(actions)
        rows += [
            {
                "setting": setting,
                "draw": draw,
                "policy": name,
                "regret": float(time[i] / best[i] - 1.0),
                "headroom": bool(truth.default_us[i] > (1.0 + WORSE) * best[i]),
                "worse": bool(time[i] > (1.0 + WORSE) * truth.default_us[i]),
                "acts": bool(actions[i] != ABSTAIN_ACTION),
                "gain": float(np.log(truth.default_us[i] / time[i])),
                "possible": float(np.log(truth.default_us[i] / best[i])),
            }
            for i in range(len(time))
        ]
    return rows


def summary(rows: pl.DataFrame, draws: int = 1000) -> dict[str, float]:
    """Metrics of one policy in one setting, with intervals."""
    by_draw = [part for _, part in rows.group_by("draw", maintain_order=True)]
    random = np.random.default_rng(0)

    def figures(parts: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        every = np.concatenate(parts)
        regret, headroom, worse, gain, possible = every.T
        on = headroom > 0
        return np.array(
            [
                regret.mean(),
                regret[on].mean() if on.any() else np.nan,
                worse.mean(),
                gain.sum() / possible.sum(),
            ]
        )

    columns = ["regret", "headroom", "worse", "gain", "possible"]
    tables = [part.select(columns).cast(pl.Float64).to_numpy() for part in by_draw]
    point = figures(tables)
    drawn = []
    for _ in range(draws):
        picked = [tables[i] for i in random.integers(0, len(tables), len(tables))]
        drawn.append(figures([t[random.integers(0, len(t), len(t))] for t in picked]))
    low, high = np.nanquantile(drawn, [0.025, 0.975], axis=0)
    found: dict[str, float] = {"tasks": float(rows.height), "draws": float(len(tables))}
    for i, name in enumerate(FIGURES):
        found |= {name: float(point[i]), f"{name}_lo": float(low[i]), f"{name}_hi": float(high[i])}
    return found


def paired(rows: pl.DataFrame, ours: str, rival: str) -> dict[str, float]:
    """Difference of mean regret (ours - rival) by draw: mean and 95 % bootstrap interval."""
    found = (
        rows.filter(pl.col("policy").is_in([ours, rival]))
        .group_by("draw", "policy")
        .agg(pl.col("regret").mean(), head=pl.col("regret").filter("headroom").mean())
    )
    a, b = (found.filter(pl.col("policy") == name).sort("draw") for name in (ours, rival))
    random = np.random.default_rng(0)
    told: dict[str, float] = {}
    for column in ("regret", "head"):
        apart = (a[column] - b[column]).drop_nulls().to_numpy()
        if not len(apart):
            continue  # there was nothing to gain in any draw
        drawn = [apart[random.integers(0, len(apart), len(apart))].mean() for _ in range(2000)]
        low, high = np.quantile(drawn, [0.025, 0.975])
        told |= {
            column: float(apart.mean()),
            f"{column}_lo": float(low),
            f"{column}_hi": float(high),
        }
    return told
