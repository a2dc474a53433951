"""The policies of a report: learned ones and baselines."""

from collections.abc import Sequence

import polars as pl

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.evaluate.baselines.costs import CostTimesResidual
from dynamiccl.evaluate.baselines.online import CoordinateDescent
from dynamiccl.evaluate.baselines.regression import GradientBoosting
from dynamiccl.evaluate.baselines.tables import (
    BestFixed,
    FiveBins,
    Interpolated,
    NearestSize,
    PooledFixed,
)
from dynamiccl.evaluate.policies import LearnedPolicy, NcclDefault, Oracle, Policy, Random
from dynamiccl.train.policy import TorchPolicy


def make_policies(
    training: TaskGrid,
    validation: TaskGrid,
    catalogue: Catalogue,
    learned: Sequence[tuple[str, TorchPolicy]],
    costs: pl.DataFrame | None = None,
) -> list[Policy]:
    """The learned policies, then the baselines.

    A learned policy is told training and validation tasks, be it to fit or to choose by, and so are
    baselines. With NCCL's `costs` (`datasets.costs.read_costs`) one of them corrects these.

    Last come those that nothing simple can be: the search, which tries configs on the test tasks,
    and the oracle.
    """
    told = training.joined(validation)
    return [
        *(LearnedPolicy(policy, catalogue, name) for name, policy in learned),
        NcclDefault(),
        Random(),
        BestFixed(told),
        PooledFixed(told),
        FiveBins(told),
        NearestSize(told),
        Interpolated(told),
        GradientBoosting(told, catalogue),
        *([] if costs is None or costs.is_empty() else [CostTimesResidual(told, catalogue, costs)]),
        CoordinateDescent(catalogue),
        Oracle(),
    ]
