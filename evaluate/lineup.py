"""The policies of a report: learned ones and baselines."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import polars as pl

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.baselines.costs import CostTimesResidual
from dynamiccl.evaluate.baselines.online import CoordinateDescent, EpsilonGreedy, Ucb1
from dynamiccl.evaluate.baselines.picking import Picked
from dynamiccl.evaluate.baselines.regions import RegionTable
from dynamiccl.evaluate.baselines.regression import DecisionTree, GradientBoosting
from dynamiccl.evaluate.baselines.tables import (
    BestFixed,
    FiveBins,
    Interpolated,
    NearestNeighbours,
    NearestSize,
    PooledFixed,
)
from dynamiccl.evaluate.policies import LearnedPolicy, NcclDefault, Oracle, Policy, Random
from dynamiccl.train.policy import TorchPolicy


def _picked(kind: Any, validation: TaskGrid, *known: Any) -> Policy:
    """A searcher with one of its SETTINGS, made of what is `known`."""
    return Picked(partial(kind, *known), kind.SETTINGS, validation)


def make_policies(
    training: TaskGrid,
    validation: TaskGrid,
    catalogue: Catalogue,
    learned: Sequence[tuple[str, TorchPolicy]],
    costs: pl.DataFrame | None = None,
) -> list[Policy]:
    """The learned policies, then the baselines.

    A learned policy is told training and validation tasks, be it to fit or to choose by, and so are
    baselines: settings are picked on `validation` as fitted to `training`, and fitted to both then.
    With NCCL's `costs` (`datasets.costs.read_costs`) one of them corrects these.

    Last come those that nothing simple can be: searchers, which try configs on the test tasks, and
    the oracle.
    """
    told = training.joined(validation)

    def fitted(kind: Any, *known: Any) -> Policy:
        make, again = (partial(kind, grid, *known) for grid in (training, told))
        return Picked(make, kind.SETTINGS, validation, again)

    return [
        *(LearnedPolicy(policy, catalogue, name) for name, policy in learned),
        NcclDefault(),
        Random(),
        BestFixed(told),
        PooledFixed(told),
        FiveBins(told),
        fitted(RegionTable),
        NearestSize(told),
        Interpolated(told),
        fitted(NearestNeighbours),
        fitted(DecisionTree, catalogue),
        fitted(GradientBoosting, catalogue),
        *([] if costs is None or costs.is_empty() else [CostTimesResidual(told, catalogue, costs)]),
        _picked(Ucb1, validation),
        _picked(EpsilonGreedy, validation, catalogue),
        _picked(CoordinateDescent, validation, catalogue),
        Oracle(),
    ]
