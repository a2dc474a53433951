"""Policies and baselines on worlds whose times do not follow NCCL's cost table.

A draw is a world of its own: three noisy cycles of a sweep to learn from, and the same sweep
without noise to judge by, on the test sizes. Every rival chooses twice: what it predicts to be
fastest, and as careful as the policy (`cautious`: P(acts and is slower) <= 1 %, found on tasks held
out), so that gains are compared at equal safety. *Slower* is by over 1 % in the truth. On H100
nodes whole group shapes are left out, too: each of the ten by turns, and all above four nodes.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import torch
from learning_cautious import Cautious
from learning_figures import parallel
from worlds import SHAPES, WORLDS, Draw, judged, paired, summary

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.baselines.costs import CostTimesResidual
from dynamiccl.evaluate.baselines.picking import Picked
from dynamiccl.evaluate.baselines.regression import GradientBoosting
from dynamiccl.evaluate.baselines.tables import Interpolated, NearestNeighbours
from dynamiccl.evaluate.policies import Actions, LearnedPolicy
from dynamiccl.train.cautious.fit import fit_gaussian
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe

ALPHA: Final = 0.01
#: Trained on at most so many nodes, judged on more.
FEW_NODES: Final = 4
OURS: Final = "gaussian-process, cautious"
RIVALS: Final = ("k-nearest, cautious", "gradient-boosting, cautious", "interpolated, cautious")
#: Recipes of d3rlpy.
NETWORKS: Final = ("ddqn-dueling", "ddqn-actions")
LEFT_OUT: Final = "one shape left out"


def seen_systems(kind: str, seed: int) -> list[dict[str, Any]]:
    """Rows of a draw: the score of each policy on each test task."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        draw = Draw.make(kind, seed, Path(folder))
    training, validation = draw.parts()
    catalogue = draw.data.catalogue
    neighbours = partial(NearestNeighbours, training)
    boosting = partial(GradientBoosting, training, catalogue)
    picked = Picked(neighbours, NearestNeighbours.SETTINGS, validation)
    boosted = Picked(boosting, GradientBoosting.SETTINGS, validation)
    near, trees = (each.setting_of[training.tasks["system"][0]] for each in (picked, boosted))
    made: Mapping[str, Callable[[TaskGrid], Any]] = {
        "k-nearest": lambda grid: NearestNeighbours(grid, near),
        "gradient-boosting": lambda grid: GradientBoosting(grid, catalogue, trees),
        "interpolated": Interpolated,
    }
    choices: dict[str, Actions] = {"nccl-default": np.zeros(len(draw.test.tasks), dtype=np.int64)}
    for name, make in made.items():
        choices[name] = make(training).choose(draw.test)
        choices[f"{name}, cautious"] = Cautious(make, training, validation, ALPHA).choose(draw.test)
    coverage: dict[str, float] = {}
    for costs in (True, False):
        data = draw.data if costs else replace(draw.data, costs=None)
        fitted = fit_gaussian(data, alpha=ALPHA, seed=seed)
        name = "gaussian-process" if costs else "gaussian-process without costs"
        choices[name] = draw.ask(fitted, draw.test, costs=costs, sure=False)
        choices[f"{name}, cautious"] = draw.ask(fitted, draw.test, costs=costs, sure=True)
        coverage[name] = fitted.of_sizes[0].coverage
    rows = judged(choices, draw.truth, kind, seed)
    return [{**row, "coverage": coverage.get(row["policy"])} for row in rows]


def networks(kind: str, seed: int) -> list[dict[str, Any]]:
    """Rows of networks, which take minutes: with an output for each action, and as inputs."""
    torch.set_num_threads(1)
    choices: dict[str, Actions] = {}
    with tempfile.TemporaryDirectory() as folder:
        draw = Draw.make(kind, seed, Path(folder))
        for name in NETWORKS:
            uri = f"sqlite:///{folder}/{name}.db"
            recipe = make_recipe(name)
            data = Path(folder) / "data"
            done = fit(data, recipe, experiment="worlds", tracking_uri=uri, seed=seed)
            policy = TorchPolicy.load(Path(done.run_directory) / "policy")
            choices[name] = LearnedPolicy(policy, draw.data.catalogue, name).choose(draw.test)
    return judged(choices, draw.truth, kind, seed)


