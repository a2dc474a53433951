"""Who is compared with whom."""

from collections.abc import Sequence
from functools import partial

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.baselines.online import CoordinateDescent, EpsilonGreedy, Ucb1
from dynamiccl.evaluate.baselines.picking import Picked
from dynamiccl.evaluate.baselines.regression import DecisionTree, GradientBoosting
from dynamiccl.evaluate.baselines.tables import (
    BestFixed,
    FiveBins,
    Interpolated,
    NearestNeighbours,
    NearestSize,
    PooledFixed,
)
from dynamiccl.evaluate.policies import LearnedPolicy, NcclDefault, Oracle, Policy
from dynamiccl.train.policy import TorchPolicy


def make_policies(
    training: TaskGrid,
    validation: TaskGrid,
    catalogue: Catalogue,
    learned: Sequence[tuple[str, TorchPolicy]],
) -> list[Policy]:
    """The learned policies, then the baselines; those with settings tuned on `validation`.

    Last come those that nothing simple can be: searchers, which try configs on the test tasks, and
    the oracle.
    """
    neighbours = partial(NearestNeighbours, training)
    boosting = partial(GradientBoosting, training, catalogue)
    return [
        *(LearnedPolicy(policy, catalogue, name) for name, policy in learned),
        NcclDefault(),
        BestFixed(training),
        PooledFixed(training),
        FiveBins(training),
        NearestSize(training),
        Interpolated(training),
        Picked(neighbours, NearestNeighbours.SETTINGS, validation),
        Picked(partial(DecisionTree, training, catalogue), DecisionTree.SETTINGS, validation),
        Picked(boosting, GradientBoosting.SETTINGS, validation),
        Picked(Ucb1, Ucb1.SETTINGS, validation),
        Picked(partial(EpsilonGreedy, catalogue), EpsilonGreedy.SETTINGS, validation),
        Picked(partial(CoordinateDescent, catalogue), CoordinateDescent.SETTINGS, validation),
        Oracle(),
    ]
