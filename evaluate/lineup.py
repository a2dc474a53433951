"""The policies of a report: learned ones and baselines."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

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


def _nearest(training: TaskGrid, validation: TaskGrid, _catalogue: Catalogue) -> Policy:
    make = partial(NearestNeighbours, training)
    return Picked(make, NearestNeighbours.SETTINGS, validation)


def _regions(training: TaskGrid, validation: TaskGrid, _catalogue: Catalogue) -> Policy:
    return Picked(partial(RegionTable, training), RegionTable.SETTINGS, validation)


def _tree(training: TaskGrid, validation: TaskGrid, catalogue: Catalogue) -> Policy:
    make = partial(DecisionTree, training, catalogue)
    return Picked(make, DecisionTree.SETTINGS, validation)


def _boosting(training: TaskGrid, validation: TaskGrid, catalogue: Catalogue) -> Policy:
    make = partial(GradientBoosting, training, catalogue)
    return Picked(make, GradientBoosting.SETTINGS, validation)


#: How each baseline that tries nothing is made of training tasks; settings by validation tasks.
BASELINES: Final[Mapping[str, Callable[[TaskGrid, TaskGrid, Catalogue], Policy]]] = {
    NcclDefault.name: lambda *_: NcclDefault(),
    Random.name: lambda *_: Random(),
    BestFixed.name: lambda training, *_: BestFixed(training),
    PooledFixed.name: lambda training, *_: PooledFixed(training),
    FiveBins.name: lambda training, *_: FiveBins(training),
    RegionTable.name: _regions,
    NearestSize.name: lambda training, *_: NearestSize(training),
    Interpolated.name: lambda training, *_: Interpolated(training),
    NearestNeighbours.name: _nearest,
    DecisionTree.name: _tree,
    GradientBoosting.name: _boosting,
}


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
        *(make(training, validation, catalogue) for make in BASELINES.values()),
        *(
            []
            if costs is None or costs.is_empty()
            else [CostTimesResidual(training, catalogue, costs)]
        ),
        Picked(Ucb1, Ucb1.SETTINGS, validation),
        Picked(partial(EpsilonGreedy, catalogue), EpsilonGreedy.SETTINGS, validation),
        Picked(partial(CoordinateDescent, catalogue), CoordinateDescent.SETTINGS, validation),
        Oracle(),
    ]