def unseen_shapes(kind: str, seed: int) -> list[dict[str, Any]]:
    """The same for each shape that is left out, and for all above four nodes."""
    rows = []
    for setting, cluster, less, held in left_out(kind, seed):
        training, _ = less.parts()
        choices = {"nccl-default": np.zeros(held.test.tasks.height, dtype=np.int64)}
        fitted = fit_gaussian(less.data, alpha=ALPHA, seed=seed)
        choices["gaussian-process"] = less.ask(fitted, held.test, costs=True, sure=False)
        choices[OURS] = less.ask(fitted, held.test, costs=True, sure=True)
        for by_rank in (False, True):
            rival = CostTimesResidual(training, less.data.catalogue, less.costs, by_rank=by_rank)
            name = f"cost x residual, by size{' a rank' if by_rank else ''}"
            choices[name] = rival.choose(held.test)
        rows += judged(choices, held.truth, setting, cluster)
    return rows


def left_out(kind: str, seed: int) -> Iterator[tuple[str, int, Draw, Draw]]:
    """(setting, cluster, training draw, test draw), leaving out shapes in turn.

    Each shape of each draw is a cluster of its own: what is resampled for the intervals.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        draw = Draw.make(kind, seed, Path(folder))
    few = pl.col("num_nodes") <= FEW_NODES
    settings = [("trained on few nodes", seed, few)]
    for number, (nodes, ranks) in enumerate(SHAPES):
        is_it = (pl.col("num_nodes") == nodes) & (pl.col("ranks_per_node") == ranks)
        settings.append((LEFT_OUT, seed * len(SHAPES) + number, ~is_it))
    for setting, cluster, is_kept in settings:
        held = np.flatnonzero(~draw.test.tasks.select(is_kept).to_series().to_numpy())
        judged_on = replace(draw, test=draw.test.take(held), truth=draw.truth.take(held))
        yield setting, cluster, draw.only(is_kept), judged_on


def perturbed_figures(draws: int, shape_draws: int) -> dict[str, Any]:
    """By setting and policy the figures, ours against each rival, and how well it is calibrated."""
    jobs = [("seen", kind, seed) for seed in range(draws) for kind in WORLDS]
    jobs += [("unseen", "h100", seed) for seed in range(shape_draws)]
    frame = _rows(jobs)
    settings = _summaries(frame)
    against = {
        kind: {rival: paired(frame.filter(setting=kind), OURS, rival) for rival in RIVALS}
        for kind in WORLDS
    }
    # Of the Gaussian process with costs, once a draw.
    covered = frame.filter(policy="gaussian-process").drop_nulls("coverage")
    coverage = covered.unique(["setting", "draw"])["coverage"].to_numpy()
    return {
        "data_sets": _named(settings),
        "worlds_draws": draws,
        "worlds_shape_draws": shape_draws,
        "worlds_paired": against,
        "calibration_coverage": float(coverage.mean()),
        "calibration_coverage_lo": float(np.quantile(coverage, 0.025)),
        "calibration_coverage_hi": float(np.quantile(coverage, 0.975)),
        **_headline(settings),
    }


def network_figures(draws: int) -> dict[str, Any]:
    """Networks in the same tables, on some of the draws: they take minutes each."""
    jobs = [("networks", kind, seed) for seed in range(draws) for kind in WORLDS]
    return {"data_sets": _named(_summaries(_rows(jobs))), "worlds_network_draws": draws}


def _rows(jobs: Sequence[tuple[str, str, int]]) -> pl.DataFrame:
    rows: list[dict[str, Any]] = []
    for _, found in parallel(_one, jobs):
        rows += found
    return pl.DataFrame(rows, infer_schema_length=None).sort("setting", "draw", maintain_order=True)


def _summaries(frame: pl.DataFrame) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {}
    for (setting, policy), part in frame.group_by("setting", "policy", maintain_order=True):
        settings.setdefault(str(setting), {})[str(policy)] = summary(part)
    return settings


def _named(settings: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{setting}, worlds": policies for setting, policies in settings.items()}


def _headline(settings: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """The figures that bars are about, by the names of out/bench/learning.json."""
    found: dict[str, float] = {}

    def take(name: str, setting: str, policy: str, figure: str) -> None:
        for end in ("", "_lo", "_hi"):
            found[f"{name}{end}"] = settings[setting][policy][f"{figure}{end}"]

    for prefix, policy in (("", OURS), ("k_nearest_", RIVALS[0]), ("boosting_", RIVALS[1])):
        for figure in ("mean_regret", "headroom_regret", "share_worse"):
            take(f"{prefix}grid_{figure}", "h100", policy, figure)
        for figure in ("mean_regret", "headroom_regret"):
            take(f"{prefix}b300_{figure}", "b300", policy, figure)
    take("gain_kept", "h100", OURS, "gain_kept")
    for figure in ("mean_regret", "share_worse"):
        take(f"shape_left_out_{figure}", LEFT_OUT, OURS, figure)
    return found


def _one(part: str, kind: str, seed: int) -> list[dict[str, Any]]:
    works = {
        "seen": seen_systems,
        "unseen": unseen_shapes,
        "networks": networks,
    }
    return works[part](kind, seed)
