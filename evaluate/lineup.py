"""Who is compared with whom."""

from collections.abc import Sequence
from functools import partial

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.baselines.regression import GradientBoosting, NearestNeighbours, pick
from dynamiccl.evaluate.baselines.tables import BestFixed, FiveBins, NearestSize
from dynamiccl.evaluate.policies import LearnedPolicy, NcclDefault, Policy
from dynamiccl.train.policy import TorchPolicy


def make_policies(
    training: TaskGrid,
    validation: TaskGrid,
    catalogue: Catalogue,
    learned: Sequence[tuple[str, TorchPolicy]],
) -> list[Policy]:
    """The learned policies, then the baselines; those with settings tuned on `validation`."""
    neighbours, _ = pick(
        partial(NearestNeighbours, training, catalogue), NearestNeighbours.SETTINGS, validation
    )
    boosted, _ = pick(
        partial(GradientBoosting, training, catalogue), GradientBoosting.SETTINGS, validation
    )
    return [
        *(LearnedPolicy(policy, catalogue, name) for name, policy in learned),
        NcclDefault(),
        BestFixed(training),
        FiveBins(training),
        NearestSize(training),
        neighbours,
        boosted,
    ]
