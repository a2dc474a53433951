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


def _picked(kind: Any, validation: TaskGrid, *known: TaskGrid | Catalogue) -> Policy:
    """A baseline with one of its SETTINGS, made of what is `known`."""
    return Picked(partial(kind, *known), kind.SETTINGS, validation)


def make_policies(
    training: TaskGrid,
    validation: TaskGrid,
    catalogue: Catalogue,
    learned: Sequence[tuple[str, TorchPolicy]],
    costs: pl.DataFrame | None = None,
) -> list[Policy]:
    """The learned policies, then the baselines; those with settings tuned on `validation`.

    With NCCL's `costs` (`datasets.costs.read_costs`) one of them corrects these.

    Last come those that nothing simple can be: searchers, which try configs on the test tasks, and
    the oracle.
    """
    return [
        *(LearnedPolicy(policy, catalogue, name) for name, policy in learned),
        NcclDefault(),
        Random(),
        BestFixed(training),
        PooledFixed(training),
        FiveBins(training),
        _picked(RegionTable, validation, training),
        NearestSize(training),
        Interpolated(training),
        _picked(NearestNeighbours, validation, training),
        _picked(DecisionTree, validation, training, catalogue),
        _picked(GradientBoosting, validation, training, catalogue),
        *(
            []
            if costs is None or costs.is_empty()
            else [CostTimesResidual(training, catalogue, costs)]
        ),
        _picked(Ucb1, validation),
        _picked(EpsilonGreedy, validation, catalogue),
        _picked(CoordinateDescent, validation, catalogue),
        Oracle(),
    ]
